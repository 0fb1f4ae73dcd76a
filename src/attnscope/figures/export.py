"""Writes a figure as PNG (twice the size), SVG, PDF, offline HTML, CSV and Markdown.

Each file is written under a temporary name and then renamed, so that no file is incomplete.
"""

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import polars as pl
import vl_convert

from attnscope.errors import InputError, unknown
from attnscope.figures.drawing import Drawing
from attnscope.figures.page import page
from attnscope.figures.text_format import inline, no_formula
from attnscope.paths import write_file


def png(figure: Drawing, scale: float = 2.0) -> bytes:
    """A figure as PNG, with the alternative text in its metadata."""
    image = bytes(vl_convert.svg_to_png(figure.svg, scale=scale))
    return _with_text(image, "Description", figure.alt)


def _with_text(image: bytes, key: str, text: str) -> bytes:
    """PNG with an iTXt chunk right after the header (8 bytes of signature, 25 of IHDR)."""
    body = key.encode("latin-1") + b"\0\0\0\0\0" + text.encode()
    chunk = b"iTXt" + body
    framed = struct.pack(">I", len(body)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return image[:33] + framed + image[33:]


def csv(figure: Drawing) -> str:
    """The data of a figure: every number shown, in the order shown."""
    return as_csv(figure.data)


def as_csv(frame: pl.DataFrame) -> str:
    """A table as CSV, without anything that a spreadsheet program would read as a formula."""
    texts = pl.col(pl.String).map_elements(no_formula, return_dtype=pl.String)
    return frame.with_columns(texts).write_csv()


def markdown(figure: Drawing) -> str:
    """The description of a figure, headed by its picture and caption."""
    alt = inline(figure.alt.replace("\n", " "))
    return (
        f"## {inline(figure.title)}\n\n![{alt}]({figure.name}.png)\n\n"
        f"{inline(figure.caption)}\n\n{figure.description}\n"
    )


FORMATS: Mapping[str, Callable[[Drawing], bytes]] = {
    "png": png,
    "svg": lambda figure: figure.svg.encode(),
    "pdf": lambda figure: bytes(vl_convert.svg_to_pdf(figure.svg)),
    "html": lambda figure: page([figure], title=figure.title).encode(),
    "csv": lambda figure: csv(figure).encode(),
    "md": lambda figure: markdown(figure).encode(),
}
"""The function that makes the bytes of a file, by file extension."""


def write(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}; choose another folder with --out, or check "
            "its free space and permissions",
            code="cannot-write",
            path=str(path),
        ) from error


def save(figure: Drawing, folder: str | Path, formats: Sequence[str] | None = None) -> list[Path]:
    """Write a figure into `folder` as NAME.png, NAME.svg …; by default in all six formats."""
    chosen = list(FORMATS) if formats is None else list(formats)
    for ending in chosen:
        if ending not in FORMATS:
            raise unknown("format", ending, FORMATS)
    paths = []
    for ending in chosen:
        path = Path(folder) / f"{figure.name}.{ending}"
        write(path, FORMATS[ending](figure))
        paths.append(path)
    return paths
