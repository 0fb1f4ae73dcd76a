"""Comparisons and verdicts as text: tables for a terminal, and JSON for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnscope.stats.robustness import not_judged, survival
from attnscope.stats.verdicts import Verdict

_STYLE = {"supported": "green", "contradicted": "red", "undetermined": "yellow"}
_LEFT_OUT_WHERE_NARROW = ("mean_a", "mean_b", "ratio", "effect", "p", "p_fwer")
_HIDDEN = {
    *("a", "b", "paired", "left_out", "note", "n_a", "n_b", "low", "high", "unreliable", "min_p"),
    *("ratio_low", "ratio_high", "effect_low", "effect_high", "detectable", "margin"),
    *("p_equivalence", "q_equivalence", "icc", "design_effect", "skew", "informative"),
}
# What is the same throughout a table, and so stands above it.
_KIND = ["measure", "normalise", "queries", "keys", "classes"]
_CHANCES = ("p", "q", "p_fwer")
MOST = 200
"""The most rows of a table: of more, those with the largest effects."""


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
    made: dict[str, Any] = {
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
    return json.dumps(made, ensure_ascii=False, indent=1)


def as_tables(
    compared: pl.DataFrame | None,
    verdicts: Sequence[Verdict],
    choices: pl.DataFrame | None = None,
    *,
    narrow: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> RenderableType:
    """What a terminal shows; a narrow one has no room for every column."""
    parts: list[RenderableType] = []
    if compared is not None:
        kind = [name for name in _KIND if name in compared.columns]
        for (first, second, *_), rows in compared.group_by(["a", "b", *kind], maintain_order=True):
            level = (settings or {}).get("level", 0.95)
            parts += [_comparison(str(first), str(second), rows, narrow, level), Text()]
    for verdict in verdicts:
        if verdict.verdict != "not measured":
            parts += [_verdict(verdict), Text()]
    absent = dict.fromkeys(v.claim for v in verdicts if v.verdict == "not measured")
    if absent:
        parts += [
            Text(f"not measured in this run: {', '.join(absent)} (--json says why)", style="dim"),
            Text(),
        ]
    if choices is not None:
        parts += [_survival(choices), Text()]
    if settings:
        said = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
        parts += [Text(said, style="dim")]
    return Group(*parts)


def _comparison(first: str, second: str, rows: pl.DataFrame, narrow: bool, level: float) -> Table:
    how = "paired by prompt" if rows["paired"].all() else "as independent groups"
    title = f"{rows['measure'][0]}: {second} (b) against {first} (a), {how}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    cut = []
    if rows.height > MOST:
        cut = [f"{MOST} of {rows.height:,} rows, of the largest effects; --json has all"]
        largest = pl.col("effect").abs().fill_null(-1).rank("ordinal", descending=True) <= MOST
        rows = rows.filter(largest)
    hidden = {*_HIDDEN, "measure", *(_LEFT_OUT_WHERE_NARROW if narrow else ())}
    if rows["units"].equals(rows["n"]):
        hidden |= {"units"}
    shown = [
        name
        for name in rows.columns
        if name not in hidden and not rows[name].is_null().all() and not _dull(rows, name)
    ]
    fixed = [f"{n} {rows[n][0]}" for n in rows.columns if n not in _HIDDEN and _dull(rows, n)]
    notes = [note for note in rows["note"].unique(maintain_order=True) if note]
    table.caption = "; ".join([*cut, *fixed, *_sources(rows), *notes]) or None
    table.caption_justify = "left"
    for name in shown:
        side: Any = "left" if rows[name].dtype == pl.String else "right"
        table.add_column(name.replace("_", " "), justify=side, overflow="fold")
        if name == "difference":
            table.add_column(f"{100 * level:g} % interval", justify="right", overflow="fold")
    for row in rows.iter_rows(named=True):
        cells = []
        for name in shown:
            least = name in _CHANCES and (row["p"] or 1) <= (row["min_p"] or 0) * (1 + 1e-9)
            cells.append(_chance(row[name], least) if name in _CHANCES else _figure(row[name]))
            if name == "difference":
                cells.append(f"{_figure(row['low'])} to {_figure(row['high'])}")
        table.add_row(*cells)
    return table


def _survival(choices: pl.DataFrame) -> Table:
    survived = survival(choices)
    table = Table(title=f"does {survived['claim'][0]} survive the choices?", title_justify="left")
    places = ("model", "layer", "head")
    shown = [name for name in places if survived[name].null_count() < survived.height]
    shown += ["verdict", "choices", "same_sign", "same_verdict"]
    for name in shown:
        table.add_column(name.replace("_", " "), overflow="fold")
    table.add_column("overturned by", overflow="fold", ratio=1)
    table.caption = not_judged(choices["not_judged"][0]) or None
    table.caption_justify = "left"
    for row in survived.iter_rows(named=True):
        cells = [*(row[name] for name in shown), "\n".join(row["overturned_by"]) or None]
        table.add_row(*map(_figure, cells))
    return table


def _dull(rows: pl.DataFrame, name: str) -> bool:
    """Says the same in every row, so it goes under the table."""
    labels = (
        *("queries", "keys", "classes", "normalise", "combine", "model", "condition", "n"),
        "units",
    )
    return name in labels and rows[name].n_unique() == 1 and rows[name][0] is not None


def _figure(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _chance(value: float | None, least: bool = False) -> str:
    """A p or q; where p is as small as the test can give, it is no more than that."""
    if value is not None and value < 0.001:
        return "<0.001"
    return f"{'≤' if least else ''}{_figure(value)}"


def _sources(rows: pl.DataFrame) -> list[str]:
    """How far prompts of a cluster are alike, and what that costs: the middle of all rows."""
    said = []
    for name, words in (("icc", "intraclass correlation"), ("design_effect", "design effect")):
        middle = rows[name].median()
        if isinstance(middle, float):
            said.append(f"{words} {middle:.2g}")
    return said


def _verdict(verdict: Verdict) -> Text:
    text = Text()
    text.append(verdict.verdict, style=f"bold {_STYLE.get(verdict.verdict, 'dim')}")
    where = [
        f"model {verdict.model}" if verdict.model else "",
        f"condition {verdict.condition}" if verdict.condition else "",
    ]
    about = ", ".join(part for part in where if part)
    text.append(f"  {verdict.claim}{f' ({about})' if about else ''}: {verdict.statement}\n")
    text.append(f"  {verdict.reason}", style="dim")
    if verdict.frozen is not None:
        text.append(f"\n  {verdict.frozen}", style="dim")
    if could := _could_have(verdict):
        text.append(f"\n  {could}", style="dim")
    return text


def _could_have(verdict: Verdict) -> str | None:
    """For a verdict that hangs on one comparison and is open: what would have been found."""
    figures = verdict.figures
    if verdict.verdict != "undetermined" or figures is None or figures.height != 1:
        return None
    row = figures.row(0, named=True)
    if row["detectable"] is None:
        return None
    size = f"a difference of {row['detectable']:.3g}"
    if row["scale"] == "ratio":  # in logarithms
        size = f"a factor of {math.exp(row['detectable']):.4g}"
    return f"{row['units']} units find {size} four times in five; a smaller one is left open"
