"""Claims: what can be written, and what a made table says about it."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from attnscope.cli import app
from attnscope.errors import InputError
from attnscope.run.schemas import CELLS, POSITIONS, TOKENS
from attnscope.spec.claims import Claim, ClaimPart, built_in, digest, frozen, load_claims
from attnscope.spec.experiment import make_experiment
from attnscope.stats.evidence import _decided
from attnscope.stats.formatting import as_json, as_tables
from attnscope.stats.intervals import intervals, moments, two_sided
from attnscope.stats.outcome import outcome_of
from attnscope.stats.paired import compare
from attnscope.stats.permute import sign_flip
from attnscope.stats.verdicts import FROZEN, Verdict, judge, verdict_table
from made_runs import MadeRun, write_run
from made_values import masses, measured
from support_errors import raises

ASKED: dict[str, Any] = {
    "name": "claims",
    "prompts": {"source": "spatial"},
    "models": {"base": "x", "tuned": "y"},
    "conditions": {
        "none": {"insert": None},
        "slashes": {"insert": {"kind": "repeat", "count": 55}},
        "sentence": {"insert": {"kind": "sentence", "count": 55}},
    },
    "queries": ["all"],
    "keys": ["all"],
    "classes": ["default"],
}
EXPERIMENT = make_experiment(**ASKED)


def noise(*at: Any) -> float:
    return float(np.random.default_rng([sum(map(ord, str(part))) for part in at]).normal())


def around(mean: float, spread: float = 0.02):  # type: ignore[no-untyped-def]
    """A value for every cell that varies about a mean; noise goes by cell, not by order."""
    return lambda *at: mean + spread * noise(*at)


def fillers(measure: str, mean: float, conditions=("slashes",), **more: Any) -> pl.DataFrame:  # type: ignore[no-untyped-def]
    return measured(
        measure, lambda *at: mean + 0.02 * noise(measure, *at), conditions=conditions, **more
    )


def verdicts(name: str, *parts: pl.DataFrame, **more: Any) -> list[Verdict]:
    chosen = [claim for claim in built_in() if claim.name == name]
    assert chosen
    return judge(chosen, pl.concat(parts), experiment=EXPERIMENT, resamples=500, **more)


def falling(ratio: float, spike: float, rest: float, share: float = 0.7) -> list[pl.DataFrame]:
    """λ, with an even λ of 0.8; the fall at the spikes, at the rest, and the spikes' share."""
    return [
        fillers("lambda_ratio", ratio, heads=6),
        fillers("uniform_ratio", 0.8, heads=6),
        fillers("spike_ratio", spike, heads=6, item="0.1"),
        fillers("rest_ratio", rest, heads=6, item="0.1"),
        fillers("spike_fall", share, heads=6, item="0.1"),
    ]


@pytest.mark.parametrize(
    ("ratio", "spike", "rest", "share", "expected"),
    [
        (0.6, 0.4, 0.7, 0.7, "supported"),
        (0.6, 0.7, 0.4, 0.7, "contradicted"),  # falls, but not at the spikes
        (0.6, 0.4, 0.7, 0.3, "contradicted"),  # at the spikes, but not mostly
        (0.8, 0.4, 0.7, 0.7, "contradicted"),  # as far as uniform attention would
        (0.6, 0.48, 0.5, 0.7, "undetermined"),  # at the spikes by about 0.05
    ],
)
def test_the_fall(ratio: float, spike: float, rest: float, share: float, expected: str) -> None:
    (verdict,) = verdicts("fall", *falling(ratio, spike, rest, share))
    assert verdict.verdict == expected, verdict.reason
    assert (verdict.model, verdict.condition) == ("base", "slashes")
    assert "With slashes" in verdict.statement


