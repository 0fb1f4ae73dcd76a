"""One claim under many choices."""

from typing import Any

import numpy as np
import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.spec.claims import Claim, built_in
from attnscope.spec.experiment import make_experiment as made_experiment
from attnscope.stats.robustness import robustness, robustness_summary
from attnscope.stats.sensitivity import MOST, sensitivity
from attnscope.stats.verdicts import judge
from made_values import masses, measured
from support_errors import raises

QUESTION: dict[str, Any] = {
    "name": "choices",
    "prompts": {"source": "spatial"},
    "models": {"base": "x", "tuned": "y"},
    "conditions": {
        "none": {"insert": None},
        "slashes": {"insert": {"kind": "repeat", "count": 55}, "position": "between"},
        "short": {"insert": {"kind": "repeat", "count": 10}, "position": "end"},
        "sentence": {"insert": {"kind": "sentence", "count": 55}, "position": "between"},
    },
    "queries": ["all", "last"],
}
ASKED = made_experiment(**QUESTION)


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
    survived = robustness(made)
    assert survived["choices"].to_list() == [8, 8]
    assert not survived["survives"].any()
    # The share of the only two classes is always 1; the last query overturns by itself.
    assert set(survived["overturned_by"][0]) == {"queries last", "normalise share"}
    kept = robustness(made.filter(queries="all").filter(pl.col("normalise") != "share"))
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
        ("short", "repeat", 10, "end", "supported", False),
        ("sentence", "sentence", 55, "between", "contradicted", False),
    ]
    assert robustness(made)["overturned_by"][0].to_list() == ["condition sentence"]


def test_of_several_conditions_that_a_claim_is_about_the_first_is_the_reference() -> None:
    def value(m: str, p: int, c: str, *at: Any) -> float:
        return (0.95 if c == "slashes" else 0.3) + 0.01 * noise(p, c, *at)

    fits = measured("affine_r2", value, conditions=("short", "slashes"), heads=None, layers=1)
    made = sensitivity(claim("affine"), fits, experiment=ASKED, resamples=300)
    # Both are of the kind `repeat`; the experiment lists the slashes first.
    assert made.filter("reference")["condition"].to_list() == ["slashes"]
    survived = robustness(made).row(0, named=True)
    assert (survived["verdict"], survived["survives"]) == ("supported", False)
    assert survived["overturned_by"] == ["condition short"]


def test_a_model_without_a_reference_has_nothing_to_survive() -> None:
    def value(m: str, p: int, c: str, *at: Any) -> float:
        return 0.95 + 0.01 * noise(m, p, c, *at)

    whole = measured(
        "affine_r2", value, models=("one", "two"), conditions=("slashes", "short"), heads=None
    )
    only = whole.filter((pl.col("model") == "one") | (pl.col("condition") == "short"))
    made = sensitivity(claim("affine"), only, experiment=ASKED, resamples=300)
    assert made.filter("reference").select("model", "condition").rows() == [
        ("one", "slashes"),
        ("two", "short"),
    ]
    cut = made.filter(~((pl.col("model") == "two") & pl.col("reference")))
    lone = cut.vstack(cut.filter(model="one").with_columns(pl.lit("three").alias("model")))
    lone = lone.with_columns(
        pl.when(pl.col("model") == "three")
        .then(None)
        .otherwise("same_verdict")
        .alias("same_verdict")
    )
    assert dict(robustness(lone).select("model", "survives").iter_rows()) == {
        "one": True,
        "three": None,
    }


def test_class_sets_that_leave_nothing_out_are_one_choice_for_all_classes() -> None:
    def of(p: int, share: float) -> float:
        return share * (0.4 + 0.1 * noise(p))

    def value(m: str, p: int, c: str, layer: int, head: int, item: str) -> float:
        return of(p, {"hash": 0.25, "star": 0.75}[item])

    def other(m: str, p: int, c: str, layer: int, head: int, item: str) -> float:
        return of(p, {"hash": 0.5, "star": 0.5}[item])

    less = masses(value, keys="maps").filter(item="hash")
    sets = [
        masses(value, keys="maps").with_columns(pl.lit("first").alias("classes")),
        masses(other, keys="maps").with_columns(pl.lit("second").alias("classes")),
        less.with_columns(pl.lit("part").alias("classes")),
    ]
    sets_of = dict.fromkeys(("second", "first", "part"), "default")
    asked = made_experiment(**{**QUESTION, "classes": sets_of})
    made = sensitivity(claim("maps"), pl.concat(sets), experiment=asked, resamples=300)
    assert set(made["classes"]) == {"second", "part"}
    named = sensitivity(claim("map-characters"), pl.concat(sets), experiment=asked, resamples=300)
    assert set(named["classes"]) == {"second", "first"}  # `part` has no star


def test_a_claim_in_a_line(made: pl.DataFrame) -> None:
    summed = robustness_summary(made)
    survived = robustness(made)
    assert (summed["claim"], summed["verdict"]) == ("map-characters", "supported")
    assert (summed["choices"], summed["verdicts"]) == (8, 16)
    assert summed["same_verdict"] == survived["same_verdict"].sum() < 16
    assert (summed["places"], summed["survives"]) == (2, 0)
    assert [line.partition(": ")[0] for line in summed["overturned_by"]] == ["layer 0", "layer 1"]
    assert "queries last" in summed["overturned_by"][0]


