"""Find the files of a model by its name.

    zoo:NAME                 bundled, or downloaded once
    FOLDER                   with config.json, a tokenizer and safetensors
    FILE.gguf                one file, unpacked once
    OWNER/MODEL[@REVISION]   on the Hugging Face hub, or in its local cache
    BASE+ADAPTER             any of these, with a PEFT adapter: a folder, a hub id, or zoo:NAME

`Source.pinned` is the same name with the commit, so that a later load gets the same files.
"""

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from attnscope import zoo
from attnscope.errors import ModelError, bad_path
from attnscope.loading import fetch
from attnscope.loading.adapter import CONFIG, WEIGHTS, base_of, check_adapter, is_adapter
from attnscope.loading.gguf import unpacked
from attnscope.loading.revision import digest_of_file, digest_of_folder
from attnscope.loading.weights import WHOLE


@dataclass(frozen=True)
class Source:
    """The location of a model."""

    name: str
    """The requested name."""
    location: str
    """The folder or the hub id."""
    commit: str | None = None
    """The commit of a hub id."""
    gguf: Path | None = None
    """The GGUF file that the folder was unpacked from."""
    adapter: Path | None = None

    @property
    def folder(self) -> Path | None:
        """The local folder; None for a hub id."""
        return None if self.commit is not None else Path(self.location)

    @property
    def packed(self) -> Path | None:
        """The GGUF file, if its weights were too large to unpack."""
        return None if (Path(self.location) / WHOLE).is_file() else self.gguf

    @property
    def pinned(self) -> str:
        """A name that finds the same files again."""
        if self.commit is None:
            return self.name
        _, plus, adapter = self.name.partition("+")
        return f"{self.location}@{self.commit}{plus}{adapter}"

    @cached_property
    def revision(self) -> str:
        """The commit or the digest of the files; with an adapter, of both."""
        if self.commit is not None:
            base = self.commit
        elif self.gguf is not None:
            base = digest_of_file(self.gguf)
        else:
            base = digest_of_folder(Path(self.location))
        return base if self.adapter is None else f"{base}+{digest_of_folder(self.adapter)}"


def find(
    name: str | Path, *, revision: str | None = None, adapter: str | Path | None = None
) -> Source:
    """Find a model by its name, and check its files without opening the weights."""
    name = str(name)
    request = name if adapter is None else f"{name}+{adapter}"
    base, beside = _divide(name)
    named = [str(one) for one in (beside, adapter) if one is not None]
    if base.startswith(zoo.PREFIX) and zoo.is_adapter(base):
        base, named = zoo.base_of(base), [base, *named]
    if len(named) > 1:
        raise ModelError(
            f"{request!r} names two adapters, {named[0]!r} and {named[1]!r}; give one",
            code="two-adapters",
            adapters=named,
        )
    adapter_folder = _adapter(named[0]) if named else None
    hub_id, at, pinned = base.partition("@")
    if at and not _exists(base):
        if revision not in (None, pinned):
            raise ModelError(
                f"{base!r} already names a revision; omit revision={revision!r}",
                code="two-revisions",
                revision=revision,
            )
        base, revision = hub_id, pinned
    return _base(request, base, revision, adapter_folder)


def _divide(name: str) -> tuple[str, str | None]:
    """Split a name into base and adapter; an existing path with a + is not split."""
    base, plus, adapter = name.partition("+")
    if not plus or _exists(name):
        return name, None
    if not base or not adapter:
        raise bad_path(name, "is not BASE+ADAPTER: one side of the + is empty", "bad-model-name")
    return base, adapter


def _exists(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, unknown user, null byte
        return False


def _adapter(name: str) -> Path:
    if name.startswith(zoo.PREFIX):
        if not zoo.is_adapter(name):
            raise bad_path(name, "is a model, not an adapter", "no-adapter")
        folder = zoo.folder(name)
    elif _exists(name) or not _is_hub_id(name):
        folder = Path(os.path.expanduser(name))
    else:
        folder = Path(_cached(name, CONFIG, None)).parent
        _cached(name, WEIGHTS, folder.name)
    check_adapter(folder)
    return folder


def _base(request: str, base: str, revision: str | None, adapter: Path | None) -> Source:
    if base.startswith(zoo.PREFIX):
        _no_revision(base, revision)
        if base.removeprefix(zoo.PREFIX) in zoo.FETCHED:
            base = str(fetch.where(base) or fetch.get(base))
        else:
            return Source(request, str(zoo.folder(base)), adapter=adapter)
    if base.endswith(".gguf") and not Path(base).is_dir():
        _no_revision(base, revision)
        file = Path(os.path.expanduser(base))
        if not file.is_file():
            raise bad_path(base, "does not exist", "file-missing")
        return Source(request, str(unpacked(file)), gguf=file, adapter=adapter)
    if _exists(base) or not _is_hub_id(base):
        _no_revision(base, revision)
        return Source(request, str(_folder(base)), adapter=adapter)
    commit = Path(_cached(base, "config.json", revision)).parent.name
    return Source(request, base, commit=commit, adapter=adapter)


def _no_revision(base: str, revision: str | None) -> None:
    if revision is not None:
        problem = f"is no hub id, so it has no revision {revision!r}; omit the revision"
        raise bad_path(base, problem, "no-revision", revision=revision)


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not name.startswith(".")


def _folder(name: str) -> Path:
    """The folder of a model."""
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir():
        problem = "is not a folder; give a folder with config.json, or a .gguf file"
        raise bad_path(name, problem, "no-folder")
    if is_adapter(folder):
        if (folder / "config.json").is_file():
            problem = f"has a model (config.json) and an adapter ({CONFIG}); move one of them"
            raise bad_path(name, problem, "model-and-adapter")
        base = base_of(folder) or "BASE"
        problem = (
            f"is an adapter and needs its base: load({base!r}, adapter={name!r}), or "
            f"{base}+{name} on the command line"
        )
        raise bad_path(name, problem, "adapter-without-base", base=base)
    if not (folder / "config.json").is_file():
        files = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "none"
        raise bad_path(name, f"has no config.json; its files: {files}", "no-config")
    return folder


def _cached(name: str, file: str, revision: str | None) -> str:
    """A file of a hub model, downloaded if necessary; its folder has the name of the commit."""
    from transformers.utils import cached_file

    try:
        return str(cached_file(name, file, revision=revision))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = repr(name) if revision is None else f"revision {revision!r} of {name!r}"
        raise ModelError(
            f"could not load {what} (tried the Hugging Face hub and its local cache): {reason}\n"
            "Without a connection, give the path of a folder with config.json, the tokenizer and "
            "*.safetensors files, or of a .gguf file.",
            code="cannot-load",
            model=name,
            revision=revision,
        ) from error