def test_the_figures_that_decide_are_shown_and_right() -> None:
    (verdict,) = verdicts("fall", *falling(0.6, 0.4, 0.7))
    assert verdict.figures is not None
    row = verdict.figures.filter(part=0).row(0, named=True)
    sides = [
        side.filter(layer=0).group_by("prompt", maintain_order=True).agg(pl.col("value").mean())
        for side in falling(0.6, 0.4, 0.7)[:2]
    ]
    logs = np.log(sides[0]["value"].to_numpy()) - np.log(sides[1]["value"].to_numpy())
    interval = intervals(logs, resamples=500)  # itself checked against scipy
    assert row["difference"] == pytest.approx(np.exp(logs.mean()), abs=1e-9)
    assert row["low"] == pytest.approx(np.exp(interval.low[0]), abs=1e-9)
    assert row["high"] == pytest.approx(np.exp(interval.high[0]), abs=1e-9)
    # The test is against what has to be exceeded: a factor of 1.05 down.
    p = two_sided(moments(logs + np.log(1.05)))[0]
    flips, _ = sign_flip(logs + np.log(1.05), resamples=500)
    assert row["p"] == pytest.approx(max(p, flips[0]), abs=1e-9)
    # The layout: the number with its interval, what was required, n.
    number = f"{row['difference']:.4g} [{row['low']:.4g}, {row['high']:.4g}]"
    parts = verdict.reason.split("; ")
    assert len(parts) == 4
    assert re.search(rf"{re.escape(number)}, .* < {1 / 1.05:.4g}, .* = 12 ", parts[0])
    assert re.search(r"6 of 6 heads .* 60\.7 %, .* 50 %, .* = 12 ", parts[1])


@pytest.mark.parametrize(
    ("slope", "ratio", "r2", "spike", "rest", "expected"),
    [
        (0.6, 0.6, 0.97, 0.6, 0.6, "supported"),
        (0.8, 0.8, 0.97, 0.8, 0.8, "contradicted"),  # as far as uniform attention would
        (0.6, 0.6, 0.5, 0.6, 0.6, "contradicted"),  # tokens scatter about the factor
        (0.3, 0.6, 0.97, 0.3, 0.7, "contradicted"),
        (0.6, 0.6, 0.97, 0.3, 0.7, "contradicted"),
        (0.66, 0.6, 0.97, 0.6, 0.6, "undetermined"),  # about 1.1, the edge of what is close
    ],
)
def test_one_factor(
    slope: float, ratio: float, r2: float, spike: float, rest: float, expected: str
) -> None:
    parts = [
        fillers("lambda", slope, heads=6),
        fillers("lambda_r2", r2, heads=6),
        *falling(ratio, spike, rest),
    ]
    (verdict,) = verdicts("one-factor", *parts)
    assert verdict.verdict == expected, verdict.reason


def test_claims_that_exclude_each_other_are_not_both_supported() -> None:
    """Each by itself is, with numbers that no run could have."""
    parts = pl.concat(
        [
            fillers("lambda", 0.6, heads=6),
            fillers("lambda_r2", 0.97, heads=6),
            *falling(0.6, 0.56, 0.62),
        ]
    )
    chosen = [claim for claim in built_in() if claim.name in ("fall", "one-factor")]
    alone = [judge([c], parts, experiment=EXPERIMENT, resamples=500)[0] for c in chosen]
    assert [v.verdict for v in alone] == ["supported", "supported"]
    both = judge(chosen, parts, experiment=EXPERIMENT, resamples=500)
    assert [v.verdict for v in both] == ["undetermined", "undetermined"]
    assert "'one-factor'" in both[0].reason
    assert "'fall'" in both[1].reason


@pytest.mark.parametrize(
    ("r2", "expected"), [(0.97, "supported"), (0.5, "contradicted"), (0.9, "undetermined")]
)
def test_affine(r2: float, expected: str) -> None:
    (verdict,) = verdicts("affine", fillers("affine_r2", r2, heads=None))
    assert verdict.verdict == expected, verdict.reason


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        (0.96, 0.7, "supported"),
        (0.96, 0.99, "contradicted"),
        (0.7, 0.5, "contradicted"),  # worse in later layers, and no fit in the first
        (0.96, 0.9, "undetermined"),
    ],
)
def test_affine_in_the_first_layer_only(first: float, later: float, expected: str) -> None:
    def value(m: str, p: int, c: str, layer: int, h: None) -> float:
        return (first if layer == 0 else later) + 0.02 * noise(p, layer)

    table = measured("affine_r2", value, conditions=["slashes"], heads=None)
    (verdict,) = verdicts("affine-first-layer-only", table)
    assert verdict.verdict == expected, verdict.reason


def test_uniform_filler_compares_the_kinds_of_insertion() -> None:
    def value(m: str, p: int, c: str, *at: Any) -> float:
        return (0.2 if c == "slashes" else 0.8) + 0.02 * noise(p, c, *at)

    table = measured("uniformity", value, conditions=("slashes", "sentence"), heads=6)
    (verdict,) = verdicts("uniform-filler", table)
    assert verdict.verdict == "supported", verdict.reason
    assert "filler (slashes)" in verdict.statement
    assert "sentence (sentence)" in verdict.statement


