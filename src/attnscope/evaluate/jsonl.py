"""Files of an evaluation that go on growing: nothing in them is lost or half there."""

import json
import os
from pathlib import Path
from typing import Any

from attnscope.errors import InputError


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of JSON that are there, none if there is no such file. One that was cut off at the
    end is taken away."""
    if not file.is_file():
        return []
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(file, len(whole))
    try:
        # By the byte: an answer may hold other characters that end a line.
        return [json.loads(line) for line in whole.split(b"\n")[:-1]]
    except ValueError as error:
        raise InputError(
            f"{file} is damaged ({error}); choose another directory, or delete the file to "
            "generate its completions again",
            code="damaged-file",
            path=str(file),
        ) from error


def written_lines(rows: list[dict[str, Any]]) -> bytes:
    """As they are read again."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def replace_whole(file: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = file.with_name(f"{file.name}.part")
    temporary.write_bytes(content)
    os.replace(temporary, file)
