"""The forward pass of an experiment."""

from typing import Any

import torch

from attnscope.experiment.forward import forward
from families import build


def test_no_cache_is_filled_that_nobody_reads() -> None:
    model, ids = build("qwen2"), torch.randint(5, 97, (2, 12))
    caches: list[Any] = []
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: caches.append(kwargs.get("past_key_values")), with_kwargs=True
    )
    with forward(model, {"input_ids": ids}, {"all": "all"}):
        pass
    assert caches == [None]