def tuned_looks_more(m: str, p: int, c: str, layer: int, h: int, item: str) -> float:
    """Less in layer 0, more in layer 1, and in layer 2 more by the 0.05 that is asked for."""
    shift = {0: -0.05, 1: 0.05, 2: 0.01}[layer] * (m == "tuned")
    return 0.2 + shift + 0.01 * noise(m, p, layer, h, item)


def test_maps_has_a_verdict_for_every_layer() -> None:
    table = masses(tuned_looks_more, layers=3, keys="maps", prompts=range(20))
    made = verdict_table(verdicts("maps", table))
    assert made["layer"].to_list() == [0, 1, 2]
    assert made["verdict"].to_list() == ["contradicted", "supported", "undetermined"]
    (claim,) = (claim for claim in built_in() if claim.name == "maps")
    assert made["statement"][1] == claim.statement.format(layer=1, a="base", b="tuned")
    swapped = verdict_table(verdicts("maps", table, pair=("tuned", "base")))
    assert swapped["verdict"].to_list() == ["supported", "contradicted", "contradicted"]


def test_classes_are_added_up() -> None:
    table = masses(tuned_looks_more, layers=3, items=("hash", "star", "word"))
    made = verdicts("map-characters", table)
    row = made[1].figures.row(0, named=True)  # type: ignore[union-attr]
    both = table.filter(pl.col("item") != "word", layer=1, model="tuned")
    added = both.group_by("prompt", "head").agg(pl.col("value").sum())
    by_prompt = added.group_by("prompt").agg(pl.col("value").mean())["value"]
    assert row["mean_b"] == pytest.approx(float(np.exp(by_prompt.log().mean())), abs=1e-9)
    assert row["item"] == "hash+star"


@pytest.mark.parametrize("how", ["lift", "per-token", "share"])
def test_added_classes_are_normalised_together(how: str) -> None:
    claim = Claim.model_validate(
        {
            "name": "x",
            "statement": "x",
            "condition": "base",
            "quantity": {"measure": "mass", "item": ["hash", "star"], "normalise": how},
            "comparison": {"over": "model"},
            "direction": "more",
            "scope": {"layers": [0]},
        }
    )
    table = masses(items=("hash", "star", "word"))
    (verdict,) = judge([claim], table, experiment=EXPERIMENT, resamples=500)
    assert verdict.figures is not None
    here = table.filter(layer=0, model="base")
    per_prompt = []
    for prompt in range(12):
        means = here.filter(prompt=prompt).group_by("item").agg(pl.col("value").mean())
        mass = dict(means.iter_rows())
        of = {
            "lift": 2 * (0.1 + 0.01 * prompt),
            "per-token": 2 * (3 + prompt),
            "share": sum(mass.values()),
        }[how]
        per_prompt.append((mass["hash"] + mass["star"]) / of)
    assert verdict.figures["mean_a"][0] == pytest.approx(np.mean(per_prompt), abs=1e-9)


def test_not_measured_names_what_to_measure() -> None:
    everything = judge(built_in(), masses(models=["base"]), experiment=EXPERIMENT)
    reasons = {verdict.claim: (verdict.verdict, verdict.reason) for verdict in everything}
    assert set(reasons) == {claim.name for claim in built_in()}
    assert {outcome for outcome, _ in reasons.values()} == {"not measured"}
    for name, needed in (
        ("fall", "uniform_slope"),
        ("affine", "affine"),
        ("fall-beyond-sentence", "lambda"),
    ):
        assert repr(needed) in reasons[name][1]


def test_a_kind_of_condition_that_is_missing() -> None:
    table = fillers("uniformity", 0.5)
    (verdict,) = verdicts("uniform-filler", table)
    assert verdict.verdict == "not measured"
    assert "insert: {kind: sentence}" in verdict.reason


def test_a_region_that_is_missing() -> None:
    (verdict,) = verdicts("maps", masses())
    assert verdict.verdict == "not measured"
    assert "'maps'" in verdict.reason


def test_a_layer_that_was_not_measured() -> None:
    table = measured("affine_r2", around(0.9), conditions=["slashes"], heads=None, layers=2)
    (verdict,) = verdicts("affine-first-layer-only", table)
    assert verdict.verdict == "not measured"
    assert "layer 2" in verdict.reason