def test_a_verdict_on_all_heads_counts_once_in_a_line() -> None:
    def value(m: str, p: int, c: str, *at: Any) -> float:
        return (0.95 if c == "slashes" else 0.3) + 0.01 * noise(p, c, *at)

    fits = measured("lambda_r2", value, conditions=("slashes", "short"), heads=5, layers=1)
    fit = claim("one-factor").parts[1]
    alone = claim("one-factor").model_copy(update={"parts": (fit,)})
    made = sensitivity(alone, fits, experiment=ASKED, resamples=300)
    assert made.height == 10
    summed = robustness_summary(made)
    assert (summed["choices"], summed["verdicts"], summed["same_verdict"]) == (2, 2, 1)
    assert summed["overturned_by"] == ["base, layer 0: condition short"]


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

    conditions = ("slashes", "short", "sentence")
    table = measured("uniformity", value, conditions=conditions, layers=1, heads=6)
    made = sensitivity(claim("uniform-filler"), table, experiment=ASKED, resamples=300)
    verdicts_of = dict(made.select("condition", "verdict").iter_rows())
    assert verdicts_of["sentence, slashes"] == "supported"
    assert verdicts_of["sentence, short"] == "contradicted"
    assert len(verdicts_of) == 2  # nothing is compared with itself


def test_the_share_of_spikes_is_a_choice() -> None:
    """Of the tokens, a tenth falls more than the rest, and a third does not."""

    def value(name: str, item: str | None) -> Any:
        ratio = {"0.1": 0.4, "0.3": 0.7}.get(str(item), 0.6)
        mean = {"spike_ratio": ratio, "spike_fall": 0.7, "uniform_ratio": 0.8}.get(name, 0.7)
        mean = 0.6 if name == "lambda_ratio" else mean
        return lambda *at: mean + 0.01 * noise(name, item, *at)

    table = pl.concat(
        [
            measured(name, value(name, item), conditions=["slashes"], heads=6, layers=1, item=item)
            for name, items in (
                ("lambda_ratio", [None]),
                ("uniform_ratio", [None]),
                *((n, ["0.1", "0.3"]) for n in ("spike_ratio", "rest_ratio", "spike_fall")),
            )
            for item in items
        ]
    )
    for part in (0, 2):
        made = sensitivity(claim("fall"), table, experiment=ASKED, part=part, resamples=300)
        assert dict(made.select("spikes", "verdict").iter_rows()) == {
            "0.1": "supported",
            "0.3": "contradicted",
        }
        assert made.filter("reference")["spikes"].to_list() == ["0.1"]
        assert robustness(made)["overturned_by"].to_list() == [["spikes 0.3"]]


def test_a_claim_that_the_run_cannot_decide() -> None:
    with raises(InputError, "not-measured", measures=["affine_r2"]):
        sensitivity(claim("affine"), table(), experiment=ASKED)
    with raises(InputError, "not-measured", claim="maps"):
        sensitivity(claim("maps"), table(), experiment=ASKED)


def test_of_very_many_choices_those_with_the_fewest_changes_are_judged(monkeypatch: Any) -> None:
    """5 queries × 4 keys × 4 normalisations are 80 combinations."""
    judged = []

    def counted(claims: Any, *rows: Any, **settings: Any) -> Any:
        judged.append(claims)
        return judge(claims, *rows, **settings)

    monkeypatch.setattr("attnscope.stats.sensitivity.judge", counted)
    queries, keys = [f"region:q{n}" for n in range(5)], [f"k{n}" for n in range(4)]
    many = pl.concat(
        masses(prompts=range(6), layers=1, heads=1, queries=q, keys=k)
        for q in queries
        for k in keys
    )
    asked = made_experiment(**{**QUESTION, "queries": queries, "keys": keys})
    found = sensitivity(claim("map-characters"), many, experiment=asked, resamples=100)
    assert len(judged) <= 1 + MOST
    assert found.select("queries", "keys", "normalise").n_unique() == MOST
    assert found["not_judged"].unique().to_list() == [80 - MOST]
    assert found["reference"].sum() == 1
    changes = found["changed"].str.split(", ").list.len()
    alone = found.filter(~pl.col("reference") & (changes == 1))
    assert alone.height == 4 + 3 + 3
    assert found.filter(changes == 2).height == 4 * 3 + 4 * 3 + 3 * 3
    assert robustness_summary(found)["not_judged"] == 80 - MOST


def test_the_pair_of_a_comparison_over_queries_is_no_choice() -> None:
    """Rows of one side alone cannot be compared, so such a claim had no rows at all."""
    over = Claim.model_validate(
        {
            "name": "last-queries",
            "statement": "The last query attends more.",
            "condition": "base",
            "quantity": {"measure": "mass"},
            "comparison": {"over": "queries", "pair": ["last", "all"]},
            "direction": "more",
            "scope": {"layers": "all", "heads": "mean"},
        }
    )
    made = sensitivity(over, table(), experiment=ASKED, resamples=300)
    assert made["queries"].n_unique() == 1
    assert made["difference"].is_not_null().any()
