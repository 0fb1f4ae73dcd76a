"""What single rows hold: every kernel against plain loops over the reference's matrix."""

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings

from attnscope.kernels import KernelRows, PerQueryRequest, one_row, per_query_kernel, reference
from attnscope.kernels.call import ScoreBias
from attnscope.kernels.one_row import renyi2
from made_rows import selections

CLOSE = 1e-5
Array = np.ndarray[Any, Any]


def asked_of(rows: KernelRows) -> PerQueryRequest:
    B, _, M, _ = rows.q.shape
    K = rows.k.shape[2]
    shares = torch.rand(B, K, 3) * (torch.rand(B, K, 3) < 0.6)
    return PerQueryRequest(
        shares=shares,
        keys=torch.randint(-1, K, (B, M)),
        spans=torch.randint(-3, K + 3, (B, M, 2, 2)),
        entropies=True,
        top=3,
    )


def dense(rows: KernelRows, asked: PerQueryRequest) -> dict[str, Array]:
    """The same in numpy, entry by entry, from A as the definition has it."""
    A: Array = reference.weights(rows)[0].numpy()
    assert asked.shares is not None
    assert asked.keys is not None
    assert asked.spans is not None
    shares, keys, spans = (t.numpy() for t in (asked.shares, asked.keys, asked.spans))
    B, H, M, K = A.shape
    found = {
        "mass": np.zeros((B, H, M, 3)),
        "weight": np.zeros((B, H, M)),
        "spans": np.zeros((B, H, M, 2)),
        "entropy": np.zeros((B, H, M)),
        "squares": np.zeros((B, H, M)),
    }
    for b, h, m in np.ndindex(B, H, M):
        row = A[b, h, m]
        found["mass"][b, h, m] = [sum(row * shares[b, :, c]) for c in range(3)]
        found["weight"][b, h, m] = row[keys[b, m]] if keys[b, m] >= 0 else 0.0
        for s, (first, last) in enumerate(spans[b, m]):
            found["spans"][b, h, m, s] = sum(row[j] for j in range(K) if first <= j < last)
        found["entropy"][b, h, m] = -sum(a * np.log(a) for a in row if a > 0)
        found["squares"][b, h, m] = sum(a * a for a in row)
    return found