def test_few_prompts_decide_nothing() -> None:
    parts = [part.filter(pl.col("prompt") < 5) for part in falling(0.6, 0.4, 0.7)]
    (verdict,) = verdicts("fall", *parts)
    assert verdict.verdict == "undetermined"
    assert "n = 5 prompts" in verdict.reason


def test_four_heads_are_too_few_for_most_heads() -> None:
    """All four agree, but the lower bound of the share is 47 %."""
    parts = [part.filter(pl.col("head") < 4) for part in falling(0.6, 0.4, 0.7)]
    (verdict,) = verdicts("fall", *parts)
    assert verdict.verdict == "undetermined"
    assert "47.3 %" in verdict.reason


def test_prompts_without_a_partner_decide_nothing() -> None:
    table = masses(tuned_looks_more, layers=3, keys="maps")
    table = table.filter((pl.col("model") == "base") | (pl.col("prompt") < 9))
    (verdict,) = verdicts("maps", table)
    assert verdict.verdict == "undetermined"
    assert "prompts 9–11" in verdict.reason


def test_constant_values_have_no_interval_and_decide_nothing() -> None:
    table = measured("affine_r2", lambda *at: 1.0, conditions=["slashes"], heads=None)
    (verdict,) = verdicts("affine", table)
    assert verdict.verdict == "undetermined"
    assert verdict.figures is not None
    assert verdict.figures["low"].to_list() == [None]


def test_heads_of_constant_values_decide_nothing_either() -> None:
    """Their signs alone would have been significant."""
    table = measured("affine_r2", lambda *at: 1.0, conditions=["slashes"], heads=None)
    claim = next(claim for claim in built_in() if claim.name == "affine")
    part = claim.parts[0]
    rule = part.rule.model_copy(update={"kind": "significant"})
    claim = claim.model_copy(update={"parts": (part.model_copy(update={"rule": rule}),)})
    (verdict,) = judge([claim], table, experiment=EXPERIMENT)
    assert verdict.verdict == "undetermined"


def test_unreliable_intervals_are_in_the_reason() -> None:
    table = measured(
        "affine_r2", lambda m, p, *at: 0.95 - 2.0**p / 5000, conditions=["slashes"], heads=None
    )
    (verdict,) = verdicts("affine", table)
    assert verdict.figures is not None
    assert verdict.figures["unreliable"].to_list() == [True]
    assert "unreliable" in verdict.reason


def test_a_verdict_for_every_model_and_condition() -> None:
    asked = {
        **ASKED,
        "conditions": {
            "none": {"insert": None},
            **{f"s{n}": {"insert": {"kind": "repeat", "count": n}} for n in (10, 25)},
        },
    }
    table = measured(
        "affine_r2", around(0.97), models=("base", "tuned"), conditions=("s10", "s25"), heads=None
    )
    claims = [claim for claim in built_in() if claim.name == "affine"]
    found = judge(claims, table, experiment=make_experiment(**asked), resamples=500)
    assert [(v.model, v.condition) for v in found] == [
        ("base", "s10"),
        ("base", "s25"),
        ("tuned", "s10"),
        ("tuned", "s25"),
    ]


def test_under_the_null_few_layers_are_called_different() -> None:
    """The verdicts over layers are corrected for their number."""
    rng = np.random.default_rng(0)
    table = masses(lambda *at: float(rng.normal()), layers=40, heads=1, items=["hash"], keys="maps")
    made = verdict_table(verdicts("maps", table))
    assert (made["verdict"] == "undetermined").sum() >= 38


# What decides a row.

ROW = {"n": 20, "units": 20, "left_out": 0, "difference": 0.3, "low": 0.1, "high": 0.5, "q": 0.01}


def part(kind: str, direction: str | None = "more", **rule: Any) -> ClaimPart:
    return ClaimPart.model_validate(
        {
            "quantity": {"measure": "entropy"},
            "comparison": {"threshold": 0.0},
            "direction": direction,
            "rule": {"kind": kind, **rule},
        }
    )


