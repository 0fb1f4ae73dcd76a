"""Layers that are seen alike are measured as one: the same numbers as one by one."""

from typing import Any

import pytest
import torch

import attnscope
from attnscope.measures.layer import Layer, stack_layers
from attnscope.measures.registry import MEASURES
from families import build


def layers_of(name: str, queries: Any) -> list[Layer]:
    model = build(name)
    ids = torch.randint(5, 97, (3, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    with attnscope.watch(model, queries=queries) as scope, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    shares = torch.rand(3, 24, 2, generator=torch.Generator().manual_seed(1)).double()
    return [Layer(sums=scope.sums(layer), shares=shares) for layer in scope.layers]


ALONE = [
    measure
    for measure in MEASURES.values()
    if measure.needs == {"sums"} and measure.level == "head" and not measure.compares_to_base
]


@pytest.mark.parametrize("queries", ["all", "last", "sample:4"])
@pytest.mark.parametrize(
    ("name", "heads"),
    [("qwen2", [12]), ("llama4", [8, 4, 4]), ("gemma3", [4, 4, 4]), ("gpt-oss", [4, 4, 4])],
)
def test_the_numbers_are_the_same(name: str, heads: list[int], queries: str) -> None:
    layers = layers_of(name, queries)
    joined = stack_layers(layers)
    assert [layer.sums.received.shape[1] for layer in joined] == heads
    for measure in ALONE:
        for part in ("value", "uniform", "error"):
            each = [getattr(measure.numbers(layer), part) for layer in layers]
            together = [getattr(measure.numbers(layer), part) for layer in joined]
            assert (each[0] is None) == (together[0] is None)
            if part == "uniform" and each[0] is not None:  # one for all heads of a layer
                each = [x.expand(-1, 4, -1) for x in each]
                wide = zip(together, heads, strict=True)
                together = [x.expand(-1, n, -1) for x, n in wide]
            if each[0] is not None:
                torch.testing.assert_close(
                    torch.cat(together, 1), torch.cat(each, 1), rtol=1e-6, atol=1e-12
                )


def test_long_texts_stay_apart() -> None:
    layers = layers_of("qwen2", "all")
    of_two = 2 * layers[0].sums.received.numel()
    joined = stack_layers(layers, max_size=of_two)
    assert [layer.sums.received.shape[1] for layer in joined] == [8, 4]
