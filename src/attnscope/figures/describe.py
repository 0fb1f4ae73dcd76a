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

SAID = 6
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
    words: FigureText,
    differences: pl.DataFrame | None = None,
    claims: Section | None = None,
    over: str = "prompts",
) -> tuple[list[Section], str]:
    """The sections of a figure that shows `data`, and all of it in one paragraph."""
    extremes = _extremes(data, words)
    found, held = _differences(differences, words, over)
    order, notes = _order(data, words), list(words.notes)
    sections = [
        Section("Overview", [Lines([words.overview])]),
        Section("Axes", [Items(words.axes)]),
        Section("Legend", [Items(words.legend)]),
        Section("Largest and smallest", [Items(extremes)]),
        *([Section("Order", [Items(order)])] if order else []),
        Section("Differences", [Lines(found), *held]),
        *([Section("Notes", [Items(notes)])] if notes else []),
        *([claims] if claims is not None else []),
        Section("Every value", [data]),
    ]
    some = extremes[:SAID]
    if len(extremes) > SAID:
        some = [*some, f"{len(extremes) - SAID} more such statements are in the description."]
    return sections, " ".join([f"{words.title}.", words.overview, *some, found[0]])


def _place(row: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """`layer 0, Qwen-Phys, star`: where a row stands, with what is null left out."""
    named = [
        form.format(visible(row[column]))
        for column, form in places.items()
        if row.get(column) is not None
    ]
    return ", ".join(named)


def _parts(data: pl.DataFrame, words: FigureText) -> list[tuple[str, pl.DataFrame]]:
    """The parts that have extremes of their own, each with its name in brackets."""
    found = []
    for name, keep in (words.parts or {"": pl.lit(True)}).items():
        part = data.filter(keep)
        groups = part.partition_by(words.split, maintain_order=True) if words.split else [part]
        for group in groups:
            if group.is_empty():
                continue
            where = _place(group.row(0, named=True), {c: words.places[c] for c in words.split})
            said = ", ".join(x for x in (name, where) if x)
            found.append((f" ({said})" if said else "", group))
    return found


def _extremes(data: pl.DataFrame, words: FigureText) -> list[str]:
    lines = []
    places = {c: form for c, form in words.places.items() if c not in words.split}
    # What rests on fewer prompts than the rest is told with its n.
    most_prompts = data["n"].max() if "n" in data.columns else None

    def place(row: Mapping[str, Any]) -> str:
        few = most_prompts is not None and row["n"] != most_prompts
        return (_place(row, places) or "all") + (f" (n = {row['n']})" if few else "")

    for name, part in _parts(data, words):
        known = part.filter(pl.col(words.value).is_not_null())
        undefined = part.height - known.height
        if known.is_empty():
            lines.append(f"No {words.quantity}{name} is defined.")
            continue
        most, least = known[words.value].max(), known[words.value].min()
        if most == least and known.height > 1:
            lines.append(f"Every {words.quantity}{name}: {number(most)} at {known.height} places.")
        else:
            for word, extreme in (("Largest", most), ("Smallest", least)):
                tied = known.filter(pl.col(words.value) == extreme).to_dicts()
                named = "; ".join(map(place, tied[:TIES]))
                more = f"; and {len(tied) - TIES} more" if len(tied) > TIES else ""
                lines.append(f"{word} {words.quantity}{name}: {number(extreme)} at {named}{more}.")
        if undefined:
            lines.append(f"Not defined{name}: {count(undefined, 'place')}.")
    return lines


def _order(data: pl.DataFrame, words: FigureText) -> list[str]:
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
                said += f"{visible(row[words.order])} {number(row[words.value])}"
            where = _place(ranked[0], {c: words.places[c] for c in others}) or "all"
            lines.append(f"{where}: {said}.")
    return lines


def _differences(
    found: pl.DataFrame | None, words: FigureText, over: str
) -> tuple[list[str], list[Items]]:
    """What holds up, as `compare` finds, and what does not: in general, and one by one."""
    if found is None or found.is_empty():
        return [words.no_differences], []
    untested = found.filter(pl.col("q").is_null())
    tested = found.filter(pl.col("q").is_not_null())
    holds = pl.col("outcome") == OUTCOMES[0]
    yes, no = tested.filter(holds), tested.filter(~holds)
    if tested.is_empty():
        lines = [
            f"No test of any of {count(found.height, 'difference')}: "
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
    if "paired" in found.columns and not found["paired"].all():
        lines[0] += " Unpaired: the two were measured on different prompts."
    if found["minus"].n_unique() == 1 < PAIRED <= found["of"].n_unique():
        lines.append(f"Of so many, each is compared with {visible(found['minus'][0])} alone.")
    groups = (("Hold up", yes), ("Do not hold up", no), ("Not tested", untested))
    return lines, [
        Items(
            [_difference(row, words) for row in part.to_dicts()],
            (Strong(title), f" ({part.height}):"),
        )
        for title, part in groups
        if not part.is_empty()
    ]


def _difference(row: Mapping[str, Any], words: FigureText) -> str:
    where = _place(row, {c: f for c, f in words.places.items() if c in row})
    said = (
        f"{where}{': ' if where else ''}{visible(row['of'])} minus {visible(row['minus'])} = "
        f"{number(row['difference'])}"
    )
    interval = (
        "no interval"
        if row["low"] is None or row["high"] is None
        else f"95 % interval {number(row['low'])} to {number(row['high'])}"
    )
    tested = "" if row["q"] is None else f", q = {number(row['q'])}"
    return f"{said} ({interval}{tested}, n = {row['n']})"
