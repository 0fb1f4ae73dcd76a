"""The second law of conservation: a key that no query sees receives exactly 0."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings

import attnscope
from attnscope.errors import ConservationError, ModelError
from attnscope.kernels import AttentionSums, KernelRows, kernel, streaming
from attnscope.scope.conservation import check, compare_unseen
from attnscope.scope.scope import Scope
from families import build
from made_rows import selections, visible

TOKENS = 24


@pytest.mark.parametrize("backend", ["reference", "streaming", "triton"])
def test_holds_over_the_made_rows(backend: str) -> None:
    fast = backend != "triton"

    @settings(max_examples=100 if fast else 10, phases=[Phase.generate])
    @given(selections(sizes=(2, 2000) if fast else (2,), heads=(1, 2)))
    def holds(rows: KernelRows) -> None:
        sums = compare_unseen(rows, kernel(backend)(rows))
        if sums.unseen_mass is not None:
            assert not bool(sums.unseen_mass.any())

    holds()


def test_finds_every_key_that_no_row_sees() -> None:
    """Of links, each by itself, so rows have one."""

    @settings(max_examples=150, phases=[Phase.generate])
    @given(selections(sizes=(2,), heads=(1, 2)))
    def found(rows: KernelRows) -> None:
        B, H, _, _ = rows.q.shape
        K = rows.k.shape[2]
        rows = replace(rows, score_biases=rows.score_biases[-1:], cache={})
        unseen = ~visible(rows).any(2)
        for key in range(K):
            received = torch.zeros(B, H, K)
            received[:, :, key] = 0.5
            none = torch.zeros(B, H)
            sums = AttentionSums(
                received=received, received_later=received, mass=none, entropy=none, self_mass=none
            )
            sums = compare_unseen(rows, sums)
            mass = none if sums.unseen_mass is None else sums.unseen_mass
            assert torch.equal(mass, 0.5 * unseen[:, :, key])

    found()


def wrong(monkeypatch: pytest.MonkeyPatch, key: int, amount: float) -> None:
    """A kernel that moves attention to a key, and keeps the sum."""
    right: Callable[[KernelRows], AttentionSums] = streaming.reduce

    def reduce(rows: KernelRows) -> AttentionSums:
        sums = right(rows)
        sums.received[..., key] += amount
        return sums

    monkeypatch.setattr(streaming, "reduce", reduce)


def padded(side: str) -> dict[str, Any]:
    real = torch.ones(2, TOKENS, dtype=torch.long)
    real[1, slice(0, 5) if side == "left" else slice(-5, None)] = 0
    return {"attention_mask": real}


def run(model: Any, queries: Any = "all", **given: Any) -> Scope:
    ids = torch.randint(5, 97, (2, TOKENS))
    with torch.no_grad(), attnscope.watch(model, queries=queries) as scope:
        model(input_ids=ids, **given)
    return scope


@pytest.mark.parametrize(
    ("name", "key", "given", "queries"),
    [
        ("qwen2", 2, padded("left"), "all"),
        ("qwen2", TOKENS - 1, padded("right"), "all"),
        ("qwen2", TOKENS - 1, {}, torch.arange(TOKENS).expand(2, -1) < 9),
        ("mistral", 0, {}, "last"),
    ],
    ids=["left padding", "right padding", "chosen queries", "sliding window"],
)
def test_fires_where_a_kernel_is_wrong(
    name: str, key: int, given: Any, queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    run(model, queries, **given).received(0)
    wrong(monkeypatch, key, 1e-6)
    with pytest.raises(ConservationError) as error:
        run(model, queries, **given).received(0)
    assert error.value.code == "unseen-key-received"
    assert (error.value.layer, error.value.key) == (0, key)
    assert error.value.amount == pytest.approx(1e-6)


@pytest.mark.parametrize("heads", [None, [1]], ids=["all heads", "one head"])
@pytest.mark.parametrize("queries", ["all", "last"])
def test_fires_where_a_knockout_is_not_measured(
    queries: str, heads: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("qwen2")
    keys = torch.arange(TOKENS).expand(2, -1) == 7
    change = {"keys": keys, "queries": queries, "heads": heads, "layers": [1]}
    with attnscope.knockout(model, **change):
        assert not bool(run(model, queries).received(1)[:, 1, 7].any())
        wrong(monkeypatch, 7, 1e-6)
        with pytest.raises(ConservationError) as error:
            run(model, queries).received(1)
    assert error.value.code == "unseen-key-received"
    assert (error.value.layer, error.value.key) == (1, 7)


def test_of_tensors_alone() -> None:
    q = torch.randn(2, 2, TOKENS, 8)
    real = padded("left")["attention_mask"]
    assert not bool(attnscope.from_tensors(q, q, mask=real).received(0)[1, :, :5].any())


@pytest.mark.parametrize(
    ("dtype", "wider"),
    [(torch.float16, ["bfloat16", "float32"]), (torch.bfloat16, ["float32"]), (torch.float32, [])],
)
def test_what_to_try_where_numbers_are_not_finite(dtype: torch.dtype, wider: Any) -> None:
    """Never the type that the model has."""
    nan = torch.full((1, 1, 1), torch.nan)
    with pytest.raises(ModelError) as error:
        check([3], nan, nan, dtype, "")
    assert (error.value.code, error.value.layer) == ("not-finite", 3)
    assert error.value.dtype == str(dtype).removeprefix("torch.")
    assert error.value.wider == wider
