"""Where attnscope keeps what it made or fetched: fetched models, unpacked GGUF files, digests.

One folder of the user's: `ATTNSCOPE_HOME` if that is set, else `attnscope` in the user's cache
directory. Everything in it can be deleted at any time. What is there is whole: it was written
under another name and then renamed.

This module must not know what is kept.
"""

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnscope.errors import ModelError

_UNFINISHED = ".part-"
_OLD = 86_400  # seconds: what a killed process left behind, and no running one still writes


def home() -> Path:
    """The folder; it need not exist yet."""
    if said := os.environ.get("ATTNSCOPE_HOME"):
        return Path(said).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "attnscope"


@contextmanager
def kept_whole(target: Path, what: str) -> Iterator[Path]:
    """A new folder to fill, which becomes `target` at the end; whatever fails, nothing is left.

    Where two processes fill the same, the first one's is kept.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        unfinished = target.parent / f"{_UNFINISHED}{os.getpid()}-{secrets.token_hex(4)}"
        unfinished.mkdir()
    except OSError as error:
        raise _cannot_keep(what, target.parent, error) from error
    try:
        yield unfinished
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    except OSError as error:
        raise _cannot_keep(what, target.parent, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def refuse_if_full(said: str) -> None:
    """Other programs say in words of their own that the disk is full: raise it as what it is."""
    full = os.strerror(errno.ENOSPC)
    if full in said:
        raise OSError(errno.ENOSPC, full)


def _cannot_keep(what: str, folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"cannot keep {what} in {folder}: {error.strerror or error}; nothing half-written is left. "
        "Make room there, or set ATTNSCOPE_HOME to a folder with room"
    )


def _sweep(folder: Path) -> None:
    for left in folder.glob(f"{_UNFINISHED}*"):
        try:
            if time.time() - left.stat().st_mtime > _OLD:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue
