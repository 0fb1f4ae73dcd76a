"""Describes a figure in sentences that are computed from its data.

The sentences have a few fixed forms: readers learn them once, and tests compare them with the data.
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
"""Largest number of statements about extremes in the short form."""
TIES = 5
"""Largest number of places named for one extreme; further ones are counted."""


@dataclass(frozen=True, kw_only=True)
class FigureText:
    """Title, caption and description of a figure, beside its numbers."""

    title: str
    caption: Sequence[str]
    """Sentences; empty ones are skipped. The first one is what the reader sees."""
    models: Sequence[str]
    """The models shown."""
    overview: str
    axes: Sequence[str]
    legend: Sequence[str]
    value: str = "value"
    """The column of the data with the quantity shown."""
    quantity: str
    """Name of the quantity shown."""
    places: Mapping[str, str]
    """The columns that locate a value, each with a form such as `layer {}`."""
    order: str | None = None
    """The column whose values are ranked within each combination of the others."""
    parts: Mapping[str, pl.Expr] = field(default_factory=dict)
    """Parts of the data with their own extremes; empty: the data are one part."""
    split: Sequence[str] = ()
    """Columns whose values each have their own extremes."""
    notes: Sequence[str] = ()
    no_differences: str = "There is only one model, so nothing is compared."
    """The sentence that stands in place of differences."""


def described(
    data: pl.DataFrame,
    text: FigureText,
    differences: pl.DataFrame | None = None,
    claims: Section | None = None,
    over: str = "prompts",
) -> tuple[list[Section], str]:
    """The sections of a figure of `data`, and the same in one paragraph."""
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
    """`layer 0, Qwen-Phys, star`: the location of a row; null columns are skipped."""
    named = [
        form.format(visible(row[column]))
        for column, form in places.items()
        if row.get(column) is not None
    ]
    return ", ".join(named)


def _parts(data: pl.DataFrame, text: FigureText) -> list[tuple[str, pl.DataFrame]]:
    """The parts with their own extremes, each with its name in brackets."""
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
    # A value of fewer prompts than the others gets its n.
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
    """The significant, other and untested differences: a summary, then a list of each."""
    if differences is None or differences.is_empty():
        return [text.no_differences], []
    untested = differences.filter(pl.col("q").is_null())
    tested = differences.filter(pl.col("q").is_not_null())
    holds = pl.col("outcome") == OUTCOMES[0]
    yes, no = tested.filter(holds), tested.filter(~holds)
    if tested.is_empty():
        lines = [
            f"None of {count(differences.height, 'difference')} is tested: "
            f"a test needs at least {MINIMUM} {over}."
        ]
    else:
        lines = [
            f"{yes.height} of {count(tested.height, 'difference')} "
            f"{'is' if yes.height == 1 else 'are'} significant: the 95 % confidence interval over "
            f"{over} excludes 0, and q < {LEVEL}.",
            f"q: p ({TESTED}), corrected by Benjamini–Hochberg over the layers (and heads) shown "
            "here. Intervals are not corrected. Differences are computed before rounding.",
        ]
    if "paired" in differences.columns and not differences["paired"].all():
        lines[0] += " Unpaired: the two were measured on different prompts."
    if differences["minus"].n_unique() == 1 < PAIRED <= differences["of"].n_unique():
        lines.append(
            "There are many models, so each is compared only with "
            f"{visible(differences['minus'][0])}."
        )
    groups = (("Significant", yes), ("Not significant", no), ("Not tested", untested))
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
