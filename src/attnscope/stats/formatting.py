"""Formats comparisons and verdicts: tables for a terminal, and JSON for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnscope.stats.robustness import not_judged_note, robustness
from attnscope.stats.verdicts import Verdict

WIDTH = 100
"""Columns of the terminal that the tables are made for."""
ROWS = 10
"""Rows of a table; `as_tables(all_rows=True)` has no limit."""
_STYLE = {"supported": "green", "contradicted": "red", "undetermined": "yellow"}
_SAME_IN_TABLE = ("measure", "normalise", "queries", "keys", "classes")
"""Columns by which the comparison is split into tables; the caption names their values."""
_LABELS = ("model", "condition", "item", "target", "layer", "head")
"""Columns that identify a row of a table."""
_NUMBERS = ("mean_a", "mean_b", "difference", "q", "outcome")


def as_json(
    compared: pl.DataFrame | None,
    verdicts: Sequence[Verdict],
    choices: pl.DataFrame | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """One object: `settings`, `comparison` (rows), `verdicts` (each with its figures),
    `sensitivity` (rows)."""
    fields = ("claim", "statement", "verdict", "reason", "model", "condition", "layer", "frozen")
    data: dict[str, Any] = {
        "settings": dict(settings or {}),
        "comparison": [] if compared is None else compared.to_dicts(),
        "verdicts": [
            {
                **{name: getattr(verdict, name) for name in fields},
                "figures": [] if verdict.figures is None else verdict.figures.to_dicts(),
            }
            for verdict in verdicts
        ],
        "sensitivity": [] if choices is None else choices.to_dicts(),
    }
    return json.dumps(data, ensure_ascii=False, indent=1)


def as_tables(
    compared: pl.DataFrame | None,
    verdicts: Sequence[Verdict],
    choices: pl.DataFrame | None = None,
    *,
    all_rows: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> RenderableType:
    """The verdicts, one paragraph each, then the tables of the comparison."""
    parts: list[RenderableType] = [_verdict(v) for v in verdicts if v.verdict != "not measured"]
    if absent := dict.fromkeys(v.claim for v in verdicts if v.verdict == "not measured"):
        text = f"not measured in this run: {', '.join(absent)} (--json gives the reasons)"
        parts.append(Text(text, style="dim"))
    if parts:
        parts.append(Text())
    if compared is not None:
        by = ["a", "b", *(name for name in _SAME_IN_TABLE if name in compared.columns)]
        level = (settings or {}).get("level", 0.95)
        for (first, second, *_), rows in compared.group_by(by, maintain_order=True):
            parts += [_comparison(str(first), str(second), rows, level, all_rows), Text()]
    if choices is not None:
        parts += [_robustness(choices), Text()]
    if settings:
        used = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
        parts.append(Text(used, style="dim"))
    return Group(*parts)


def _comparison(first: str, second: str, rows: pl.DataFrame, level: float, all_rows: bool) -> Table:
    """The rows with the smallest p first; among equal p the largest effect first."""
    design = "paired by prompt" if rows["paired"].all() else "as independent groups"
    title = f"{rows['measure'][0]}: {second} (b) against {first} (a), {design}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.caption, table.caption_justify = _caption(rows, all_rows), "left"
    rows = rows.sort("p", pl.col("effect").abs(), descending=[False, True], nulls_last=True)
    rows = rows if all_rows else rows.head(ROWS)
    labels = [n for n in (*_LABELS, "n", "units") if n in rows.columns and not _constant(rows, n)]
    shown = [*(n for n in labels if not rows[n].is_null().all()), *_NUMBERS]
    for name in shown:
        side: Any = "left" if rows[name].dtype == pl.String else "right"
        table.add_column(name.replace("_", " "), justify=side, overflow="fold")
        if name == "difference":
            table.add_column(f"{100 * level:g} % interval", justify="right", overflow="fold")
    for row in rows.iter_rows(named=True):
        cells = []
        for name in shown:
            smallest = (row["p"] or 1) <= (row["min_p"] or 0) * (1 + 1e-9)
            cells.append(_p_value(row["q"], smallest) if name == "q" else _number(row[name]))
            if name == "difference":
                cells.append(f"{_number(row['low'])} to {_number(row['high'])}")
        table.add_row(*cells)
    return table


def _caption(rows: pl.DataFrame, all_rows: bool) -> str:
    """How many rows are shown, what is the same in all of them, and their notes."""
    order = "smallest p first"
    lines = [f"{rows.height:,} rows, {order}"]
    if not all_rows and rows.height > ROWS:
        lines = [f"{ROWS} of {rows.height:,} rows, {order}; --all shows every row"]
    names = (*_SAME_IN_TABLE[1:], "combine", "model", "condition", "n")
    lines += [f"{n} {rows[n][0]}" for n in names if n in rows.columns and _constant(rows, n)]
    notes = [note for note in rows["note"].unique(maintain_order=True) if note]
    return "; ".join([*lines, *_clustering(rows), *notes])


def _robustness(choices: pl.DataFrame) -> Table:
    table_rows = robustness(choices)
    table = Table(title=f"{table_rows['claim'][0]} under other choices", title_justify="left")
    places = ("model", "layer", "head")
    shown = [name for name in places if table_rows[name].null_count() < table_rows.height]
    shown += ["verdict", "choices", "same_sign", "same_verdict"]
    for name in shown:
        table.add_column(name.replace("_", " "), overflow="fold")
    table.add_column("overturned by", overflow="fold", ratio=1)
    table.caption = not_judged_note(choices["not_judged"][0]) or None
    table.caption_justify = "left"
    for row in table_rows.iter_rows(named=True):
        cells = [*(row[name] for name in shown), "\n".join(row["overturned_by"]) or None]
        table.add_row(*map(_number, cells))
    return table


def _constant(rows: pl.DataFrame, name: str) -> bool:
    """Whether a column has one value in every row, so that the caption can name it."""
    if name in ("item", "layer", "head", "target"):
        return False
    if name == "units" and rows["units"].equals(rows["n"]):
        return True
    return rows[name].n_unique() == 1 and rows[name][0] is not None


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _p_value(value: float | None, smallest: bool = False) -> str:
    """A p or q; with ≤ if p is the smallest that the test can give."""
    if value is not None and value < 0.001:
        return "<0.001"
    return f"{'≤' if smallest else ''}{_number(value)}"


def _clustering(rows: pl.DataFrame) -> list[str]:
    """Intraclass correlation and design effect, medians over the rows."""
    words = (("icc", "intraclass correlation"), ("design_effect", "design effect"))
    medians = [(label, rows[name].median()) for name, label in words]
    return [f"{label} {median:.2g}" for label, median in medians if isinstance(median, float)]


def _verdict(verdict: Verdict) -> Text:
    """One paragraph: verdict, statement, result with interval, requirement, n."""
    text = Text()
    text.append(verdict.verdict, style=f"bold {_STYLE.get(verdict.verdict, 'dim')}")
    text.append(str(verdict).removeprefix(verdict.verdict))
    condition = verdict.condition and f"condition {verdict.condition}"
    notes = [f"claim {verdict.claim}", condition, verdict.frozen, _power(verdict)]
    text.append(f"\n  {'; '.join(note for note in notes if note)}", style="dim")
    return text


def _power(verdict: Verdict) -> str | None:
    """For an undetermined verdict on one comparison: which effect it would have detected."""
    figures = verdict.figures
    if verdict.verdict != "undetermined" or figures is None or figures.height != 1:
        return None
    row = figures.row(0, named=True)
    if row["detectable"] is None:
        return None
    size = f"a difference of {row['detectable']:.3g}"
    if row["scale"] == "ratio":  # in logarithms
        size = f"a ratio of {math.exp(row['detectable']):.4g}"
    return f"{row['units']} units detect {size} with 80 % power; smaller effects may be missed"
