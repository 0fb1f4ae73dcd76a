"""The largest score of a head, against the scores that the softmax of the eager model gets."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import attnscope
from attnscope.errors import InputError, ScopeError
from attnscope.interception.row_max import row_max
from attnscope.kernels import AttentionCall, KernelRows, reference
from families import ENCODERS, FALLBACK, FAMILIES, VOCABULARY, build
from scope.test_parts import bart, inputs, t5
from support_errors import raises

B, N = 2, 17


class Scores(TorchFunctionMode):
    """Collects what every softmax of attention gets; with learned sinks, before they are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []
        self.sinks = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func is torch.cat and isinstance(first, list) and first[-1].shape[2:] == (N, 1):
            self.found.append(first[0].detach())
            self.sinks = True
        result = func(*args, **(kwargs or {}))
        softmax = func in (F.softmax, torch.softmax, torch.Tensor.softmax)
        if softmax and not self.sinks and result.ndim in (3, 4) and result.shape[-1] > 4:
            self.found.append(first.detach())
        return result


def oracle(name: str, ids: torch.Tensor, real: Any, keep: torch.Tensor) -> Any:
    """[layers, B, H]: the largest score of the rows to keep, bool [B, N]."""
    model = build(name, "eager")
    with torch.no_grad(), Scores() as scores:
        model(input_ids=ids, attention_mask=real)
    heads = [x.view(B, -1, N, x.shape[-1])[..., :N].float() for x in scores.found]
    causal = torch.ones(N, N, dtype=torch.bool).tril() | (name in ENCODERS)
    seen = keep[:, None, :, None] & causal
    if real.ndim == 2:
        seen = seen & (real != 0)[:, None, None]
    seen = [seen & (x > -1e4) for x in heads]
    return torch.stack(
        [x.where(s, -torch.inf).amax((2, 3)) for x, s in zip(heads, seen, strict=True)]
    )


