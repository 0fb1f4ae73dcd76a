"""A claim under other choices: which are tried, and which change the verdict."""

from typing import Any

import numpy as np
import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.spec.claims import make_claims, parse_line
from attnscope.stats.sensitivity import (
    MOST,
    NUMBERS,
    asking,
    robustness,
    robustness_summary,
    sensitivity,
)
from made_values import masses

NOISE = np.random.default_rng(0).normal(size=40)


def table(rise: float = 0.2, **columns: Any) -> pl.DataFrame:
    def value(model: str, prompt: int, condition: str, layer: int, head: int, item: str) -> float:
        up = rise if model == "tuned" else 0.0
        return 0.3 * (1 + up) + 0.01 * NOISE[prompt]

    made = masses(value, layers=1, heads=1, conditions=("base",), items=("hash", "star"))
    return made.with_columns(**{name: pl.lit(value) for name, value in columns.items()})


def claim(line: str) -> Any:
    return make_claims({"claim": line}, "test")[0]


RISES = "mass[class=hash, model=b] >= 1.05 * mass[class=hash, model=a]"


def test_the_reference_is_the_claim_as_written():
    rows = sensitivity(claim(RISES), table())
    (reference,) = rows.filter("reference").to_dicts()
    assert (reference["queries"], reference["keys"], reference["numbers"]) == (
        "all",
        "all",
        "as written",
    )
    assert reference["verdict"] == "holds"


def test_the_numbers_of_a_claim_are_varied():
    rows = sensitivity(claim(RISES), table(rise=0.08))
    verdicts = dict(rows.filter(pl.col("normalise") == "mass").select("numbers", "verdict").rows())
    assert verdicts["as written"] == verdicts["lenient"] == "holds"
    assert verdicts["strict"] != "holds"


@pytest.mark.parametrize("relation", [">", "<"])
@pytest.mark.parametrize(
    ("quantity", "written", "step"),
    [("affine_r2", 0.9, 0.02), ("first_token", 0.3, 0.06), ("entropy", 2.0, 0.4)],
)
def test_a_threshold_stays_within_the_range_of_its_measure(quantity, written, step, relation):
    line = parse_line(f"{quantity} {relation} {written}")
    up = "strict" if relation == ">" else "lenient"
    for how in ("strict", "lenient"):
        sign = 1 if how == up else -1
        assert asking(line, how).offset == pytest.approx(written + sign * step)


@pytest.mark.parametrize(
    ("scope", "needed"),
    [
        ("most heads", (11, 7, 14)),
        ("at least 8 heads", (8, 4, 16)),
        ("at least 1 layer", (1, 1, 2)),
        ("every layer", (20, 20, 20)),
    ],
)
def test_how_many_heads_are_asked_for_is_varied(scope: str, needed: tuple[int, ...]) -> None:
    line = parse_line(f"first_token > 0.3 in {scope}")
    assert tuple(asking(line, how).scope.needed(20) for how in NUMBERS) == needed


def test_queries_and_whole_texts_are_varied_but_regions_are_not():
    both = pl.concat([table(), table(keys="not-first"), table(keys="maps")])
    rows = sensitivity(claim(RISES), both)
    assert set(rows["keys"]) == {"all", "not-first"}
    region = RISES.replace("class=hash", "class=hash, keys=maps")
    assert set(sensitivity(claim(region), both)["keys"]) == {"maps"}
    queries = pl.concat([table(), table(queries="last")])
    assert set(sensitivity(claim(RISES), queries)["queries"]) == {"all", "last"}


def test_a_threshold_keeps_its_normalisation():
    rows = sensitivity(claim("mass[class=hash, model=b] > 0.1"), table())
    assert set(rows["normalise"]) == {"mass"}


def test_what_changes_the_verdict_is_named():
    rows = sensitivity(claim(RISES), table(rise=0.08))
    (summary,) = robustness(rows).to_dicts()
    assert "numbers strict" in summary["overturned_by"]
    assert robustness_summary(rows)["survives"] == 0


def test_at_most_so_many_combinations_are_judged():
    many = pl.concat([table(queries=f"q{n}") for n in range(30)] + [table()])
    rows = sensitivity(claim(RISES), many)
    assert rows.select("queries", "normalise", "numbers").n_unique() == MOST
    assert rows["not_judged"][0] > 0


def test_a_claim_that_cannot_be_judged_is_refused():
    with pytest.raises(InputError) as error:
        sensitivity(claim("entropy > 1"), table())
    assert error.value.code == "not-measured"
