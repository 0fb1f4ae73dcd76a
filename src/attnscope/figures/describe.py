"""What a figure shows, in words: computed from its data, so that every stated value, extreme and
order can be checked against them.

The sentences are built from few fixed forms on purpose: a reader learns them once, and a test can
read them back. This module must not know charts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from attnscope.figures.words import cell, count, inline, number, plain

__all__ = ["Description", "Words", "describe", "place_of", "table"]

SAID = 6
"""The most statements about extremes in the short form."""
TIES = 5
"""The most places named for one extreme; further ones are counted."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """What a figure says about itself beyond its numbers."""

    title: str
    overview: str
    axes: Sequence[str]
    legend: Sequence[str]
    value: str
    """The column of the data with the quantity shown."""
    quantity: str
    """Its name."""
    places: Mapping[str, str]
    """The columns that say where a value stands, each with a form such as `layer {}`."""
    order: str | None = None
    """The place whose values are put in order within each of the others."""
    parts: Mapping[str, pl.Expr] = field(default_factory=dict)
    """Parts of the data that have their own extremes; none: all of it is one."""
    split: Sequence[str] = ()
    """Places whose values each have their own extremes."""
    notes: Sequence[str] = ()
    no_differences: str = "Nothing is compared here."
    """Said where there are no differences."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A description as Markdown, and in one paragraph."""

    markdown: str
    alt: str


def place_of(row: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """`layer 0, Qwen-Phys, star`: where a row stands, with what is null left out."""
    named = [
        form.format(inline(row[column]))
        for column, form in places.items()
        if row.get(column) is not None
    ]
    return ", ".join(named)


def table(frame: pl.DataFrame) -> str:
    """A frame as a Markdown table: every row, every column."""
    head = f"| {' | '.join(inline(c) for c in frame.columns)} |"
    rule = "| " + " | ".join("---:" if t.is_numeric() else "---" for t in frame.dtypes) + " |"
    body = ["| " + " | ".join(cell(v) for v in row) + " |" for row in frame.iter_rows()]
    return "\n".join([head, rule, *body])


def describe(
    data: pl.DataFrame, words: Words, differences: pl.DataFrame | None = None
) -> Description:
    """The description of a figure that shows `data`."""
    extremes = _extremes(data, words)
    held = _differences(differences, words)
    sections = [
        ("Overview", [inline(words.overview)]),
        ("Axes", [f"- {inline(line)}" for line in words.axes]),
        ("Legend", [f"- {inline(line)}" for line in words.legend]),
        ("Largest and smallest", [f"- {line}" for line in extremes]),
        ("Order", [f"- {line}" for line in _order(data, words)]),
        ("Differences", held),
        ("Notes", [f"- {inline(line)}" for line in words.notes]),
        ("Every value", [table(data)]),
    ]
    body = [f"### {name}\n" + "\n".join(lines) for name, lines in sections if lines]
    some = extremes[:SAID]
    if len(extremes) > SAID:
        some = [*some, f"{len(extremes) - SAID} more such statements are in the description."]
    alt = " ".join([f"{words.title}.", words.overview, *map(plain, [*some, held[0]])])
    return Description(markdown="\n\n".join(body), alt=alt)


def _parts(data: pl.DataFrame, words: Words) -> list[tuple[str, pl.DataFrame]]:
    """The parts that have extremes of their own, each with its name in brackets."""
    found = []
    for name, keep in (words.parts or {"": pl.lit(True)}).items():
        part = data.filter(keep)
        groups = part.partition_by(words.split, maintain_order=True) if words.split else [part]
        for group in groups:
            if group.is_empty():
                continue
            where = place_of(group.row(0, named=True), {c: words.places[c] for c in words.split})
            said = ", ".join(x for x in (inline(name), where) if x)
            found.append((f" ({said})" if said else "", group))
    return found


def _extremes(data: pl.DataFrame, words: Words) -> list[str]:
    lines = []
    places = {c: form for c, form in words.places.items() if c not in words.split}
    quantity = inline(words.quantity)
    for name, part in _parts(data, words):
        known = part.filter(pl.col(words.value).is_not_null())
        undefined = part.height - known.height
        if known.is_empty():
            lines.append(f"No {quantity}{name} is defined.")
            continue
        most, least = known[words.value].max(), known[words.value].min()
        if most == least and known.height > 1:
            lines.append(f"Every {quantity}{name}: {number(most)} at {known.height} places.")
        else:
            for word, extreme in (("Largest", most), ("Smallest", least)):
                tied = known.filter(pl.col(words.value) == extreme).to_dicts()
                named = "; ".join(place_of(row, places) or "all" for row in tied[:TIES])
                more = f"; and {len(tied) - TIES} more" if len(tied) > TIES else ""
                lines.append(f"{word} {quantity}{name}: {number(extreme)} at {named}{more}.")
        if undefined:
            lines.append(f"Not defined{name}: {count(undefined, 'place')}.")
    return lines


def _order(data: pl.DataFrame, words: Words) -> list[str]:
    if words.order is None:
        return []
    others = [c for c in words.places if c != words.order]
    lines = []
    for keep in (words.parts or {"": pl.lit(True)}).values():
        part = data.filter(keep)
        groups = part.partition_by(others, maintain_order=True) if others else [part]
        for group in groups:
            known = group.filter(pl.col(words.value).is_not_null())
            if known.height < 2:
                continue
            ranked = known.sort(words.value, descending=True, maintain_order=True).to_dicts()
            said = ""
            for before, row in zip([None, *ranked], ranked, strict=False):
                if before is not None:
                    said += " = " if before[words.value] == row[words.value] else " > "
                said += f"{inline(row[words.order])} {number(row[words.value])}"
            where = place_of(ranked[0], {c: words.places[c] for c in others}) or "all"
            lines.append(f"{where}: {said}.")
    return lines


def _differences(found: pl.DataFrame | None, words: Words) -> list[str]:
    if found is None or found.is_empty():
        return [inline(words.no_differences)]
    unknown = found.filter(pl.col("low").is_null() | pl.col("high").is_null())
    tested = found.filter(pl.col("low").is_not_null() & pl.col("high").is_not_null())
    holds = (pl.col("low") > 0) | (pl.col("high") < 0)
    yes, no = tested.filter(holds), tested.filter(~holds)
    if tested.is_empty():
        lines = [
            f"No interval for any of {count(found.height, 'difference')}: "
            "an interval over prompts needs at least two."
        ]
    else:
        lines = [
            f"{yes.height} of {count(tested.height, 'difference')} "
            f"{'holds' if yes.height == 1 else 'hold'} up: the 95 % interval over prompts "
            "excludes 0.",
            "The intervals are those of single differences, not corrected for their number; "
            "differences are computed before rounding.",
        ]
    if "paired" in found.columns and not found["paired"].all():
        lines[0] += " Unpaired: the two were measured on different prompts."
    for title, part in (("Hold up", yes), ("Do not hold up", no), ("No interval", unknown)):
        if not part.is_empty():
            lines += ["", f"**{title}** ({part.height}):"]
            lines += [f"- {_difference(row, words)}" for row in part.to_dicts()]
    return lines


def _difference(row: Mapping[str, Any], words: Words) -> str:
    where = place_of(row, {c: f for c, f in words.places.items() if c in row})
    said = (
        f"{where}{': ' if where else ''}{inline(row['of'])} minus {inline(row['minus'])} = "
        f"{number(row['difference'])}"
    )
    if row["low"] is None or row["high"] is None:
        return f"{said} (no interval, n = {row['n']})"
    return f"{said} (95 % interval {number(row['low'])} to {number(row['high'])}, n = {row['n']})"