def text(padding: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids, real = torch.randint(5, VOCABULARY, (B, N)), torch.ones(B, N).long()
    if padding == "left":
        real[1, :5] = 0
    if padding == "right":
        real[1, -5:] = 0
    return ids, real


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("backend", ["auto", "reference", "eager-fallback"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, backend: str, padding: str) -> None:
    ids, real = text(padding)
    wanted = oracle(name, ids, real, real != 0)
    model = build(name, "eager" if name in FALLBACK else None)  # Falcon's sdpa differs from it
    with torch.no_grad(), attnscope.watch(model, backend=backend, max_logit=True) as scope:
        model(input_ids=ids, attention_mask=real)
    assert len(scope.layers) == len(wanted)
    for layer, scores in zip(scope.layers, wanted, strict=True):
        got = scope.measure("max_logit", layer)
        torch.testing.assert_close(got, scores, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("backend", ["triton", "streaming"])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt-oss", "mistral"])
def test_chosen_queries(name: str, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    ids, real = text("left")
    for queries in ("last", torch.rand(B, N) < 0.4):
        keep = torch.arange(N).expand(B, N) == N - 1 if isinstance(queries, str) else queries
        wanted = oracle(name, ids, real, keep & (real != 0))
        model = build(name)
        how = {"queries": queries, "backend": backend, "max_logit": True}
        with torch.no_grad(), attnscope.watch(model, **how) as scope:
            model(input_ids=ids, attention_mask=real)
        for layer, scores in zip(scope.layers, wanted, strict=True):
            got = scope.measure("max_logit", layer)
            torch.testing.assert_close(got, scores, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("kind", ["gaps", "biases"])
def test_masks_that_only_the_dense_fallback_measures(kind: str) -> None:
    ids, _ = text("none")
    causal = torch.ones(B, 1, N, N, dtype=torch.bool).tril()
    torch.manual_seed(2)
    gaps = torch.rand(B, 1, N, N) < 0.3
    gaps[..., range(N), range(N)] = False
    mask = torch.zeros(B, 1, N, N).masked_fill(~causal, torch.finfo(torch.float32).min)
    if kind == "gaps":
        mask = mask.masked_fill(gaps, torch.finfo(torch.float32).min)
    else:
        mask = mask + 3 * torch.randn(B, 1, N, N) * causal
    wanted = oracle("qwen2", ids, mask, torch.ones(B, N, dtype=torch.bool))
    model = build("qwen2")
    with torch.no_grad(), attnscope.watch(model, max_logit=True) as scope:
        model(input_ids=ids, attention_mask=mask)
    assert scope.backend == "eager-fallback"
    for layer, scores in zip(scope.layers, wanted, strict=True):
        got = scope.measure("max_logit", layer)
        torch.testing.assert_close(got, scores, rtol=2e-6, atol=2e-5)


def test_weights_that_are_not_the_softmax_of_the_scores_give_none() -> None:
    model, (ids, _) = build("qwen2"), text("none")
    with torch.no_grad(), attnscope.intercept(model) as calls:
        model(input_ids=ids)
    found = calls[0]
    call = AttentionCall(
        layer=0, q=found.q, k=found.k, v=found.v, scale=found.scale, visible=found.geometry.visible
    )
    rows = KernelRows(q=found.q, k=found.k, scale=found.scale, causal=True)
    weights, scores = reference.weights(rows)[0], reference.scores(rows)[0]
    known = row_max(call, found.geometry, weights.float())
    assert known is not None
    torch.testing.assert_close(known, scores.amax(-1))
    weights[:, :, 3, :4] = 0.25
    assert row_max(call, found.geometry, weights.float()) is None


def test_scores_from_which_the_largest_was_taken_off() -> None:
    """A module that computes its own softmax may do so; then the scores are not known."""
    model, (ids, _) = build("gptj"), text("none")
    plain = F.softmax

    def shifted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return plain(x - x.amax(-1, keepdim=True), *args, **kwargs)

    module = sys.modules[type(model.transformer.h[0].attn).__module__]
    with pytest.MonkeyPatch.context() as patch:
        functional = SimpleNamespace(**{**vars(F), "softmax": shifted})
        patch.setattr(module, "nn", SimpleNamespace(**{**vars(nn), "functional": functional}))
        with torch.no_grad(), attnscope.watch(model, max_logit=True) as scope:
            model(input_ids=ids)
    with raises(ScopeError, "no-max-logit"):
        scope.measure("max_logit", 0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["qwen2", "mistral", "gpt-oss"])
def test_generated_tokens(name: str, cache: str) -> None:
    """Prefill and decode steps together are one pass over the whole text."""
    ids, real = text("none")
    model = build(name)
    how = {"do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    with torch.no_grad(), attnscope.watch(model, max_logit=True) as scope:
        whole = model.generate(ids, attention_mask=real, max_new_tokens=6, **how)
    with torch.no_grad(), attnscope.watch(model, max_logit=True) as once:
        model(input_ids=whole[:, :-1])
    for layer in scope.layers:
        torch.testing.assert_close(
            scope.measure("max_logit", layer), once.measure("max_logit", layer), rtol=0, atol=2e-5
        )


@pytest.mark.parametrize("make", [bart, t5])
def test_parts_of_an_encoder_and_a_decoder(make: Callable[..., Any]) -> None:
    """Streamed and dense are two ways to the same numbers, for position biases and two texts."""
    model, text, found = make(), inputs(), {}
    for backend in ("auto", "eager-fallback"):
        with torch.no_grad(), attnscope.watch(model, backend=backend, max_logit=True) as scope:
            model(**text)
        found[backend] = [
            scope[part].measure("max_logit", layer)
            for part in scope.parts
            for layer in scope[part].layers
        ]
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_of_a_knockout() -> None:
    """A key that an intervention hides has no score."""
    ids, _ = text("none")
    model = build("qwen2")
    keys = torch.zeros(B, N, dtype=torch.bool)
    keys[:, 3:9] = True
    found = []
    for backend in ("auto", "eager-fallback"):
        with (
            torch.no_grad(),
            attnscope.knockout(model, keys=keys, queries=torch.arange(N).expand(B, N) > 10),
            attnscope.watch(model, keep=True, backend=backend) as scope,
        ):
            model(input_ids=ids)
        found.append(scope.measure("max_logit", 0))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-5)
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(input_ids=ids)
    assert bool((scope.measure("max_logit", 0) >= found[0] - 1e-5).all())
    torch.testing.assert_close(
        scope.measure("max_logit", 0), scope.largest(0).score[..., 0].amax(-1), rtol=0, atol=2e-5
    )


def test_of_plain_tensors() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 30, 8), torch.randn(2, 2, 30, 8)
    x = (q @ k.repeat_interleave(2, 1).transpose(2, 3)) * 0.3
    x = x.masked_fill(~torch.ones(30, 30, dtype=torch.bool).tril(), -torch.inf)
    got = attnscope.from_tensors(q, k, scale=0.3).measure("max_logit", 0)
    torch.testing.assert_close(got, x.amax((2, 3)), rtol=0, atol=1e-6)


def test_it_is_known_only_if_it_was_asked_for() -> None:
    model, (ids, _) = build("qwen2"), text("none")
    with torch.no_grad(), attnscope.watch(model) as scope:
        model(input_ids=ids)
    with raises(ScopeError, "no-max-logit"):
        scope.measure("max_logit", 0)
    with raises(InputError, "max-logit-with-sample"):
        attnscope.watch(model, queries="sample:4", max_logit=True)
    with raises(InputError, "not-boolean", argument="max_logit"):
        attnscope.watch(model, max_logit=1)


def test_a_sequence_without_a_counted_query_has_none() -> None:
    model, (ids, _) = build("qwen2"), text("none")
    queries = torch.zeros(B, N, dtype=torch.bool)
    queries[0] = True
    with torch.no_grad(), attnscope.watch(model, queries=queries, max_logit=True) as scope:
        model(input_ids=ids)
    found = scope.measure("max_logit", 1)
    assert bool(found[0].isfinite().all())
    assert bool(found[1].isnan().all())
