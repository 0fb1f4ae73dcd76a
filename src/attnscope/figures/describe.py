"""What a figure shows, in words: computed from its data, so that every stated value, extreme and
order can be checked against them.

The sentences are built from few fixed forms on purpose: a reader learns them once, and a test can
read them back. This module must not know charts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from attnscope.figures.blocks import Items, Lines, Section, Strong
from attnscope.figures.numbers import LEVEL, PAIRED
from attnscope.figures.text_format import count, number, visible
from attnscope.stats.contrast import TESTED
from attnscope.stats.intervals import MINIMUM
from attnscope.stats.paired import OUTCOMES

SHORT = 6
"""The most statements about extremes in the short form."""
TIES = 5
"""The most places named for one extreme; further ones are counted."""


@dataclass(frozen=True, kw_only=True)
class FigureText:
    """What a figure says about itself beyond its numbers."""

    title: str
    caption: Sequence[str]
    """Sentences; what is empty is left out."""
    models: Sequence[str]
    """The models shown."""
    overview: str
    axes: Sequence[str]
    legend: Sequence[str]
    value: str = "value"
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
    no_differences: str = "One model only: there is nothing to compare with."
    """Said where there are no differences."""


def described(
    data: pl.DataFrame,
    text: FigureText,
    differences: pl.DataFrame | None = None,
    claims: Section | None = None,
    over: str = "prompts",
) -> tuple[list[Section], str]:
    """The sections of a figure that shows `data`, and all of it in one paragraph."""
    extremes = _extremes(data, text)
    summary, groups = _differences(differences, text, over)
    order, notes = _order(data, text), list(text.notes)
    sections = [
        Section("Overview", [Lines([text.overview])]),
        Section("Axes", [Items(text.axes)]),
        Section("Legend", [Items(text.legend)]),
        Section("Largest and smallest", [Items(extremes)]),
        *([Section("Order", [Items(order)])] if order else []),
        Section("Differences", [Lines(summary), *groups]),
        *([Section("Notes", [Items(notes)])] if notes else []),
        *([claims] if claims is not None else []),
        Section("Every value", [data]),
    ]
    some = extremes[:SHORT]
    if len(extremes) > SHORT:
        some = [*some, f"{len(extremes) - SHORT} more such statements are in the description."]
    return sections, " ".join([f"{text.title}.", text.overview, *some, summary[0]])


def _location(row: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """`layer 0, Qwen-Phys, star`: where a row stands, with what is null left out."""
    named = [
        form.format(visible(row[column]))
        for column, form in places.items()
        if row.get(column) is not None
    ]
    return ", ".join(named)


def _parts(data: pl.DataFrame, text: FigureText) -> list[tuple[str, pl.DataFrame]]:
    """The parts that have extremes of their own, each with its name in brackets."""
    parts = []
    for name, keep in (text.parts or {"": pl.lit(True)}).items():
        part = data.filter(keep)
        groups = part.partition_by(text.split, maintain_order=True) if text.split else [part]
        for group in groups:
            if group.is_empty():
                continue
            where = _location(group.row(0, named=True), {c: text.places[c] for c in text.split})
            label = ", ".join(x for x in (name, where) if x)
            parts.append((f" ({label})" if label else "", group))
    return parts


def _extremes(data: pl.DataFrame, text: FigureText) -> list[str]:
    lines = []
    places = {c: form for c, form in text.places.items() if c not in text.split}
    # What rests on fewer prompts than the rest is told with its n.
    most_prompts = data["n"].max() if "n" in data.columns else None

    def location(row: Mapping[str, Any]) -> str:
        few = most_prompts is not None and row["n"] != most_prompts
        return (_location(row, places) or "all") + (f" (n = {row['n']})" if few else "")

    for name, part in _parts(data, text):
        known = part.filter(pl.col(text.value).is_not_null())
        undefined = part.height - known.height
        if known.is_empty():
            lines.append(f"No {text.quantity}{name} is defined.")
            continue
        most, least = known[text.value].max(), known[text.value].min()
        if most == least and known.height > 1:
            lines.append(f"Every {text.quantity}{name}: {number(most)} at {known.height} places.")
        else:
            for word, extreme in (("Largest", most), ("Smallest", least)):
                tied = known.filter(pl.col(text.value) == extreme).to_dicts()
                named = "; ".join(map(location, tied[:TIES]))
                more = f"; and {len(tied) - TIES} more" if len(tied) > TIES else ""
                lines.append(f"{word} {text.quantity}{name}: {number(extreme)} at {named}{more}.")
        if undefined:
            lines.append(f"Not defined{name}: {count(undefined, 'place')}.")
    return lines


def _order(data: pl.DataFrame, text: FigureText) -> list[str]:
    if text.order is None:
        return []
    others = [c for c in text.places if c != text.order]
    lines = []
    for keep in (text.parts or {"": pl.lit(True)}).values():
        part = data.filter(keep)
        groups = part.partition_by(others, maintain_order=True) if others else [part]
        for group in groups:
            known = group.filter(pl.col(text.value).is_not_null())
            if known.height < 2:
                continue
            ranked = known.sort(text.value, descending=True, maintain_order=True).to_dicts()
            ranking = ""
            for before, row in zip([None, *ranked], ranked, strict=False):
                if before is not None:
                    ranking += " = " if before[text.value] == row[text.value] else " > "
                ranking += f"{visible(row[text.order])} {number(row[text.value])}"
            where = _location(ranked[0], {c: text.places[c] for c in others}) or "all"
            lines.append(f"{where}: {ranking}.")
    return lines


def _differences(
    differences: pl.DataFrame | None, text: FigureText, over: str
) -> tuple[list[str], list[Items]]:
    """What holds up, as `compare` finds, and what does not: in general, and one by one."""
    if differences is None or differences.is_empty():
        return [text.no_differences], []
    untested = differences.filter(pl.col("q").is_null())
    tested = differences.filter(pl.col("q").is_not_null())
    holds = pl.col("outcome") == OUTCOMES[0]
    yes, no = tested.filter(holds), tested.filter(~holds)
    if tested.is_empty():
        lines = [
            f"No test of any of {count(differences.height, 'difference')}: "
            f"a test over {over} needs at least {MINIMUM}."
        ]
    else:
        lines = [
            f"{yes.height} of {count(tested.height, 'difference')} "
            f"{'holds' if yes.height == 1 else 'hold'} up: the 95 % interval over {over} "
            f"excludes 0, and q < {LEVEL}.",
            f"q: p ({TESTED}), corrected by Benjamini–Hochberg over the layers (and heads) shown "
            "here. The intervals are those of single differences; differences are "
            "computed before rounding.",
        ]
    if "paired" in differences.columns and not differences["paired"].all():
        lines[0] += " Unpaired: the two were measured on different prompts."
    if differences["minus"].n_unique() == 1 < PAIRED <= differences["of"].n_unique():
        lines.append(f"Of so many, each is compared with {visible(differences['minus'][0])} alone.")
    groups = (("Hold up", yes), ("Do not hold up", no), ("Not tested", untested))
    return lines, [
        Items(
            [_difference(row, text) for row in part.to_dicts()],
            (Strong(title), f" ({part.height}):"),
        )
        for title, part in groups
        if not part.is_empty()
    ]


def _difference(row: Mapping[str, Any], text: FigureText) -> str:
    where = _location(row, {c: f for c, f in text.places.items() if c in row})
    difference = (
        f"{where}{': ' if where else ''}{visible(row['of'])} minus {visible(row['minus'])} = "
        f"{number(row['difference'])}"
    )
    interval = (
        "no interval"
        if row["low"] is None or row["high"] is None
        else f"95 % interval {number(row['low'])} to {number(row['high'])}"
    )
    tested = "" if row["q"] is None else f", q = {number(row['q'])}"
    return f"{difference} ({interval}{tested}, n = {row['n']})"
