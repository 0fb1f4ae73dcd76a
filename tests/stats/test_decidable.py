"""What `run --check` says a number of prompts can decide is what tests then decide."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscope.spec.claims import make_claims
from attnscope.stats.decidable import decidable, detectable
from attnscope.stats.families import at_least, prompts_for
from attnscope.stats.means import one_sample
from attnscope.stats.outcome import ALPHA


def of(lines, n, layers=4, heads=3):
    (claim,) = make_claims({"it": lines}, "test")
    return decidable(claim, lambda cluster: n, layers, heads)


def test_detectable_differences_are_nan_where_prompts_cannot_decide():
    assert np.isnan(detectable(5))
    assert np.isnan(detectable(6, tests=28))
    assert detectable(100) < detectable(12) < detectable(12, tests=28)


@pytest.mark.parametrize("n", [12, 40])
def test_a_detectable_difference_is_found_four_times_in_five(n):
    x = np.random.default_rng(n).normal(size=(n, 4000)) + detectable(n)
    found = (one_sample(x).two_sided() <= ALPHA).mean()
    assert 0.7 < found < 0.83


@given(tests=st.integers(1, 60))
def test_the_least_number_of_prompts_is_the_smallest_that_decides(tests):
    least = prompts_for(tests, ALPHA / 2)
    for n in (least - 1, least):
        x = 1 + 1e-6 * np.arange(n)[:, None]
        decides = one_sample(x).decides(ALPHA / tests)[0]
        assert decides == (n >= least)


@given(n=st.integers(6, 20), needed=st.integers(1, 12))
def test_heads_can_be_decided_exactly_when_perfect_values_decide(n, needed):
    x = np.tile(1 + 1e-9 * np.arange(n)[:, None], (1, 12))
    holds = at_least(one_sample(x).more(), ALPHA / 2) >= needed
    (one,) = of([f"first_token > 0.3 in at least {needed} heads"], n)
    assert (n >= one.least) == holds


def test_more_lines_and_layers_need_more():
    (mean,), (each,) = (of([f"first_token > 0.3{scope}"], 24) for scope in ("", " in each layer"))
    assert (mean.least, each.least) == (6, prompts_for(4, ALPHA / 2))
    assert mean.text != each.text
    two = of(["first_token > 0.3 in most heads", "entropy > 1"], 24)
    assert two[0].least > of(["first_token > 0.3 in most heads"], 24)[0].least
    (impossible,) = of(["first_token > 0.3 in at least 99 heads"], 24)
    assert impossible.least == 0
