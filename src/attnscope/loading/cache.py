"""The cache folder of attnscope: downloaded models, unpacked GGUF files, digests.

The folder is `ATTNSCOPE_HOME` if set, else `attnscope` in the user's cache directory. All of it
can be deleted at any time. An entry is written under a temporary name and then renamed, so every
entry is complete.
"""

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attnscope.errors import ModelError

_UNFINISHED = ".part-"
_OLD = 86_400  # seconds: older temporary folders are from killed processes


def home() -> Path:
    """The cache folder; it may not exist."""
    if value := os.environ.get("ATTNSCOPE_HOME"):
        return Path(value).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "attnscope"


@contextmanager
def complete_folder(target: Path, what: str) -> Iterator[Path]:
    """A temporary folder that is renamed to `target` at the end, or removed after an error.

    If two processes make the same folder, the first one is kept.
    """
    unfinished = target.parent / f"{_UNFINISHED}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
        _sweep(target.parent)
        yield unfinished
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    except OSError as error:
        raise ModelError(
            f"cannot write {what} to {target.parent}: {error.strerror or error}. Incomplete files "
            "were removed. Free some disk space, or set ATTNSCOPE_HOME to another folder",
            code="cannot-write",
            path=str(target.parent),
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def raise_if_full(message: str) -> None:
    """Raise OSError if the message of another program reports a full disk."""
    full = os.strerror(errno.ENOSPC)
    if full in message:
        raise OSError(errno.ENOSPC, full)


def _sweep(folder: Path) -> None:
    for left in folder.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _OLD:
                shutil.rmtree(left, ignore_errors=True)
