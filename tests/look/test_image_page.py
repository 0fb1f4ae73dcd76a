"""The page of pictures: its maps are those of the scope."""

import json
import re
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import attnscope
import made_processors
from attnscope.look import image_page
from chromium import opened


def pictures() -> list[Image.Image]:
    random = np.random.default_rng(0)
    sizes = ((50, 70), (70, 40), (32, 32))
    return [Image.fromarray(random.integers(0, 255, (*s, 3), dtype=np.uint8)) for s in sizes]


def watched(name: str, *, keep: bool = True, sizes: bool = False) -> tuple[Any, Any]:
    family = made_processors.made(name)
    one, two, three = pictures()
    texts = [f"{family.mark}What is <b>it</b>?", f"{family.mark}One{family.mark}Two"]
    nested = [[one], [two, three]]
    inputs = made_processors.model_inputs(family, texts, nested, padding_side="left")
    with torch.no_grad(), attnscope.watch(family.model, layers=[0, 2], keep=keep) as scope:
        family.model(**inputs)
    shown = [[(i.height, i.width) for i in of] for of in nested] if sizes else nested
    scope.place_images(family.processor, inputs, shown)
    return scope, family.processor


def data_of(html: str) -> dict[str, Any]:
    content = html.rpartition('"),')[2].removesuffix(")</script></div>")
    data: dict[str, Any] = json.loads(content)
    return data


@pytest.mark.parametrize("name", ["llava-next", "gemma3", "qwen2-vl"])
def test_the_maps_of_the_page_are_those_of_the_scope(name: str) -> None:
    scope, processor = watched(name)
    page = scope.show(processor, sequence=1)
    data = data_of(page.html)
    assert data["layers"] == [0, 2]
    assert data["heads"] == [4, 4]
    assert page.html.count("<img") == 2
    maps = 1 + 2 * 5
    numbers = re.findall(r'data-query="(\d+)"', page.html)
    for picture, of in zip((1, 2), data["images"], strict=True):
        rows, columns = of["rows"], of["columns"]
        cells = np.frombuffer(b64decode(of["cells"]), np.uint8)
        cells = cells.reshape(-1, maps, rows, columns) / 255
        cells = cells * np.array(of["full"])[..., None, None]
        assert len(cells) == 1 + len(numbers)
        tolerance = np.array(of["full"]).max() * 0.01
        heads = np.stack([scope.image_map(layer, picture) for layer in (0, 2)])
        np.testing.assert_allclose(cells[0, 0], heads.mean((0, 1)), atol=tolerance)
        np.testing.assert_allclose(cells[0, 6], heads[1].mean(0), atol=tolerance)
        np.testing.assert_allclose(cells[0, 2 + 3], heads[0, 3], atol=tolerance)
        query = int(scope.query_positions(0)[1].max())  # the last of the text
        last = scope.image_map(2, picture, query)
        np.testing.assert_allclose(cells[-1, 7 + 1], last[1], atol=tolerance)
    first = scope.show(processor, sequence=0).html
    assert "&lt;" in first
    assert "<b>it" not in first
    assert first.count("</script>") == 1


def test_without_stored_queries_there_is_the_mean_query() -> None:
    scope, processor = watched("llava", keep=False, sizes=True)
    page = scope.show(processor)
    (of,) = data_of(page.html)["images"]
    assert len(of["full"]) == 1
    assert 'data-query="' not in page.html
    assert "<img" not in page.html  # only sizes are known


def test_a_page_that_would_be_too_large_leaves_out_heads_then_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scope, processor = watched("llava")
    whole = data_of(scope.show(processor).html)["images"][0]["full"]
    monkeypatch.setattr(image_page, "MAX_BYTES", 64 * 11 * len(whole) - 1)
    means = data_of(scope.show(processor).html)
    assert means["heads"] == [0, 0]
    assert len(means["images"][0]["full"]) == len(whole)
    monkeypatch.setattr(image_page, "MAX_BYTES", 64 * 3 * 4)
    few = data_of(scope.show(processor).html)["images"][0]
    assert len(few["full"]) == 4
    assert len(b64decode(few["cells"])) <= 64 * 3 * 4


@pytest.mark.browser
def test_the_map_follows_the_chosen_token() -> None:
    scope, processor = watched("llava")
    with opened() as browser:
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.set_content(scope.show(processor).html)
        sums = "c => [...c.getContext('2d').getImageData(0,0,c.width,c.height).data].join()"
        canvas = page.locator(".picture canvas").first
        mean = canvas.evaluate(sums)
        page.locator("[data-query]").last.hover()
        last = canvas.evaluate(sums)
        assert last != mean
        page.locator(".grid button").nth(6).click()
        assert canvas.evaluate(sums) == mean_of_head(page, 6, sums)
        assert page.locator("select").nth(0).input_value() == "1"
        page.locator("[data-query]").first.click()
        page.mouse.move(0, 0)
        assert page.locator(".chosen").count() == 1
        page.locator(".picture").first.hover()
        assert "weight" in page.locator("[role=status]").inner_text()
        assert not errors


def mean_of_head(page: Any, number: int, sums: str) -> Any:
    return page.locator(".grid button canvas").nth(number).evaluate(sums)
