"""Where a run lies: a directory, or an address of an object store (`s3://bucket/run`).

An address is whatever fsspec knows, as an object with the methods of a path. What is written there
is there whole or not at all, as object stores promise; locks there are none.
"""

import errno
import os
import platform
import re
import stat
import threading
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from attnscope.errors import InputError, missing_package

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)  # two letters: C:/ is a disk
_ON_THIS_MACHINE = ("file", "local")
UNFINISHED = ".attnscope.part"
"""How the names of files end while they are written."""


def to_path(where: str | Path) -> Path:
    """The path that is meant: of a file system, or at an address."""
    match = _ADDRESS.fullmatch(str(where))  # a Path makes s3:/x of s3://x
    if match is None or is_remote(where):
        return where if is_remote(where) else Path(where)  # type: ignore[return-value]
    scheme, rest = match.groups()
    address = f"{scheme}://{'/' if scheme in _ON_THIS_MACHINE else ''}{rest}"
    try:
        from upath import UPath
    except ImportError as error:
        raise missing_package(f"the address {address!r}", "universal_pathlib", "remote") from error
    try:
        path = UPath(address)
        path.exists()  # that the store answers, and lets us in
    except Exception as error:  # every store has errors of its own
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(
            f"{address!r} cannot be used: {why}. Give a directory, or an address that fsspec can "
            "open, such as s3://BUCKET/RUN (with s3fs) or gs://… (with gcsfs)",
            code="bad-address",
            path=address,
        ) from error
    return cast(Path, path)


def is_remote(path: Any) -> bool:
    """Whether it is at an address, and not a path of a file system."""
    return not isinstance(path, str | Path)


def open_file(path: Path, *, links: bool = False) -> BufferedReader:
    """A regular file, opened to read; a pipe, a device or, without `links`, a link is an OSError.
    Never waits, as opening a pipe does."""
    if is_remote(path):
        return path.open("rb")
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not links and path.is_symlink():
        raise OSError(errno.EINVAL, "a link, where a file should be", str(path))
    handle = os.open(path, flags | (0 if links else getattr(os, "O_NOFOLLOW", 0)))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_file(path: Path, most: int, *, links: bool = False) -> bytes:
    """The bytes of a regular file of at most so many; else an OSError."""
    with open_file(path, links=links) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
    return content


def write_file(path: Path, content: bytes) -> None:
    """A file, whole or not at all: written under another name, then renamed."""
    if is_remote(path):
        try:
            path.write_bytes(content)  # an object store has it whole or not at all
        except Exception as error:  # every store has errors of its own
            raise OSError(errno.EREMOTEIO, f"{path}: {error}") from error
        return
    # No two write to one temporary file.
    writer = f"{platform.node()[:32]}-{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f"{path.name}.{writer}{UNFINISHED}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