@pytest.mark.parametrize(
    ("kind", "change", "supports", "opposes"),
    [
        ("interval", {}, True, False),
        ("interval", {"low": -0.1}, False, False),  # significant, but the interval has 0 in it
        ("interval", {"q": 0.06}, False, False),  # the other way round
        ("interval", {"difference": -0.3, "low": -0.5, "high": -0.1}, False, True),
        ("interval", {"difference": -0.3, "low": -0.5, "high": 0.1}, False, False),
        ("interval", {"units": 5}, False, False),
        ("interval", {"left_out": 3}, False, False),  # more than a tenth have no value
        ("interval", {"q": None}, False, False),
        ("significant", {"low": -0.1}, True, False),
        ("significant", {"q": 0.06}, False, False),
        ("significant", {"difference": -0.3}, False, True),
        ("within", {}, True, False),
        ("within", {"high": 0.7}, False, False),
        ("within", {"low": 0.7, "high": 0.9}, False, True),
        ("within", {"low": -0.9, "high": -0.7}, False, True),
        ("within", {"units": 5}, False, False),
    ],
)
def test_what_decides_a_row(
    kind: str, change: dict[str, Any], supports: bool, opposes: bool
) -> None:
    schema = dict.fromkeys(("n", "units", "left_out"), pl.Int64) | {
        **dict.fromkeys(("difference", "low", "high", "q"), pl.Float64)
    }
    row = pl.DataFrame([{**ROW, **change}], schema=schema)
    within = kind == "within"
    rule = part(kind, None, bounds=[-0.6, 0.6]) if within else part(kind)
    made = row.with_columns(*_decided(rule))
    assert made.select("supports", "opposes").row(0) == (supports, opposes)
    if not within:
        other = row.with_columns(*_decided(part(kind, "less")))
        assert other.select("supports", "opposes").row(0) == (opposes, supports)


@pytest.mark.parametrize(
    ("share", "supports", "opposes", "expected"),
    [
        (1.0, 4, 0, "supported"),
        (1.0, 3, 0, "undetermined"),
        (1.0, 3, 1, "contradicted"),
        (0.5, 2, 2, "undetermined"),
        (0.5, 2, 1, "supported"),
        (0.5, 1, 2, "undetermined"),
        (0.5, 1, 3, "contradicted"),
    ],
)
def test_how_many_rows_decide(share: float, supports: int, opposes: int, expected: str) -> None:
    rows = pl.DataFrame(
        {
            "supports": [n < supports for n in range(4)],
            "opposes": [n >= 4 - opposes for n in range(4)],
        }
    )
    assert outcome_of(part("interval", share=share), rows) == expected


@pytest.mark.parametrize(
    ("supports", "opposes", "of", "expected"),
    [
        (7, 1, 8, "supported"),
        (6, 2, 8, "undetermined"),  # more than half of the measured, not of the population
        (7, 4, 14, "undetermined"),
        (1, 7, 8, "contradicted"),
        (5, 0, 5, "supported"),
        (4, 0, 4, "undetermined"),
        (0, 0, 8, "undetermined"),
    ],
)
def test_rows_that_show_a_share_of_the_population(
    supports: int, opposes: int, of: int, expected: str
) -> None:
    rows = pl.DataFrame(
        {
            "supports": [n < supports for n in range(of)],
            "opposes": [n >= of - opposes for n in range(of)],
        }
    )
    assert outcome_of(part("interval", share=0.5, share_of="population"), rows) == expected


def test_a_minimum_effect_is_what_is_tested() -> None:
    def claim(by: float, scale: str = "difference") -> Claim:
        return Claim.model_validate(
            {
                "name": "x",
                "statement": "x",
                "condition": "base",
                "quantity": {"measure": "mass", "item": ["hash"]},
                "comparison": {"over": "model", "by": by, "scale": scale},
                "direction": "more",
                "scope": {"layers": [0]},
            }
        )

    table = masses(lambda m, p, *at: (0.13 if m == "tuned" else 0.1) + 0.002 * noise(m, p, *at))
    found = {
        by: judge([claim(by)], table, experiment=EXPERIMENT, resamples=500)[0].verdict
        for by in (0.0, 0.02, 0.03, 0.05)
    }
    assert list(found.values()) == ["supported", "supported", "undetermined", "contradicted"]
    (verdict,) = judge([claim(0.2, "ratio")], table, experiment=EXPERIMENT, resamples=500)
    assert verdict.verdict == "supported"
    assert verdict.figures is not None
    row = verdict.figures.row(0, named=True)
    assert row["difference"] == pytest.approx(1.3, abs=0.02)
    assert row["mean_a"] == pytest.approx(0.1, abs=0.005)


