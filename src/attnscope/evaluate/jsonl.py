"""Reads and writes the JSONL files of an evaluation, so that an interruption loses no line."""

import json
import os
from pathlib import Path
from typing import Any

from attnscope.errors import InputError


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file; an empty list if the file does not exist.

    An incomplete last line, left by an interruption, is removed from the file.
    """
    if not file.is_file():
        return []
    content = file.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        os.truncate(file, len(complete))
    try:
        # Split at the byte: str.splitlines also splits at other characters of a completion.
        return [json.loads(line) for line in complete.split(b"\n")[:-1]]
    except ValueError as error:
        raise InputError(
            f"{file} is damaged ({error}); choose another directory, or delete the file to "
            "generate its completions again",
            code="damaged-file",
            path=str(file),
        ) from error


def to_lines(rows: list[dict[str, Any]]) -> bytes:
    """Rows as the bytes that `read_lines` reads."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_atomically(file: Path, content: bytes) -> None:
    """Replace a file; after an interruption it has either the old or the new content."""
    temporary = file.with_name(f"{file.name}.part")
    temporary.write_bytes(content)
    os.replace(temporary, file)
