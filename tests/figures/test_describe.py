"""Descriptions: every stated value, extreme, order and difference is that of the data."""

from __future__ import annotations

import random
import re
from typing import Any

import polars as pl
import pytest

from attnscope.figures.blocks import as_markdown
from attnscope.figures.describe import TIES, FigureText, described
from attnscope.figures.numbers import rounded
from attnscope.stats.paired import OUTCOMES
from reading_back import plain, section, table_in, table_of

NUMBER = r"(-?[\d.]+(?:e[+-]?\d+)?)"


def random_table(seed: int) -> tuple[pl.DataFrame, FigureText, pl.DataFrame]:
    """A table of models, layers and classes with ties, nulls and odd names; and differences."""
    rng = random.Random(seed)
    odd = ["a|b", "x_y", "<i>", "star*", "back\\slash", "`tick`", "naïve", "Qwen2.5-7B", "#"]
    models = rng.sample(odd, rng.randint(1, 3))
    layers = sorted(rng.sample(range(40), rng.randint(1, 4)))
    classes = rng.sample(["hash", "star", "white space", "digit", "word"], rng.randint(1, 4))
    scale = 10 ** rng.randint(-6, 3)
    few = rng.random() < 0.3

    def value() -> float | None:
        if rng.random() < 0.08:
            return None
        return rng.choice([0.0, 1.0, 2.0]) if few else rng.gauss(0, 1) * scale

    data = rounded(
        pl.DataFrame(
            [
                {"model": m, "layer": la, "class": c, "value": value(), "n": rng.randint(1, 99)}
                for m in models
                for la in layers
                for c in classes
            ],
            schema_overrides={"value": pl.Float64},
        )
    )
    differences = rounded(
        pl.DataFrame(
            [
                {
                    "layer": la,
                    "class": c,
                    "of": models[0],
                    "minus": "other",
                    "difference": rng.gauss(0, 1) * scale,
                    "low": None if (gone := rng.random() < 0.2) else rng.gauss(-0.5, 1) * scale,
                    "high": None if gone else rng.gauss(0.5, 1) * scale,
                    "q": None if rng.random() < 0.2 else rng.choice([0.01, 0.049, 0.05, 0.3]),
                    "outcome": rng.choice(OUTCOMES),
                    "n": rng.randint(1, 99),
                }
                for la in layers
                for c in classes
            ],
            schema_overrides={"low": pl.Float64, "high": pl.Float64, "q": pl.Float64},
        )
    )
    words = FigureText(
        title="A title",
        what="",
        small_print=[],
        models=[],
        overview="Something.",
        axes=["x: layer"],
        value="value",
        quantity="mass",
        places={"layer": "layer {}", "model": "{}", "class": "{}"},
        order="class",
    )
    return data, words, differences


def place(row: dict[str, Any]) -> str:
    return f"layer {row['layer']}, {row['model']}, {row['class']}"


@pytest.mark.parametrize("seed", range(200))
def test_everything_stated_is_in_the_data(seed: int) -> None:
    data, words, differences = random_table(seed)
    text = as_markdown(described(data, words, differences)[0])

    head, body = table_of(text)
    assert head == data.columns
    assert len(body) == data.height
    for cells, row in zip(body, data.to_dicts(), strict=True):
        assert cells[0] == row["model"]
        assert cells[2] == row["class"]
        assert int(cells[1]) == row["layer"]
        assert (cells[3] == "—") if row["value"] is None else float(cells[3]) == row["value"]

    rows = [row for row in data.to_dicts() if row["value"] is not None]
    lines = [plain(line) for line in section(text, "Largest and smallest")]
    values = [row["value"] for row in rows]
    if not rows:
        assert lines == ["- No mass is defined."]
    elif len(set(values)) == 1 and len(values) > 1:
        match = re.fullmatch(rf"- Every mass: {NUMBER} at (\d+) places\.", lines[0])
        assert match
        assert float(match[1]) == values[0]
        assert int(match[2]) == len(values)
    else:
        for word, extreme, line in zip(
            ("Largest", "Smallest"), (max(values), min(values)), lines, strict=False
        ):
            match = re.fullmatch(rf"- {word} mass: {NUMBER} at (.*?)(?:; and (\d+) more)?\.", line)
            assert match
            assert float(match[1]) == extreme
            most = max(row["n"] for row in data.to_dicts())
            tied = [
                place(row) + ("" if row["n"] == most else f" (n = {row['n']})")
                for row in rows
                if row["value"] == extreme
            ]
            assert match[2].split("; ") == tied[:TIES]
            assert int(match[3] or 0) == max(0, len(tied) - TIES)
    undefined = data["value"].null_count()
    absent = [line for line in lines if line.startswith("- Not defined")]
    if rows and undefined:
        assert absent == [f"- Not defined: {undefined} place{'s' if undefined > 1 else ''}."]
    else:
        assert not absent

    stated = 0
    for line in section(text, "Order"):
        where, ranking = re.fullmatch(r"- (layer \d+, .*?): (.*)\.", plain(line)).groups()  # type: ignore[union-attr]
        parts = re.split(r" (>|=) ", ranking)
        terms = [re.fullmatch(rf"(.*) {NUMBER}", t).groups() for t in parts[0::2]]  # type: ignore[union-attr]
        expected = {
            row["class"]: row["value"]
            for row in rows
            if f"layer {row['layer']}, {row['model']}" == where
        }
        assert {name: float(value) for name, value in terms} == expected
        for (_, a), sign, (_, b) in zip(terms, parts[1::2], terms[1:], strict=False):
            assert float(a) > float(b) if sign == ">" else float(a) == float(b)
        stated += 1
    groups = data.filter(pl.col("value").is_not_null()).group_by("layer", "model").len()
    assert stated == groups.filter(pl.col("len") > 1).height

    lines = section(text, "Differences")
    head, body = table_in(lines)
    significant = (pl.col("outcome") == "different") & pl.col("q").is_not_null()
    expected = differences.with_columns(significant=significant).drop("outcome")
    expected = expected.sort(~pl.col("significant"), maintain_order=True)
    assert sorted(head) == sorted(expected.columns)
    for cells, row in zip(body, expected.select(head).iter_rows(), strict=True):
        for cell, value in zip(cells, row, strict=True):
            if value is None:
                assert cell == "—"
            else:
                assert cell == str(value) if not isinstance(value, float) else float(cell) == value
    tested = expected["q"].count()
    if tested:
        assert lines[0].startswith(f"{expected['significant'].sum()} of {tested} difference")


def test_the_short_form_is_plain_text() -> None:
    data, words, differences = random_table(3)
    short = described(data, words, differences)[1]
    assert short.startswith(f"{words.title}. {words.overview} ")
    assert "\\" not in short or "back\\slash" in short
    assert "&lt;" not in short