def test_a_ratio_that_meets_values_of_0_or_below_decides_nothing() -> None:
    """Twenty-five of forty prompts have a slope below 0; the others alone would support it."""
    parts = [
        measured(
            "lambda",
            lambda m, p, *at: (0.6 if p >= 25 else -0.6) + 0.01 * noise(p, *at),
            conditions=["slashes"],
            prompts=range(40),
            heads=6,
        ),
        measured(
            "lambda_r2",
            lambda m, p, *at: 0.97 + 0.01 * noise(p, *at),
            conditions=["slashes"],
            prompts=range(40),
            heads=6,
        ),
        *(
            measured(
                name,
                lambda m, p, *at, n=name, v=value: v + 0.01 * noise(n, p, *at),
                conditions=["slashes"],
                prompts=range(40),
                heads=6,
                item=item,
            )
            for name, value, item in (
                ("lambda_ratio", 0.6, None),
                ("uniform_ratio", 0.8, None),
                ("spike_ratio", 0.6, "0.1"),
                ("rest_ratio", 0.6, "0.1"),
            )
        ),
    ]
    (verdict,) = verdicts("one-factor", *parts)
    assert verdict.verdict == "undetermined"
    assert "25 prompts" in verdict.reason


def test_the_minimum_and_the_maximum_n_are_in_the_reason() -> None:
    parts = [
        part.with_columns(
            value=pl.when((pl.col("prompt") == 0) & (pl.col("head") == 0))
            .then(None)
            .otherwise(pl.col("value"))
        )
        for part in falling(0.6, 0.4, 0.7)
    ]
    (verdict,) = verdicts("fall", *parts)
    assert "n = 11–12" in verdict.reason


def test_units_of_a_claim_are_clusters() -> None:
    parts = pl.concat(falling(0.6, 0.4, 0.7))
    known = pl.DataFrame(
        {
            "prompt": range(12),
            "text": [p // 2 for p in range(12)],
            "level": [p // 3 for p in range(12)],
        }
    )
    chosen = [claim for claim in built_in() if claim.name == "fall"]
    more = {"experiment": EXPERIMENT, "prompts": known, "resamples": 500}
    (verdict,) = judge(chosen, parts, cluster="text", **more)
    assert "n = 12 prompts in 6 clusters" in verdict.reason
    (verdict,) = judge(chosen, parts, cluster="level", **more)
    assert verdict.verdict == "undetermined"
    assert "in 4 clusters" in verdict.reason


def test_a_verdict_says_whether_its_claim_was_there_first() -> None:
    table = fillers("affine_r2", 0.97, heads=None)
    (claim,) = (claim for claim in built_in() if claim.name == "affine")
    other = claim.model_copy(update={"name": "mine"})
    more = {"experiment": EXPERIMENT, "resamples": 500}
    assert judge([claim], table, **more)[0].frozen is None
    written = frozen()
    stated = [v.frozen for v in judge([claim, other], table, frozen=written, **more)]
    assert stated == [FROZEN[0], FROZEN[2]]
    changed = {**written, "affine": "0" * 16}
    assert judge([claim], table, frozen=changed, **more)[0].frozen == FROZEN[1]
    assert digest(claim) == digest(other)  # of what it says, not of its name
    assert frozen([other])["mine"] == digest(claim)


# Claims of one's own.

MINE = """
claims:
  - name: stars
    statement: "More on stars."
    quantity: {measure: mass, item: star, normalise: lift}
    comparison: {over: model, pair: [base, tuned]}
    direction: more
    scope: {layers: [0, 1], heads: each}
    rule: {kind: significant, share: 0.8}
"""


def test_claims_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    (claim,) = load_claims(file)
    assert claim.parts[0].quantity.item == ("star",)
    table = masses(lambda m, p, *at: (0.3 if m == "tuned" else 0.2) + 0.01 * noise(m, p, *at))
    (verdict,) = judge([claim], table)
    assert verdict.verdict == "supported"
    assert Claim.model_validate(claim.model_dump()) == claim
    assert hash(claim) == hash(load_claims(file)[0])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"direction": "up"}, "bad-value"),
        ({"direction": None}, "bad-direction"),
        ({"comparison": {"over": "model", "threshold": 1}}, "bad-comparison"),
        ({"comparison": {"over": "condition"}}, "pair-missing"),
        ({"comparison": {"over": "layer", "pair": ["a", "b"]}}, "bad-pair"),
        ({"rule": {"kind": "within"}}, "bad-rule"),
        ({"rule": {"kind": "interval", "share": 2}}, "bad-value"),
        ({"quantity": {"measure": "mass", "itme": "star"}}, "unknown-key"),
        ({"quantity": {"measure": "first_tokn"}}, "unknown-measure"),
        (
            {"comparison": {"over": "measure", "pair": ["entropy", "entropie"]}},
            "unknown-measure",
        ),
        ({"comparison": {"over": "model", "by": -1}}, "bad-value"),
        ({"scope": {"layers": [-1]}}, "bad-layers"),
        ({"colour": "red"}, "unknown-key"),
    ],
)
def test_a_wrong_claim_is_refused(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    data = yaml.safe_load(MINE)
    data["claims"][0].update(change)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(data))
    with raises(InputError, code):
        load_claims(file)


