"""Pictures from outside: paths, bytes and base64, and a clear error for each bad one."""

import base64
import io
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attnscope.errors import InputError
from attnscope.vision.pictures import MAX_BYTES, decode, read_picture


def png(width: int = 8, height: int = 6) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 10)).save(stream, "PNG")
    return stream.getvalue()


def header_of(width: int, height: int) -> bytes:
    """The beginning of a PNG file that claims a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"\0" * 10))


def code_of(source: object, base: Path | None = None) -> str:
    with pytest.raises(InputError) as error:
        read_picture(source, base)  # type: ignore[arg-type]
    return error.value.code


def test_a_picture_can_be_a_path_bytes_base64_or_a_data_url(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    text = base64.b64encode(png(64, 60) + b" " * 100).decode()
    assert len(text) > 200
    for source, size in (
        ("a.png", (8, 6)),
        (tmp_path / "a.png", (8, 6)),
        (png(), (8, 6)),
        (text, (64, 60)),
        ("data:image/png;base64," + base64.b64encode(png()).decode(), (8, 6)),
    ):
        picture = read_picture(source, tmp_path)
        assert picture.size == size
        assert picture.mode == "RGB"


def test_a_turned_photo_is_set_upright() -> None:
    stream = io.BytesIO()
    pixels = np.zeros((4, 10, 3), dtype=np.uint8)
    photo = Image.fromarray(pixels)
    exif = photo.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    photo.save(stream, "JPEG", exif=exif)
    assert decode(stream.getvalue(), "photo").size == (4, 10)


def test_each_bad_picture_has_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "cut.png").write_bytes(png(300, 300)[:200])
    (tmp_path / "huge.png").write_bytes(header_of(20_000, 10_000))
    (tmp_path / "large.png").write_bytes(header_of(10_000, 10_000))
    (tmp_path / "bomb.png").write_bytes(header_of(60_000, 60_000))
    assert code_of("none.png", tmp_path) == "no-image-file"
    assert code_of("text.png", tmp_path) == "broken-image"
    assert code_of("cut.png", tmp_path) == "broken-image"
    assert code_of("huge.png", tmp_path) == "image-too-large"
    assert code_of("large.png", tmp_path) == "image-too-large"
    assert code_of("bomb.png", tmp_path) == "image-too-large"
    assert code_of(b"") == "broken-image"
    assert code_of("?" * 300) == "broken-image"
    assert code_of("data:image/png;base64,%%%") == "broken-image"
    assert code_of(b"\0" * (MAX_BYTES + 1)) == "image-too-large"
    with (tmp_path / "long.png").open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    assert code_of("long.png", tmp_path) == "image-too-large"


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    data = png()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError) as error:
        decode(data, "a.png")
    assert error.value.code == "missing-package"
    assert error.value.values["package"] == "pillow"
