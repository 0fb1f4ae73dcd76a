"""Where a run lies: a directory, or an address of an object store (`s3://bucket/run`).

An address is whatever fsspec knows, as an object with the methods of a path. What is written there
is there whole or not at all, as object stores promise; locks there are none.

This module must not know what a run is.
"""

import re
from pathlib import Path
from typing import Any, cast

from attnscope.errors import InputError

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)  # two letters: C:/ is a disk
_ON_THIS_MACHINE = ("file", "local")


def place(where: str | Path) -> Path:
    """The path that is meant: of a file system, or at an address."""
    found = _ADDRESS.fullmatch(str(where))  # a Path makes s3:/x of s3://x
    if found is None or is_far(where):
        return where if is_far(where) else Path(where)  # type: ignore[return-value]
    scheme, rest = found.groups()
    address = f"{scheme}://{'/' if scheme in _ON_THIS_MACHINE else ''}{rest}"
    try:
        from upath import UPath
    except ImportError as error:
        raise InputError(
            f"{address!r} is an address: to read and write there, pip install 'attnscope[remote]', "
            "or give a directory"
        ) from error
    try:
        path = UPath(address)
        path.exists()  # that the store answers, and lets us in
    except Exception as error:  # every store has errors of its own
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(
            f"{address!r} cannot be used: {why}. Good ones are directories, and addresses that "
            "fsspec knows and that answer, such as s3://BUCKET/RUN (with s3fs), gs://… (gcsfs)"
        ) from error
    return cast(Path, path)


def is_far(path: Any) -> bool:
    """Whether it is at an address, and not a path of a file system."""
    return not isinstance(path, str | Path)