def test_files_that_are_not_claims(tmp_path: Path) -> None:
    with raises(InputError, "file-missing", path=str(tmp_path / "none.yaml")):
        load_claims(tmp_path / "none.yaml")
    for text, code in [
        ("claims: 5", "bad-claims-file"),
        ("claims: {a: 1}", "bad-claims-file"),
        ("- a", "bad-claims-file"),
        ("claims: [3]", "bad-value"),
        (MINE + MINE.replace("claims:", ""), "duplicate-name"),
    ]:
        (tmp_path / "bad.yaml").write_text(text)
        with raises(InputError, code):
            load_claims(tmp_path / "bad.yaml")
    for damaged in (b"{", b"[" * 500, b"claims: [\xff]"):
        (tmp_path / "bad.yaml").write_bytes(damaged)
        with pytest.raises(InputError):
            load_claims(tmp_path / "bad.yaml")


# The command.


def stored(table: pl.DataFrame, folder: Path) -> Path:
    asked = make_experiment(
        **{**ASKED, "conditions": {"none": {"insert": None}}, "measures": ["mass"]}
    )
    cells = [
        [f"{model}-{prompt}", model, prompt, "none", 9, 0, 0, 0, 0, None]
        for model in ("base", "tuned")
        for prompt in range(8)
    ]
    empty = {"positions": POSITIONS.to_frame().lazy(), "tokens": TOKENS.to_frame().lazy()}
    run = MadeRun(
        values=table.lazy(),
        **empty,
        cells=pl.DataFrame(cells, schema=CELLS, orient="row"),
        experiment=asked,
        environment={"models": {"base": {}, "tuned": {}}},
    )
    return write_run(run, folder)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return stored(masses(tuned_looks_more, layers=3, prompts=range(8)), tmp_path / "run")


