"""From conditions written with bars to the table of the sweep figure."""

from collections.abc import Sequence

import polars as pl

from attnscope.evaluate.conditions import expand, parse, settings


def sweep_rows(words: Sequence[str], scores: pl.DataFrame) -> pl.DataFrame | None:
    """One row for every value of every setting that a condition varies; None if none does.

    The columns are those that `figures.sweep` takes.
    """
    of_condition = scores.rows_by_key("condition", named=True, unique=True)
    rows = []
    for word in words:
        values_of = {name: settings(parse(name)) for name in expand(word)}
        names = {key for values in values_of.values() for key in values}
        varied = {key for key in names if len({v.get(key) for v in values_of.values()}) > 1}
        for key in [key for key in next(iter(values_of.values())) if key in varied]:
            for name, values in values_of.items():
                score = of_condition[name]
                others = ", ".join(f"{k} {v}" for k, v in values.items() if k in varied - {key})
                rows.append(
                    {
                        "panel": f"{name.partition(':')[0]}: {key}",
                        "setting": values[key],
                        "series": others or "alone",
                        "value": score["difference"],
                        "n": score["problems"],
                        **{column: score[column] for column in ("low", "high", "score", "q")},
                    }
                )
    if not rows:
        return None
    types = dict.fromkeys(("value", "low", "high", "score", "q"), pl.Float64)
    return pl.DataFrame(rows, schema_overrides=types, infer_schema_length=None)
