"""Reads pictures from files, bytes and base64, with limits on their size."""

from __future__ import annotations

import base64
import binascii
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import InputError, missing_package

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read; the other decoders of pillow are never called."""
MAX_PIXELS = 50_000_000
"""Largest picture that is decoded; its size is read from the header first."""
MAX_BYTES = 64 * 2**20
"""Largest file that is read."""
DATA_URL = "data:image/"
LONGEST_PATH = 200
"""Characters of a path; a longer text is a picture in base64, unless there is such a file."""
_BEGINNINGS = {
    b"\x89PNG": ".png",
    b"\xff\xd8": ".jpg",
    b"RIFF": ".webp",
    b"GIF8": ".gif",
    b"BM": ".bmp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
}
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Endings of the files of a folder that are pictures."""


def read_picture(source: str | Path | bytes, base: Path | None = None) -> Image:
    """A picture in RGB, turned upright, from a path, bytes, base64 text or a data URL.

    Relative paths start at `base`; default: the current folder.
    """
    return decode(*picture_bytes(source, base))


def decode(data: bytes, name: str) -> Image:
    """The picture of a file's bytes; `name` is for messages."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise missing_package("a prompt with pictures", "pillow", "vision") from error
    if len(data) > MAX_BYTES:
        raise _too_large(name, f"{len(data):,} bytes", f"{MAX_BYTES:,} bytes")
    try:
        opened = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = opened.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(name, "too many pixels", f"{MAX_PIXELS:,} pixels") from error
    except Exception as error:
        raise _broken(name, error) from error
    if width * height > MAX_PIXELS:
        raise _too_large(name, f"{width} × {height} pixels", f"{MAX_PIXELS:,} pixels")
    try:
        upright: Any = ImageOps.exif_transpose(opened)
        return upright.convert("RGB")  # type: ignore[no-any-return]
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        raise _broken(name, error) from error


def blank_picture(picture: Image) -> Image:
    """A picture of the same size in one colour: the mean of the picture."""
    from PIL import Image, ImageStat

    red, green, blue = (round(mean) for mean in ImageStat.Stat(picture).mean)
    return Image.new("RGB", picture.size, (red, green, blue))


def suffix_of(data: bytes) -> str:
    """The usual ending of a picture file, from its first bytes; empty if they are unknown."""
    return next((ending for start, ending in _BEGINNINGS.items() if data.startswith(start)), "")


def is_path(source: Any) -> bool:
    """Whether a text names a file, and is not a picture in base64."""
    return (
        isinstance(source, str | Path)
        and len(str(source)) <= LONGEST_PATH
        and not str(source).startswith(DATA_URL)
    )


def picture_bytes(source: str | Path | bytes, base: Path | None = None) -> tuple[bytes, str]:
    """The bytes of a picture file, and its name for messages; arguments as of `read_picture`."""
    if isinstance(source, bytes):
        return source, "the picture"
    text = str(source)
    if isinstance(source, str) and text.startswith(DATA_URL):
        return from_base64(text.partition(",")[2]), "the picture"
    path = (base or Path()) / os.path.expanduser(text)
    if os.path.isfile(path):  # unlike pathlib's, no error for very long names
        if path.stat().st_size > MAX_BYTES:
            raise _too_large(text, f"{path.stat().st_size:,} bytes", f"{MAX_BYTES:,} bytes")
        return path.read_bytes(), text
    if not is_path(source):
        return from_base64(text), "the picture"
    raise InputError(
        f"there is no picture {text!r}; give the path of a file ({', '.join(FORMATS)}), or the "
        "file itself in base64",
        code="no-image-file",
        path=text,
    )


def from_base64(text: str) -> bytes:
    """The bytes of a picture file in base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(
            f"the picture is not base64 ({error}); encode the bytes of a file",
            code="broken-image",
            picture=text[:40],
        ) from error


def _too_large(name: str, size: str, limit: str) -> InputError:
    return InputError(
        f"{name!r} is too large: {size}, the limit is {limit}; make the picture smaller",
        code="image-too-large",
        picture=name,
        size=size,
    )


def _broken(name: str, error: Exception) -> InputError:
    reason = str(error).partition(" <_io.")[0].partition("\n")[0] or type(error).__name__
    return InputError(
        f"{name!r} cannot be read as a picture ({reason}); known formats: {', '.join(FORMATS)}",
        code="broken-image",
        picture=name,
    )