def test_compare_prints_table_and_verdicts(run: Path) -> None:
    result = CliRunner().invoke(app, ["compare", str(run)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    words = ("supported", "contradicted", "undetermined")
    verdicts = [at for at, line in enumerate(lines) if line.startswith(words)]
    header = next(at for at, line in enumerate(lines) if "95 % interval" in line)
    assert len(verdicts) == 3  # a line for each layer; no built-in claim that cannot be judged
    assert max(verdicts) < header
    assert max(map(len, lines)) <= 100
    assert "80 % power" in result.output


def test_no_figure_is_cut_off_however_narrow_the_terminal(run: Path) -> None:
    for options in ([], ["--sensitivity", "map-characters"]):
        for columns in ("50", "80", "200"):
            result = CliRunner().invoke(
                app, ["compare", str(run), *options], env={"COLUMNS": columns}
            )
            assert result.exit_code == 0, result.output
            assert "…" not in result.output


def test_a_row_fits_a_line_of_100_columns(run: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    result = CliRunner().invoke(app, ["compare", str(run), "--sensitivity", "map-characters"])
    assert max(map(len, result.output.splitlines())) <= 100
    row = next(line for line in result.output.splitlines() if "95 % interval" in line)
    for name in ("item", "layer", "mean a", "mean b", "difference", "q", "outcome"):
        assert name in row
    assert "n 8" in result.output


def test_ten_rows_with_the_smallest_p_are_printed() -> None:
    many = masses(layers=40, heads=3, prompts=range(8))
    made = compare(many, over="model", pair=("base", "tuned"), combine="each", resamples=200)
    assert made.height == 240

    def printed(**options: Any) -> list[str]:
        written = io.StringIO()
        Console(file=written, width=100).print(as_tables(made, [], **options))
        return [line for line in written.getvalue().splitlines() if " to " in line]

    rows = printed()
    assert len(rows) == 10
    first = made.sort("p", pl.col("effect").abs(), descending=[False, True]).row(0, named=True)
    assert f"{first['low']:.3g} to {first['high']:.3g}" in rows[0]
    assert len(printed(all_rows=True)) == 240
    assert len(json.loads(as_json(made, []))["comparison"]) == 240


def test_compare_as_json(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    options = ["--json", "--pair", "tuned,base", "--claims", str(tmp_path / "mine.yaml")]
    result = CliRunner().invoke(app, ["compare", str(run), *options])
    made = json.loads(result.stdout)
    assert len(made["comparison"]) == 3 * 2
    assert made["comparison"][0]["b"] == "base"
    assert [verdict["claim"] for verdict in made["verdicts"]] == ["stars"]
    assert len(made["verdicts"][0]["figures"]) == 2 * 3
    each = CliRunner().invoke(app, ["compare", str(run), "--json", "--combine", "each"])
    assert len(json.loads(each.stdout)["comparison"]) == 3 * 3 * 2


def test_compare_shows_what_was_asked_for(run: Path) -> None:
    def rows(*options: str) -> list[dict[str, Any]]:
        result = CliRunner().invoke(app, ["compare", str(run), "--json", *options])
        made: list[dict[str, Any]] = json.loads(result.stdout)["comparison"]
        return made

    assert {(r["layer"], r["item"]) for r in rows("--layer", "0,2", "--class", "star")} == {
        (0, "star"),
        (2, "star"),
    }
    assert len(rows("--measure", "mass")) == 6
    assert {r["outcome"] for r in rows("--holds")} == {"different"}
    assert {0, 1} <= {r["layer"] for r in rows("--holds")}
    small = rows("--margin", "50%", "--layer", "2")
    assert {r["outcome"] for r in small} <= {"no difference", "different, but small"}


def test_compare_says_how_it_was_made(run: Path) -> None:
    options = ["compare", str(run), "--seed", "7", "--level", "0.9", "--resamples", "500"]
    made = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert made["settings"] == {
        "families": "each",
        "margin": None,
        "level": 0.9,
        "resamples": 500,
        "seed": 7,
    }
    text = CliRunner().invoke(app, options, env={"COLUMNS": "200"}).output
    assert "90 % interval" in text
    assert "seed 7" in text


def test_the_smallest_possible_p_is_printed_with_a_sign(run: Path) -> None:
    """With 8 prompts the smallest possible p is 2 / 256."""
    result = CliRunner().invoke(app, ["compare", str(run)], env={"COLUMNS": "200"})
    assert re.search(r"≤0\.0\d", result.output)


def test_classes_that_never_occur_are_left_out(tmp_path: Path) -> None:
    table = masses(tuned_looks_more, layers=3, prompts=range(8))
    never = table.filter(item="star").with_columns(
        item=pl.lit("emoji"), value=pl.lit(0.0), tokens=pl.lit(0.0)
    )
    run = stored(pl.concat([table, never]), tmp_path / "run")
    made = json.loads(CliRunner().invoke(app, ["compare", str(run), "--json"]).stdout)
    assert {row["item"] for row in made["comparison"]} == {"hash", "star"}


def test_compare_under_other_choices(run: Path) -> None:
    options = ["compare", str(run), "--sensitivity", "map-characters"]
    result = CliRunner().invoke(app, options, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, [*options, "--json"])
    choices = json.loads(result.stdout)["sensitivity"]
    assert {row["normalise"] for row in choices} == {"mass", "per-token", "share", "lift"}


def test_wrong_options_of_compare_are_refused(tmp_path: Path, run: Path) -> None:
    for options, code in [
        ([str(run), "--pair", "base"], "bad-pair"),
        ([str(run), "--pair", "base,other"], "unknown-model-or-condition"),
        ([str(run), "--pair", "none,nope"], "unknown-model-or-condition"),
        ([str(run), "--pair", "base,none"], "bad-pair"),
        ([str(run), "--measure", "masss"], "unknown-measure"),
        ([str(run), "--layer", "7"], "unknown-layer"),
        ([str(run), "--class", "hsh"], "unknown-class"),
        ([str(run), "--cluster", "topic"], "unknown-metadata-column"),
        ([str(run), "--over", "colour"], "unknown-comparison-over"),
        ([str(run), "--claims", "none.yaml"], "file-missing"),
        ([str(run), "--sensitivity", "mapps"], "unknown-claim"),
    ]:
        result = CliRunner().invoke(app, ["compare", *options])
        assert isinstance(result.exception, InputError)
        assert result.exception.code == code, options
    assert isinstance(CliRunner().invoke(app, ["compare", str(tmp_path)]).exception, InputError)
