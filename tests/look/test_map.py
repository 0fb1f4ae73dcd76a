"""The map of all heads: its pictures hold the weights of the attention matrix."""

import json
import re
import struct
import zlib
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import attnscope
from attnscope.errors import InputError, ScopeError
from attnscope.look import map_page
from support_errors import raises


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return attnscope.load("zoo:spatial-phys")


@torch.no_grad()
def watched(loaded: tuple[Any, Any], texts: list[str], **options: Any) -> Any:
    model, tokenizer = loaded
    tokenizer.padding_side = "left"
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with attnscope.watch(model, layers=[0, 5], keep=True, **options) as scope:
        model(**inputs)
    return scope


def pixels(source: str) -> NDArray[np.float64]:
    """The opacity of every pixel of a PNG, read by its own definition."""
    png, at, parts = b64decode(source.partition(",")[2]), 8, {}
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        name, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(
            name + body
        )
        parts[name], at = body, at + 12 + size
    width, height, bits = struct.unpack(">IIB", parts[b"IHDR"][:9])
    lines = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not lines[:, 0].any()
    steps = lines[:, 1:]
    if bits == 4:
        steps = np.stack([steps >> 4, steps & 15], -1).reshape(height, -1)[:, :width]
    return np.frombuffer(parts[b"tRNS"], np.uint8)[steps] / 255


def data_of(html: str) -> tuple[list[str], dict[str, Any]]:
    """The small pictures and the data of a page."""
    small = re.findall(r'<img alt="" src="(data:[^"]+)">', html)
    return small, json.loads(html.rpartition('"),')[2].removesuffix(")</script></div>"))


def test_the_pictures_of_a_short_text_hold_its_weights(loaded: tuple[Any, Any]) -> None:
    scope = watched(loaded, ["The ball", "The <b>ball</b> is & left of the box.</script>"])
    page = scope.map(sequence=1)
    small, data = data_of(page.html)
    assert len(small) == 2 * 12
    assert data["large"] == []
    assert data["heads"][13] == [5, 1]
    assert data["queries"] == list(range(len(data["tokens"])))
    np.testing.assert_allclose(
        pixels(small[13]) ** 2, scope.matrix(5, 1, sequence=1).numpy(), atol=0.004
    )
    assert page.html.count("</script>") == 1
    assert "<b>ball" not in page.html
    first, short = data_of(scope.map(sequence=0).html)
    assert len(short["tokens"]) == 2  # without padding
    np.testing.assert_allclose(
        pixels(first[2]) ** 2, scope.matrix(0, 2, sequence=0).numpy()[:, -2:], atol=0.004
    )


def test_a_longer_text_has_small_pictures_of_the_largest_weights(loaded: tuple[Any, Any]) -> None:
    scope = watched(loaded, [" box" * 150])
    small, data = data_of(scope.map().html)
    A = scope.matrix(0, 3).numpy()
    want = pixels(data["large"][3]) ** 2
    np.testing.assert_allclose(want, A, atol=0.07)  # 15 steps
    thumbnail = pixels(small[3])
    assert thumbnail.shape == (48, 48)
    edges = np.linspace(0, len(A), 49).astype(int)
    block = A[edges[40] : edges[41], edges[7] : edges[8]]
    assert thumbnail[40, 7] ** 2 == pytest.approx(block.max(), abs=0.07)


def test_rows_of_chosen_queries(loaded: tuple[Any, Any]) -> None:
    queries = torch.zeros(1, 8, dtype=torch.bool)
    queries[0, [3, 6]] = True
    scope = watched(loaded, ["The ball is left of the box."], queries=queries)
    small, data = data_of(scope.map().html)
    assert data["queries"] == [3, 6]
    np.testing.assert_allclose(pixels(small[0]) ** 2, scope.matrix(0, 0).numpy(), atol=0.004)


def test_what_has_no_map(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scope = watched(loaded, ["The ball is left."])
    with raises(InputError, "unknown-sequence", value=1):
        scope.map(sequence=1)
    monkeypatch.setattr(map_page, "MAX_TOKENS", 3)
    with raises(ScopeError, "matrix-too-large", most=3):
        scope.map()
    with attnscope.watch(loaded[0], layers=0) as bare:
        loaded[0](**loaded[1]("The ball", return_tensors="pt"))
    with raises(ScopeError, "queries-not-kept"):
        bare.map()
