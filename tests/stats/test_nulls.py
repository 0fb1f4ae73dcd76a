"""No claim is supported by noise, and none is missed where it is true: every built-in claim, in
the worlds of `benchmarks/nulls.py`, which has the same with more sets.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
from numpy.random import RandomState

from attnscope.spec.claims import built_in

FILE = Path(__file__).parents[2] / "benchmarks" / "nulls.py"
found = importlib.util.spec_from_file_location("nulls", FILE)
assert found is not None
assert found.loader is not None
nulls = sys.modules["nulls"] = importlib.util.module_from_spec(found)
found.loader.exec_module(nulls)

pytestmark = pytest.mark.statistics

SETS = 12
CASES = nulls.cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.claim.name}: {case.world}")
def test_a_claim_in_a_world(case) -> None:  # type: ignore[no-untyped-def]
    supported = nulls.verdicts(case, SETS, resamples=200, stream=RandomState).count("supported")
    if case.true:
        assert supported >= 0.8 * SETS
    else:  # of 12 sets at 5 per cent each, 3 or more come up in one test of fifty
        assert supported <= 2


def test_every_claim_has_worlds_of_both_kinds() -> None:
    for claim in built_in():
        kinds = {case.true for case in CASES if case.claim == claim}
        assert kinds == {True, False}, claim.name
