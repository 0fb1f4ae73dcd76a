"""From a name to where a model lies.

    zoo:NAME                 bundled, or fetched once
    FOLDER                   with config.json, a tokenizer and safetensors
    FILE.gguf                one file, unpacked once
    OWNER/MODEL[@REVISION]   on the Hugging Face hub, or in its local cache
    BASE+ADAPTER             any of these, with a PEFT adapter: a folder, a hub id, or zoo:NAME

What is found is pinned: the same name with the commit that was found, so that whatever is loaded
later is what was looked at now.

This module must not know configurations, weights or devices.
"""

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from attnscope import zoo
from attnscope.errors import ModelError
from attnscope.loading.adapter import CONFIG, WEIGHTS, base_of, check_adapter, is_adapter
from attnscope.loading.fetch import fetched
from attnscope.loading.gguf import unpacked
from attnscope.loading.revision import digest_of_file, digest_of_folder


@dataclass(frozen=True)
class Source:
    """Where a model lies."""

    name: str
    """As it was asked for."""
    place: str
    """The folder, or the hub id."""
    commit: str | None = None
    """Of a hub id."""
    gguf: Path | None = None
    """The file that the folder was unpacked from."""
    adapter: Path | None = None

    @property
    def folder(self) -> Path | None:
        """None where it is a hub id."""
        return None if self.commit is not None else Path(self.place)

    @property
    def pinned(self) -> str:
        """A name that finds the same again."""
        if self.commit is None:
            return self.name
        _, plus, adapter = self.name.partition("+")
        return f"{self.place}@{self.commit}{plus}{adapter}"

    @cached_property
    def revision(self) -> str:
        """Which weights these are; with an adapter, those of both."""
        if self.commit is not None:
            base = self.commit
        elif self.gguf is not None:
            base = digest_of_file(self.gguf)
        else:
            base = digest_of_folder(Path(self.place))
        return base if self.adapter is None else f"{base}+{digest_of_folder(self.adapter)}"


def find(
    name: str | Path, *, revision: str | None = None, adapter: str | Path | None = None
) -> Source:
    """Where a model lies, checked as far as it can be without opening its weights."""
    name = str(name)
    asked = name if adapter is None else f"{name}+{adapter}"
    base, beside = _divide(name)
    if beside is not None and adapter is not None:
        raise ModelError(f"{name!r} names an adapter already, and adapter={str(adapter)!r} another")
    beside = str(adapter) if adapter is not None else beside
    if base.startswith(zoo.PREFIX) and zoo.is_adapter(base):
        if beside is not None:
            raise ModelError(f"{base!r} is an adapter itself; it takes no other on top")
        base, beside = zoo.base_of(base), base
    found = None if beside is None else _adapter(beside)
    place, at, pinned = base.partition("@")
    if at and not _exists(base):
        if revision is not None and revision != pinned:
            raise ModelError(
                f"{base!r} names a revision already, and revision={revision!r} another"
            )
        base, revision = place, pinned
    return _base(asked, base, revision, found)


def _divide(name: str) -> tuple[str, str | None]:
    """Base and adapter. A path may hold a + of its own."""
    base, plus, adapter = name.partition("+")
    if not plus or _exists(name):
        return name, None
    if not base or not adapter:
        raise ModelError(f"{name!r} is not BASE+ADAPTER: there is nothing on one side of the +")
    return base, adapter


def _exists(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a zero byte
        return False


def _adapter(name: str) -> Path:
    if name.startswith(zoo.PREFIX):
        if not zoo.is_adapter(name):
            raise ModelError(f"{name!r} is a whole model, not an adapter")
        folder = zoo.folder(name)
    elif _exists(name) or not _is_hub_id(name):
        folder = Path(os.path.expanduser(name))
    else:
        folder = Path(_cached(name, CONFIG, None)).parent
        _cached(name, WEIGHTS, folder.name)
    check_adapter(folder)
    return folder


def _base(asked: str, base: str, revision: str | None, adapter: Path | None) -> Source:
    if base.startswith(zoo.PREFIX):
        _no_revision(base, revision)
        if base.removeprefix(zoo.PREFIX) in zoo.FETCHED:
            base = str(fetched(base))
        else:
            return Source(asked, str(zoo.folder(base)), adapter=adapter)
    if base.endswith(".gguf") and not Path(base).is_dir():
        _no_revision(base, revision)
        file = Path(os.path.expanduser(base))
        if not file.is_file():
            raise ModelError(f"there is no file {base!r}")
        return Source(asked, str(unpacked(file)), gguf=file, adapter=adapter)
    if _exists(base) or not _is_hub_id(base):
        _no_revision(base, revision)
        return Source(asked, str(_folder(base)), adapter=adapter)
    commit = Path(_cached(base, "config.json", revision)).parent.name
    return Source(asked, base, commit=commit, adapter=adapter)


def _no_revision(base: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelError(
            f"{base!r} is no hub id, so it has no revision {revision!r}; what is there is loaded"
        )


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not name.startswith(".")


def _folder(name: str) -> Path:
    """A folder that holds a model."""
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir():
        raise ModelError(
            f"{name!r} is not a folder; a model is a folder with a config.json, or a .gguf file"
        )
    if (folder / "config.json").is_file():
        if is_adapter(folder):
            raise ModelError(
                f"{name!r} holds a whole model (config.json) and an adapter ({CONFIG}); move one "
                "of them away, so that it is clear which is meant"
            )
        return folder
    if is_adapter(folder):
        base = base_of(folder) or "BASE"
        raise ModelError(
            f"{name!r} is an adapter, and needs its base: load({base!r}, adapter={name!r}), or "
            f"{base}+{name} on the command line"
        )
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise ModelError(f"{name!r} has no config.json, so it is no model; it holds: {found}")


def _cached(name: str, file: str, revision: str | None) -> str:
    """A file of a hub model, fetched if need be; its folder is named by the commit."""
    from transformers.utils import cached_file

    try:
        found = cached_file(name, file, revision=revision)
    except Exception as error:
        raise ModelError(_not_there(name, revision, error)) from error
    return str(found)


def _not_there(name: str, revision: str | None, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    what = repr(name) if revision is None else f"revision {revision!r} of {name!r}"
    return (
        f"could not load {what} (tried the Hugging Face hub and its local cache): {reason}\n"
        "Without a connection, give the path of a folder that holds config.json, the tokenizer and "
        "*.safetensors files, or of a .gguf file."
    )
