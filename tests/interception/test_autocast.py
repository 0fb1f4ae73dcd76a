"""Under `torch.autocast` sdpa rounds its tensors: so must a watch and an intervention."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import attnscope
from families import VOCABULARY, build
from pending_share import watching

FAMILIES = ["llama", "qwen2", "gpt-neox"]
TYPES = [torch.bfloat16, torch.float16]
B, N = 2, 12


def inputs(*, padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(5, VOCABULARY, (B, N))
    real = torch.ones_like(ids)
    if padded:
        real[0, :3] = 0
    return {"input_ids": ids, "attention_mask": real}


class RoundedWeights(TorchFunctionMode):
    """The weights of torch's sdpa, from tensors rounded as autocast rounds them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            q, k = (t.detach().to(self.dtype).double() for t in args[:2])
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
            mask = kwargs.get("attn_mask")
            causal = torch.ones(scores.shape[-2:]).tril().bool()
            if mask is not None and mask.is_floating_point():
                scores = scores + mask.to(self.dtype).double()
            else:
                scores = scores.masked_fill(~(causal if mask is None else mask), -torch.inf)
            self.weights.append(torch.softmax(scores, -1).nan_to_num())
        return made


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_watch_leaves_the_output_and_measures_the_rounded_tensors(
    name: str, dtype: torch.dtype, use_cache: bool, padded: bool
) -> None:
    model, given = build(name), inputs(padded=padded)
    with torch.autocast("cpu", dtype), RoundedWeights(dtype) as truth:
        plain = model(**given, use_cache=use_cache).logits
    for hold in (0, 1 / 256):
        with (
            torch.autocast("cpu", dtype),
            watching(model, keep=True, share=hold) as scope,
        ):
            watched = model(**given, use_cache=use_cache).logits
        assert watched.dtype is plain.dtype
        assert torch.equal(watched, plain)
        counted = given["attention_mask"].double()[:, None, :, None]
        for layer, A in enumerate(truth.weights):
            wanted = (A * counted).sum(2)
            assert (scope.received(layer) - wanted).abs().max() < 1e-5
    assert torch.equal(model(**given).logits, build(name)(**given).logits)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_under_autocast(name: str, dtype: torch.dtype) -> None:
    given = inputs(padded=True)

    def gradients(watched: bool) -> list[Tensor]:
        model = build(name).train()
        with torch.autocast("cpu", dtype):
            if watched:
                with attnscope.watch(model):
                    loss = model(**given).logits.float().square().mean()
            else:
                loss = model(**given).logits.float().square().mean()
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, seen = gradients(watched=False), gradients(watched=True)
    assert len(plain) == len(seen)
    for one, other in zip(plain, seen, strict=True):
        assert (one - other).abs().max() <= 2e-2 * one.abs().max()


@pytest.mark.parametrize("backend", ["reference", "streaming", "eager-fallback"])
@torch.no_grad()
def test_every_backend_and_a_block_without_autocast(backend: str) -> None:
    model, given = build("llama"), inputs(padded=True)
    plain = model(**given).logits
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(**given).logits
        with attnscope.watch(model, backend=backend):
            assert torch.equal(model(**given).logits, rounded)
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(model(**given).logits, plain)
            assert torch.equal(model(**given).logits, rounded)


@torch.no_grad()
def test_numbers_read_inside_autocast_are_those_read_outside() -> None:
    model, given = build("llama"), inputs(padded=False)
    classes = torch.arange(N).expand(B, N) % 3
    for backend in ("reference", "streaming"):
        watching = attnscope.watch(model, backend=backend, keep=True)
        with torch.autocast("cpu", torch.bfloat16), watching as scope:
            model(**given)
            inside = scope.rows(1, classes, 3), scope.mass(1, classes, 3), scope.row(1, 7)
        outside = scope.rows(1, classes, 3), scope.mass(1, classes, 3), scope.row(1, 7)
        for one, other in zip(inside, outside, strict=True):
            assert torch.equal(one, other)


@torch.no_grad()
def test_one_layer_without_autocast() -> None:
    """The state may change between two layers of one pass."""
    model, given = build("llama"), inputs(padded=False)

    def switched(layer: Any) -> Any:
        plain = layer.forward

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return plain(hidden, *args, **kwargs)

        return forward

    layer = model.model.layers[1]
    layer.forward = switched(layer)
    plain = model(**given).logits
    for _ in range(2):
        with attnscope.watch(model):
            assert torch.equal(model(**given).logits, plain)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_knockout_equals_a_mask(name: str) -> None:
    """The keys hidden by the attention mask, and by a knockout of all queries, are the same."""
    model, given = build(name), inputs(padded=False)
    keys = torch.zeros(B, N, dtype=torch.bool)
    keys[:, 4] = True
    places = torch.arange(N).expand(B, N)
    hidden = given | {"attention_mask": (~keys).long()}
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(**hidden, position_ids=places).logits
        with attnscope.knockout(model, keys=keys), attnscope.watch(model) as scope:
            got = model(**given, position_ids=places).logits
    assert (got - wanted)[~keys].abs().max() <= 2e-2 * wanted.abs().max()
    assert scope.received(0)[:, :, 4].abs().max() == 0


@pytest.mark.parametrize("name", ["llama", "gpt-neox"])
@torch.no_grad()
def test_a_custom_bias_is_rounded_too(name: str) -> None:
    """sdpa takes it as a mask, and autocast rounds masks."""
    model, given = build(name), inputs(padded=False)
    bias = 20 * torch.randn(B, 1, N, N)
    hidden = torch.full((N, N), -torch.inf).triu(1)
    with torch.autocast("cpu", torch.bfloat16), RoundedWeights(torch.bfloat16) as truth:
        plain = model(given["input_ids"], attention_mask=bias + hidden).logits
        with attnscope.watch(model) as scope:
            watched = model(given["input_ids"], attention_mask=bias + hidden).logits
    assert torch.equal(watched, plain)
    for layer in range(3):
        assert (scope.received(layer) - truth.weights[layer].sum(2)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "falcon", "bloom"])
@torch.no_grad()
def test_other_families_are_left_alone(name: str) -> None:
    """Soft-caps, biases of the model, direct calls of torch's sdpa."""
    model, given = build(name), inputs(padded=True)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(**given).logits.float()
        with attnscope.watch(model):
            watched = model(**given).logits.float()
    real = given["attention_mask"].bool()
    assert (watched - plain)[real].abs().max() <= 2e-2 * plain[real].abs().max()
