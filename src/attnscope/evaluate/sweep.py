"""From conditions written with bars to the table of the sweep figure."""

from collections.abc import Sequence

import polars as pl

from attnscope.evaluate.condition_parser import expand, parse
from attnscope.evaluate.scores import BASELINE


def sweep_rows(conditions: Sequence[str], table: pl.DataFrame) -> pl.DataFrame | None:
    """One row for every value of every setting that a condition varies; None if none does.

    `table` has the scores. The columns are those that `figures.sweep` takes.
    """
    scores = table.rows_by_key("condition", named=True, unique=True)
    rows = []
    for text in conditions:
        settings = {name: parse(name).settings for name in expand(text)}
        names = {key for values in settings.values() for key in values}
        varied = {key for key in names if len({one.get(key) for one in settings.values()}) > 1}
        for key in [key for key in next(iter(settings.values())) if key in varied]:
            for name, values in settings.items():
                score = scores[name]
                others = ", ".join(f"{k} {v}" for k, v in values.items() if k in varied - {key})
                rows.append(
                    {
                        "panel": f"{parse(name).kind}: {key}",
                        "setting": values[key],
                        "series": others or "alone",
                        "value": score["difference"],
                        "low": score["low"],
                        "high": score["high"],
                        "score": score["score"],
                        "n": score["problems"],
                        "q": score["q"],
                    }
                )
    if not rows:
        return None
    types = dict.fromkeys(("value", "low", "high", "score", "q"), pl.Float64)
    return pl.DataFrame(rows, schema_overrides=types, infer_schema_length=None)


def baseline_of(table: pl.DataFrame) -> float:
    """The score of the baseline."""
    return float(table.filter(pl.col("condition") == BASELINE)["score"][0])
