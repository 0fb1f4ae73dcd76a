"""`attnscope.from_tensors`: query and key tensors, compared with a dense softmax."""

from typing import Any

import pytest
import torch

import attnscope
import oracle
from attnscope.errors import InputError, ModelError
from support_errors import raises

B, H, G, K, D = 2, 4, 2, 15, 8


def made(queries: int = K, keys: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, H, queries, D) * 2, torch.randn(B, G, keys, D)


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    seen: torch.Tensor,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, H, Q, K], 0 in rows that see nothing."""
    x = q.double() @ k.double().repeat_interleave(H // G, 1).transpose(2, 3) * D**-0.5
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    x = x.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return torch.softmax(x, -1).nan_to_num(0.0)
    extra = sinks.double()[:, None, None].expand(B, H, q.shape[2], 1)
    return torch.softmax(torch.cat([x, extra], -1), -1)[..., :-1]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 4},
    "cap": {"softcap": 3.0},
    "sinks": {"sinks": torch.randn(H)},
    "padded on the right": {"mask": torch.arange(K) < torch.tensor([[K], [K - 4]])},
    "padded on the left": {"mask": torch.arange(K) >= torch.tensor([[0], [5]])},
    "both ways": {"causal": False},
}


@pytest.mark.parametrize("backend", ["reference", "streaming"])
@pytest.mark.parametrize("case", CASES)
def test_against_a_dense_softmax(case: str, backend: str) -> None:
    (q, k), given = made(), CASES[case]
    found = attnscope.from_tensors(q, k, backend=backend, **given)
    order = torch.arange(K)
    real = torch.ones(B, K, dtype=torch.bool)
    if "mask" in given:
        real = given["mask"]
    seen = (real[:, None] & real[..., None])[:, None]
    if given.get("causal", True):
        seen = seen & (order <= order[:, None])
    if "window" in given:
        seen = seen & (order > order[:, None] - given["window"])
    A = dense(q, k, seen, given.get("softcap"), given.get("sinks")) * real[:, None, :, None]
    ids = torch.randint(-1, 3, (B, K))
    wanted = torch.stack([(A * (ids == c)[:, None, None]).sum(-1) for c in range(3)], -1)
    wanted = wanted.where(real[:, None, :, None], torch.nan).float()
    torch.testing.assert_close(found.rows(0, ids, 3), wanted, rtol=0, atol=1e-5, equal_nan=True)
    oracle.compare(found, {0: A}, real, real, 1e-5)
    assert found.backend == backend


def test_a_decoding_step_and_another_text() -> None:
    q, k = made(queries=3)
    step = attnscope.from_tensors(q, k)
    seen = torch.arange(K) <= torch.arange(K - 3, K)[:, None]
    A = dense(q, k, seen)
    torch.testing.assert_close(step.received(0), A.sum(2).float(), rtol=0, atol=1e-5)
    assert step.query_positions(0).tolist() == [[K - 3, K - 2, K - 1]] * B
    other = attnscope.from_tensors(q, k, causal=False)
    A = dense(q, k, torch.ones(3, K, dtype=torch.bool))
    torch.testing.assert_close(other.received(0), A.sum(2).float(), rtol=0, atol=1e-5)
    assert bool(other.self_mass(0).isnan().all())


def test_chosen_queries_flow_and_repr() -> None:
    q, k = made()
    last = attnscope.from_tensors(q, k, queries="last")
    assert last.count(0).tolist() == [1, 1]
    ids = torch.randint(-1, 2, (B, K))
    assert attnscope.from_tensors(q, k, classes=ids).flow(0).shape == (B, H, 2, 2)
    assert repr(last) == (
        "<Scope of 1 layers, queries 'last', 'streaming': 2 sequences of 15 keys, "
        "1, 1 queries counted>"
    )
    assert last.measure("previous_token", 0).shape == (B, H)


BAD: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "not four axes": (
        {"q": torch.randn(2, 3)},
        "wrong-shape",
        {"argument": "q", "got": "float32 [2, 3]"},
    ),
    "no tensor": ({"k": [1.0]}, "wrong-shape", {"argument": "k", "got": "list"}),
    "heads": (
        {"q": torch.randn(B, 3, K, D)},
        "tensors-differ",
        {"q": f"float32 {[B, 3, K, D]} on cpu"},
    ),
    "size": ({"q": torch.randn(B, H, K, D + 1)}, "tensors-differ", {}),
    "type": (
        {"q": torch.randn(B, H, K, D).double()},
        "tensors-differ",
        {"q": f"float64 {[B, H, K, D]} on cpu"},
    ),
    "empty": ({"q": torch.randn(B, H, 0, D)}, "tensors-differ", {}),
    "too many queries": (
        {"q": torch.randn(B, H, K + 1, D)},
        "more-queries-than-keys",
        {"queries": K + 1, "keys": K},
    ),
    "window": ({"window": 0}, "bad-number", {"argument": "window", "value": 0}),
    "window both ways": ({"window": 3, "causal": False}, "window-not-causal", {"value": 3}),
    "mask": ({"mask": torch.ones(B, K - 1)}, "wrong-shape", {"argument": "mask"}),
    "sinks": ({"sinks": torch.randn(H + 1)}, "wrong-shape", {"argument": "sinks"}),
    "queries": ({"queries": "generated"}, "unknown-queries", {"value": "generated"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    q, k = made()
    given, code, values = BAD[case]
    with raises(InputError, code, **values):
        attnscope.from_tensors(**{"q": q, "k": k} | given)


def test_nan_is_refused() -> None:
    q, k = made()
    q[0, 0, 3] = torch.nan
    with raises(ModelError, "not-finite", layer=0, dtype="float32"):
        attnscope.from_tensors(q, k)
