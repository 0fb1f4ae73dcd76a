"""Scores of thousands, as the biases of trained models make them: right, and faults still found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import attnscope
from attnscope.errors import ConservationError, ModelError
from attnscope.kernels import reference
from attnscope.scope import reduce, sampling
from made_models import biased_model
from support_errors import raises

MEASURES = ("received", "average", "entropy", "self_mass", "first_token", "distance")


def tokens(length: int) -> torch.Tensor:
    return torch.randint(5, 97, (1, length), generator=torch.Generator().manual_seed(1))


def measured(model: Any, ids: torch.Tensor, **how: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad(), attnscope.watch(model, **how) as scope:
        model(ids, use_cache=False)
    found = {
        name: torch.stack([getattr(scope, name)(layer) for layer in scope.layers])
        for name in MEASURES
    }
    return {name: value.nan_to_num(0.0).double() for name, value in found.items()}


def by_torch(rows: Any) -> Any:
    """What torch's own product and softmax give, in the type of the model."""
    k = rows.k.repeat_interleave(rows.q.shape[1] // rows.k.shape[1], 1)
    scores = (rows.q @ k.transpose(2, 3) * rows.scale).float()
    start, stop, own = rows.bounds()
    keys = torch.arange(k.shape[2])
    seen = (keys >= start[..., None]) & (keys < stop[..., None])
    A = torch.softmax(scores.masked_fill(~seen[:, None], -torch.inf), -1).nan_to_num(0.0)
    return reference.totals(A.double(), own, scores.logsumexp(-1))


def test_scores_are_large() -> None:
    """Or these tests would test nothing."""
    reach: list[float] = []
    honest = reduce.kernels.kernel

    def spy(name: str) -> Callable[[Any], Any]:
        def reduce(rows: Any) -> Any:
            totals = honest(name)(rows)
            reach.append(float(totals.lse.abs().max()))
            return totals

        return reduce

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce.kernels, "kernel", spy)
        measured(biased_model(), tokens(40))
    assert min(reach) > 1000


LARGE = [
    (dtype, 1.0, queries)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for queries in ("all", "last", "mask")
]
# Of a single row there are too few numbers to say how far off torch is.
TENS = [(torch.float32, 0.1, queries) for queries in ("all", "mask")]


@pytest.mark.parametrize("length", [29, 232, 700])
@pytest.mark.parametrize(("dtype", "times", "queries"), LARGE + TENS, ids=str)
def test_no_further_from_float64_than_twice_torch(
    dtype: torch.dtype, times: float, length: int, queries: str
) -> None:
    """Beside that, what float32 rounds of the number itself. Scores of tens, too: there products
    are made in float32, and a row's own sum takes out how that of its log-sum-exp was rounded."""
    model, ids = biased_model(dtype, times), tokens(length)
    mask = torch.rand(1, length, generator=torch.Generator().manual_seed(2)) < 0.3
    how = {"queries": mask if queries == "mask" else queries}
    exact = measured(model, ids, backend="reference", **how)
    ours = measured(model, ids, backend="streaming", **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce.kernels, "kernel", lambda name: by_torch)
        theirs = measured(model, ids, **how)
    rounding = 4 * torch.finfo(torch.float32).eps
    for name in MEASURES:
        for layer, true in enumerate(exact[name]):
            bound = 2 * (theirs[name][layer] - true).abs().max()
            off = (ours[name][layer] - true).abs()
            assert (off <= bound + rounding * true.abs()).all(), (name, layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampled_rows(dtype: torch.dtype) -> None:
    """Near keys are counted for all queries, far ones estimated: the same estimate as by the
    definition, which draws the same rows."""
    model, ids = biased_model(dtype), tokens(700)
    exact = measured(model, ids, backend="reference", queries="sample:16")
    ours = measured(model, ids, backend="streaming", queries="sample:16")
    for name in MEASURES:
        off = (ours[name] - exact[name]).abs().max()
        assert off <= 2e-6 * exact[name].abs().max().clamp(min=1), name


@pytest.mark.parametrize("queries", ["generated", "predicts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_generated_rows(dtype: torch.dtype, queries: str) -> None:
    """Steps that wait for one another are no further off than single rows are."""
    model, ids = biased_model(dtype), tokens(40)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 7, "do_sample": False}
    scopes = {}
    for backend in ("reference", "streaming"):
        with attnscope.watch(model, queries=queries, backend=backend) as scopes[backend]:
            model.generate(ids, pad_token_id=0, eos_token_id=None, **how)
    assert scopes["streaming"].count(0).item() == 6 + (queries == "predicts")
    for name in ("received", "entropy", "self_mass", "first_token", "distance"):
        for layer in (0, 1):
            ours, exact = (getattr(scope, name)(layer).double() for scope in scopes.values())
            assert (ours - exact).abs().max() <= 2e-6 * exact.abs().max().clamp(min=1), name


@torch.no_grad()
def test_top_keys_are_those_of_float64() -> None:
    model, ids = biased_model(), tokens(60)
    with attnscope.watch(model, keep=True) as scope:
        model(ids, use_cache=False)
    with attnscope.watch(model, keep=True, backend="reference") as wanted:
        model(ids, use_cache=False)
    for layer in scope.layers:
        weights = scope.largest(layer, 3).weight
        everything = wanted.largest(layer, 60).weight
        torch.testing.assert_close(everything.sum(-1), torch.ones_like(everything[..., 0]))
        torch.testing.assert_close(weights, everything[..., :3], rtol=0, atol=1e-6)


# --- faults --------------------------------------------------------------------------------------


def dropped_key(rows: Any) -> Any:
    """The key that gets most of all is lost."""
    A, _, _ = reference.weights(rows)
    real = torch.ones(rows.k.shape[0], rows.k.shape[2], dtype=torch.bool)
    real[:, A.sum((0, 1, 2)).argmax()] = False
    return replace(rows.with_bounds(), real=real, causal=False)


FAULTS: dict[str, Callable[[Any], Any]] = {
    "dropped key": dropped_key,
    "wrong scale": lambda rows: replace(rows, scale=rows.scale * 1.02),
    "wrong log-sum-exp": lambda rows: replace(
        rows, lse=None if rows.lse is None else rows.lse + 0.05
    ),
}


@pytest.mark.parametrize("queries", ["all", "last", "sample:16"])
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(
    monkeypatch: pytest.MonkeyPatch, fault: str, size: str, queries: str
) -> None:
    model = biased_model()
    if size == "small":
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.data *= 12
                projection.bias.data.zero_()
    honest = reduce.rows_of

    def faulty(*given: Any, **options: Any) -> Any:
        return FAULTS[fault](honest(*given, **options))

    for module in (reduce, sampling):
        monkeypatch.setattr(module, "rows_of", faulty)
    ids = tokens(600 if queries.startswith("sample") else 60)
    with (
        torch.no_grad(),
        raises(ConservationError, "conservation", layer=0),
        attnscope.watch(model, queries=queries, backend="streaming"),
    ):
        model(ids, use_cache=False)


@pytest.mark.parametrize("backend", ["streaming", "reference", "eager-fallback"])
@pytest.mark.parametrize("queries", ["all", "last", "sample:16"])
def test_a_model_that_computes_nan_is_refused(backend: str, queries: str) -> None:
    model = biased_model()
    model.model.layers[1].self_attn.k_proj.weight.data[3, 3] = torch.nan
    ids = tokens(600 if queries.startswith("sample") else 30)
    with (
        torch.no_grad(),
        raises(ModelError, "not-finite", layer=1),
        attnscope.watch(model, queries=queries, backend=backend),
    ):
        model(ids, use_cache=False)
