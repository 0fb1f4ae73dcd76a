"""One claim under many choices."""

from typing import Any

import numpy as np
import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.stats.claims import Claim, built_in
from attnscope.stats.sensitivity import sensitivity, survival
from attnscope.stats.verdicts import judge
from made_values import masses, measured

ASKED: dict[str, Any] = {
    "models": {"base": "x", "tuned": "y"},
    "conditions": {
        "none": {"insert": None},
        "slashes": {"insert": {"kind": "repeat", "count": 55}, "position": "between"},
        "short": {"insert": {"kind": "repeat", "count": 10}, "position": "end"},
        "sentence": {"insert": {"kind": "sentence", "count": 55}, "position": "between"},
    },
    "queries": ["all", "last"],
}


def noise(*at: Any) -> float:
    return float(np.random.default_rng([sum(map(ord, str(part))) for part in at]).normal())


def claim(name: str) -> Claim:
    return next(claim for claim in built_in() if claim.name == name)


def table() -> pl.DataFrame:
    """The tuned model looks more with all queries, less with the last one."""

    def value(queries: str):  # type: ignore[no-untyped-def]
        way = 1 if queries == "all" else -1
        return lambda m, *at: 0.3 + 0.05 * way * (m == "tuned") + 0.01 * noise(m, queries, *at)

    return pl.concat([masses(value(queries), queries=queries) for queries in ("last", "all")])


@pytest.fixture(scope="module")
def made() -> pl.DataFrame:
    return sensitivity(claim("map-characters"), table(), experiment=ASKED, resamples=300)


def test_a_row_for_every_choice_and_layer(made: pl.DataFrame) -> None:
    assert made.height == 2 * 4 * 2  # queries × normalisations × layers
    reference = made.filter("reference")
    assert reference.select("queries", "normalise", "layer").rows() == [
        ("all", "mass", 0),
        ("all", "mass", 1),
    ]
    assert reference["verdict"].unique().to_list() == ["supported"]
    assert made.filter(queries="last", normalise="lift")["changed"].unique().to_list() == [
        "queries, normalise"
    ]


def test_a_row_is_what_the_claim_says_under_that_choice(made: pl.DataFrame) -> None:
    own = claim("map-characters")
    part = own.parts[0]
    quantity = part.quantity.model_copy(update={"queries": "last", "normalise": "lift"})
    changed = own.model_copy(update={"parts": (part.model_copy(update={"quantity": quantity}),)})
    verdict = judge([changed], table(), experiment=ASKED, resamples=300)[1]
    row = made.filter(queries="last", normalise="lift", layer=1).row(0, named=True)
    assert verdict.figures is not None
    for name in ("difference", "low", "high", "q", "n"):
        assert row[name] == verdict.figures[name][0]
    assert row["verdict"] == verdict.verdict == "contradicted"


def test_what_overturns_the_conclusion_is_named(made: pl.DataFrame) -> None:
    last = made.filter(queries="last").filter(pl.col("normalise") != "share")
    assert not last["same_sign"].any()
    assert not last["same_verdict"].any()
    survived = survival(made)
    assert survived["choices"].to_list() == [8, 8]
    assert not survived["survives"].any()
    # The share of the only two classes is 1 for everybody; the last query overturns by itself.
    assert set(survived["overturned_by"][0]) == {"queries last", "normalise share"}
    kept = survival(made.filter(queries="all").filter(pl.col("normalise") != "share"))
    assert kept["survives"].all()
    assert kept["same_sign"].to_list() == [3, 3]


def test_conditions_are_choices_with_what_they_insert() -> None:
    def value(m: str, p: int, c: str, *at: Any) -> float:
        return (0.95 if c != "sentence" else 0.3) + 0.01 * noise(p, c, *at)

    fits = measured(
        "affine_r2", value, conditions=("slashes", "short", "sentence"), heads=None, layers=1
    )
    made = sensitivity(claim("affine"), fits, experiment=ASKED, resamples=300)
    assert made.select("condition", "kind", "count", "position", "verdict", "reference").rows() == [
        ("slashes", "repeat", 55, "between", "supported", True),
        ("short", "repeat", 10, "end", "supported", True),
        ("sentence", "sentence", 55, "between", "contradicted", False),
    ]
    assert survival(made)["overturned_by"][0].to_list() == ["condition sentence"]


def test_a_claim_about_a_region_stays_with_it() -> None:
    both = pl.concat([masses(keys=keys) for keys in ("all", "maps")])
    made = sensitivity(claim("maps"), both, experiment=ASKED, resamples=300)
    assert made["keys"].unique().to_list() == ["maps"]
    assert set(made["normalise"]) == {"mass", "per-token", "lift"}
    open_to_it = sensitivity(claim("map-characters"), both, experiment=ASKED, resamples=300)
    assert set(open_to_it["keys"]) == {"all", "maps"}


def test_the_second_of_a_pair_of_conditions_is_varied() -> None:
    def value(m: str, p: int, c: str, *at: Any) -> float:
        return {"slashes": 0.2, "short": 0.9, "sentence": 0.5}[c] + 0.01 * noise(p, c, *at)

    table = measured("uniformity", value, conditions=("slashes", "short", "sentence"), layers=1)
    made = sensitivity(claim("uniform-filler"), table, experiment=ASKED, resamples=300)
    said = dict(made.select("condition", "verdict").iter_rows())
    assert said["sentence, slashes"] == "supported"
    assert said["sentence, short"] == "contradicted"
    assert len(said) == 2  # nothing is compared with itself


def test_a_claim_that_the_run_cannot_decide() -> None:
    with pytest.raises(InputError, match="'affine' is about affine_r2"):
        sensitivity(claim("affine"), table(), experiment=ASKED)
    with pytest.raises(InputError, match="keys 'maps' were not measured"):
        sensitivity(claim("maps"), table(), experiment=ASKED)