@pytest.fixture(params=["whole", "in pieces"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in pieces":
        monkeypatch.setattr(one_row, "SCORES", {"cpu": 96})


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("backend", ["reference", "streaming", "triton"])
def test_against_plain_loops(backend: str) -> None:
    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(selections(sizes=(2, 2000)), st.integers(0, 99), st.booleans())
    def check(rows: KernelRows, seed: int, linked: bool) -> None:
        torch.manual_seed(seed)
        if linked:
            B, _, M, _ = rows.q.shape
            bias = torch.randn(B, 1, rows.k.shape[2])
            rows = replace(
                rows, score_biases=(ScoreBias(bias=bias, queries=torch.rand(B, M) < 0.5),)
            )
        asked = asked_of(rows)
        with_known_lse = per_query_kernel(backend)(rows, asked)
        for name, wanted in dense(rows, asked).items():
            got = getattr(with_known_lse, name).double().numpy()
            np.testing.assert_allclose(got, wanted, rtol=0, atol=CLOSE, err_msg=name)
        check_top(rows, with_known_lse)

    check()


def check_top(rows: KernelRows, with_known_lse: Any) -> None:
    """Largest first, each at the key it names; ties may name either."""
    A, x = reference.weights(rows)[0], reference.scores(rows)[0]
    k = min(3, A.shape[3])
    score = x.topk(k).values
    seen = score > -torch.inf
    assert torch.equal(with_known_lse.top_key >= 0, seen)
    at = with_known_lse.top_key.clamp(min=0)
    scale = max(1.0, float(x[x > -torch.inf].abs().max())) if bool(seen.any()) else 1.0
    torch.testing.assert_close(
        with_known_lse.top_weight.double(), A.gather(3, at) * seen, rtol=0, atol=CLOSE
    )
    for got in (with_known_lse.top_score.double(), x.gather(3, at)):
        torch.testing.assert_close(
            got.where(seen, 0.0), score.where(seen, 0.0), rtol=0, atol=1e-6 * scale
        )
    assert bool(with_known_lse.top_score[~seen].isnan().all())


# 40 classes are more than one launch takes; shares of thirds are not exact in 16 bits.
@pytest.mark.parametrize("classes", [8, 40])
def test_masses_by_triton_against_the_definition(classes: int) -> None:
    @settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(
        selections(sizes=(2,), heads=(1, 2)),
        st.sampled_from([torch.float32, torch.float16]),  # the interpreter has no bfloat16
        st.booleans(),
        st.booleans(),
    )
    def check(rows: KernelRows, dtype: torch.dtype, known: bool, divided: bool) -> None:
        biases = {"key_bias": None, "distance_bias": None, "score_biases": ()}
        rows = replace(rows, q=rows.q.to(dtype), k=rows.k.to(dtype), **biases)
        B, K = rows.k.shape[0], rows.k.shape[2]
        shares = torch.nn.functional.one_hot(torch.randint(0, classes, (B, K)), classes).float()
        asked = PerQueryRequest(shares=shares / 3 if divided else shares)
        wanted = per_query_kernel("reference")(rows, asked).mass
        lse = reference.weights(rows)[2]
        given = replace(rows, lse=lse.where(lse > -torch.inf, 0.0).float()) if known else rows
        with_known_lse = per_query_kernel("triton")(given, asked)
        torch.testing.assert_close(with_known_lse.mass, wanted, rtol=0, atol=1e-6)
        assert with_known_lse.lse_error is not None
        assert float(with_known_lse.lse_error.max()) < 1e-5

    check()


def test_rows_that_do_not_add_up_under_the_given_log_sum_exp_drift() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    rows = KernelRows(q=q, k=k, scale=0.3, causal=True)
    right = reference.weights(rows)[2].float()
    asked = PerQueryRequest(shares=torch.ones(1, 40, 1))
    with_known_lse = per_query_kernel("triton")(replace(rows, lse=right + 0.01), asked)
    assert with_known_lse.lse_error is not None
    assert float(with_known_lse.lse_error.min()) == pytest.approx(0.01, rel=0.01)


def test_triton_uses_the_common_kernel_for_other_requests() -> None:
    """Scores that float32 rounds, and all that is no mass."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    asked = PerQueryRequest(shares=torch.ones(1, 9, 1) / 2)
    large = per_query_kernel("triton")(KernelRows(q=q * 3000, k=k, scale=1.0, causal=True), asked)
    assert large.lse_error is None
    torch.testing.assert_close(large.mass, torch.full((1, 2, 9, 1), 0.5))
    rows = KernelRows(q=q, k=k, scale=1.0, causal=True)
    both = per_query_kernel("triton")(rows, replace(asked, entropies=True))
    wanted = per_query_kernel("reference")(rows, PerQueryRequest(entropies=True))
    assert both.mass is not None
    torch.testing.assert_close(both.entropy, wanted.entropy, rtol=0, atol=CLOSE)


def test_renyi_entropy_of_an_even_row_is_its_logarithm() -> None:
    A = torch.full((1, 1, 1, 8), 1 / 8)
    squares = one_row.of_weights(A, PerQueryRequest(entropies=True)).squares
    assert squares is not None
    assert float(renyi2(squares)) == pytest.approx(np.log(8))
    assert bool(renyi2(torch.zeros(1)).isnan())


def test_a_sink_that_takes_all_leaves_the_largest_score_known() -> None:
    """The weights round to 0; which key is largest, and its score, do not."""
    rows = KernelRows(
        q=torch.ones(1, 1, 1, 4),
        k=torch.tensor([0.0, 2.0, 1.0])[None, None, :, None].expand(1, 1, 3, 4),
        scale=1.0,
        start=torch.zeros(1, 1).int(),
        stop=torch.full((1, 1), 3).int(),
        self_key=torch.full((1, 1), 2).int(),
        sinks=torch.tensor([1000.0]),
    )
    for backend in ("reference", "streaming"):
        with_known_lse = per_query_kernel(backend)(rows, PerQueryRequest(top=1, entropies=True))
        assert with_known_lse.top_key.item() == 1
        assert with_known_lse.top_score.item() == 8.0
        assert with_known_lse.top_weight.item() == with_known_lse.entropy.item() == 0.0
