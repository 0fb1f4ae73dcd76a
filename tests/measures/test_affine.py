"""The affine fit: recovered where it is known, least squares where it is not."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscope.measures.affine import affine_fit
from attnscope.measures.slope import slope
from attnscope.measures.spikes import spikes


@given(st.floats(-2, 2), st.integers(3, 30), st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_numpy_solves_the_same_least_squares(slope: float, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.normal(size=(n, 5))
    new = slope * old + rng.normal(size=5) + 0.3 * rng.normal(size=(n, 5))
    # Unknowns: λ and the five numbers of σ; one equation per token and dimension.
    design = np.column_stack([old.reshape(-1), np.tile(np.eye(5), (n, 1))])
    solution, left, *_ = np.linalg.lstsq(design, new.reshape(-1))
    fit = affine_fit(torch.from_numpy(old), torch.from_numpy(new))
    assert fit.slope == pytest.approx(solution[0], abs=1e-9)
    np.testing.assert_allclose(fit.shift, solution[1:], atol=1e-9)
    assert fit.sigma == pytest.approx(np.linalg.norm(solution[1:]), abs=1e-9)
    assert fit.r2 == pytest.approx(1 - left[0] / ((new - new.mean(0)) ** 2).sum(), abs=1e-9)
    assert fit.tokens == n


class Synthetic:
    """Attention without and with a filler in front that takes `share` of every query, spread over
    its tokens, all of them with one value vector.
    """

    def __init__(self, share: float, filler: int = 20, n: int = 40):
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        values, self.blank = randn(n, 8), randn(8)
        scores = (randn(n, n) * 2).masked_fill(~torch.ones(n, n).tril().bool(), -1e9)
        self.A = torch.softmax(scores, -1)
        even = torch.full((n, filler), share / filler, dtype=torch.float64)
        self.A_filled = torch.cat([even, (1 - share) * self.A], 1)
        self.old = self.A @ values
        self.new = self.A_filled @ torch.cat([self.blank.expand(filler, 8), values])


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6])
def test_known_lambda_and_sigma_are_recovered(share: float) -> None:
    made = Synthetic(share)
    fit = affine_fit(made.old, made.new)
    assert fit.slope == pytest.approx(1 - share, abs=1e-9)
    torch.testing.assert_close(fit.shift, share * made.blank, rtol=0, atol=1e-9)
    assert fit.r2 == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6])
def test_known_lambda_is_recovered_from_average_attention(share: float) -> None:
    made = Synthetic(share)
    n = len(made.A)
    after = torch.ones(n, n).tril(-1).bool()  # the queries after each token
    count = after.sum(0).clamp(min=1)
    base = ((made.A * after).sum(0) / count)[:-1].numpy()
    variant = ((made.A_filled[:, 20:] * after).sum(0) / count)[:-1].numpy()
    everyone = np.ones(n - 1, dtype=bool)
    factor, ratio, _, _ = slope(base, variant, everyone)
    at, rest, *_ = spikes(base, variant, everyone, 0.1)
    assert [factor, ratio, at, rest] == pytest.approx([1 - share] * 4, abs=1e-9)


def test_what_is_not_affine_does_not_fit() -> None:
    old = torch.randn(200, 16)
    assert affine_fit(old, torch.randn(200, 16)).r2 < 0.05
    assert affine_fit(old, old.roll(1, 0)).r2 < 0.05


def test_the_dtype_of_the_model_is_no_matter() -> None:
    made = Synthetic(0.4)
    half = affine_fit(made.old.bfloat16(), made.new.bfloat16())
    assert half.slope == pytest.approx(0.6, abs=0.01)


def test_undetermined() -> None:
    for old in (torch.full((7, 3), 0.1).double(), torch.randn(1, 3), torch.randn(0, 3)):
        fit = affine_fit(old, torch.randn(len(old), 3))
        assert np.isnan([fit.slope, fit.sigma, fit.r2]).all()
    flat = affine_fit(torch.randn(5, 3), torch.full((5, 3), 0.1).double())
    assert flat.slope == pytest.approx(0, abs=1e-12)
    assert np.isnan(flat.r2)
