"""Locks of a run directory: for one process, or for several that write different batches.

Locks are held on the directories themselves, so that nothing is left behind, and they go with the
process, however it ends. Where there are none (some network disks, object stores), a warning says
so: even then every file is written whole or not at all.
"""

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnscope.errors import AttnscopeWarning, InputError
from attnscope.paths import is_remote

_NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


@contextmanager
def locked(folder: Path, *, shared: bool) -> Iterator[None]:
    """Lock the directory: against all other processes, or with `shared` against those that need it
    alone."""
    with _held(folder, shared=shared, wait=False):
        yield


@contextmanager
def locked_briefly(folder: Path) -> Iterator[None]:
    """Wait for the lock, and hold it inside the `with` block."""
    with _held(folder, shared=False, wait=True):
        yield


def _warn(folder: Path, why: str) -> None:
    warnings.warn(
        f"{folder} has no file locks ({why}). Make sure that no other run writes to it",
        AttnscopeWarning,
        stacklevel=6,
    )


@contextmanager
def _held(folder: Path, *, shared: bool, wait: bool) -> Iterator[None]:
    if is_remote(folder):
        if not wait:
            _warn(folder, "an object store has none")
        yield
        return
    try:
        import fcntl
    except ImportError:
        if not wait:
            _warn(folder, "this system has none")
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        try:
            fcntl.flock(handle, how)
        except BlockingIOError:
            raise InputError(
                f"another process is writing to {folder}; wait until it ends, or give another "
                "--out",
                code="run-locked",
                folder=str(folder),
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _warn(folder, str(error))
        yield
    finally:
        os.close(handle)
