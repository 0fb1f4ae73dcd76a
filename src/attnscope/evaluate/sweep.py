"""What an evaluation varied: from conditions written with bars to the table of its figure."""

from collections.abc import Sequence

import polars as pl

from attnscope.evaluate.condition_parser import parse, spelled_out
from attnscope.evaluate.scores import BASELINE


def swept(words: Sequence[str], table: pl.DataFrame) -> pl.DataFrame | None:
    """A row for every value of every setting that a word varies (columns as `figures.sweep` wants
    them), from the table of scores; None where nothing is varied."""
    scores = table.rows_by_key("condition", named=True, unique=True)
    rows = []
    for word in words:
        settings = {name: parse(name).settings for name in spelled_out(word)}
        named = {key for said in settings.values() for key in said}
        varied = {key for key in named if len({said.get(key) for said in settings.values()}) > 1}
        for key in [key for key in next(iter(settings.values())) if key in varied]:
            for name, said in settings.items():
                found = scores[name]
                others = ", ".join(f"{k} {v}" for k, v in said.items() if k in varied - {key})
                rows.append(
                    {
                        "panel": f"{parse(name).kind}: {key}",
                        "setting": said[key],
                        "series": others or "alone",
                        "value": found["difference"],
                        "low": found["low"],
                        "high": found["high"],
                        "score": found["score"],
                        "n": found["problems"],
                        "q": found["q"],
                    }
                )
    if not rows:
        return None
    kinds = dict.fromkeys(("value", "low", "high", "score", "q"), pl.Float64)
    return pl.DataFrame(rows, schema_overrides=kinds, infer_schema_length=None)


def baseline_of(table: pl.DataFrame) -> float:
    """The score that the others are compared with."""
    return float(table.filter(pl.col("condition") == BASELINE)["score"][0])
