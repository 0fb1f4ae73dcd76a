"""Describes a figure in sentences that are computed from its data.

The sentences have a few fixed forms: readers learn them once, and tests compare them with the data.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from attnscope.figures.blocks import Block, Items, Section
from attnscope.figures.numbers import LEVEL, PAIRED
from attnscope.figures.text_format import count, number, visible
from attnscope.stats.means import MINIMUM
from attnscope.stats.paired import OUTCOMES, TESTED

SHORT = 6
"""Largest number of statements about extremes in the short form."""
TIES = 5
"""Largest number of places named for one extreme; further ones are counted."""
MANY = 20
"""From this number of values on, their median is stated."""


@dataclass(frozen=True, kw_only=True)
class FigureText:
    """Title, caption and description of a figure, beside its numbers."""

    title: str
    what: str
    """What the reader sees, in one sentence."""
    small_print: Sequence[str]
    """The other sentences of the caption; empty ones are skipped."""
    models: Sequence[str]
    """The models shown."""
    overview: str
    axes: Sequence[str]
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
    rule: float | None = None
    """A value that intervals are compared with, such as 1 for no change."""
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
    extremes, order = _extremes(data, text), _order(data, text)
    compared = _differences(differences, text, over)
    notes = [*_beyond_rule(data, text), *text.notes]
    sections = [
        Section("Overview", [text.overview]),
        Section("Axes", [Items(text.axes)]),
        Section("Largest and smallest", [Items(extremes)]),
        *([Section("Order", [Items(order)])] if order else []),
        Section("Differences", compared),
        *([Section("Notes", [Items(notes)])] if notes else []),
        *([claims] if claims is not None else []),
        Section("Every value", [data]),
    ]
    some = extremes[:SHORT]
    if len(extremes) > SHORT:
        some = [*some, f"{len(extremes) - SHORT} more such statements are in the description."]
    return sections, " ".join([f"{text.title}.", text.overview, *some, str(compared[0])])


def _location(row: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """`layer 0, Qwen-Phys, star`: the location of a row; null columns are skipped."""
    named = [
        form.format(visible(row[column]))
        for column, form in places.items()
        if row.get(column) is not None
    ]
    return ", ".join(named)


def _groups(
    data: pl.DataFrame, text: FigureText, columns: Sequence[str]
) -> Iterator[tuple[str, pl.DataFrame]]:
    """The groups of each part by these columns, with their location."""
    for name, keep in (text.parts or {"": pl.lit(True)}).items():
        part = data.filter(keep)
        groups = part.partition_by(columns, maintain_order=True) if columns else [part]
        for group in groups:
            if not group.is_empty():
                where = _location(group.row(0, named=True), {c: text.places[c] for c in columns})
                yield ", ".join(x for x in (name, where) if x), group


def _extremes(data: pl.DataFrame, text: FigureText) -> list[str]:
    lines = []
    places = {c: form for c, form in text.places.items() if c not in text.split}
    # A value of fewer prompts than the others gets its n.
    most_prompts = data["n"].max() if "n" in data.columns else None

    def location(row: Mapping[str, Any]) -> str:
        few = most_prompts is not None and row["n"] != most_prompts
        return (_location(row, places) or "all") + (f" (n = {row['n']})" if few else "")

    for where, group in _groups(data, text, text.split):
        name = f"{text.quantity} ({where})" if where else text.quantity
        known = group[text.value].drop_nulls()
        if known.is_empty():
            lines.append(f"No {name} is defined.")
            continue
        most, least = known.max(), known.min()
        if most == least and len(known) > 1:
            lines.append(f"Every {name}: {number(most)} at {len(known)} places.")
        else:
            for word, extreme in (("Largest", most), ("Smallest", least)):
                tied = group.filter(pl.col(text.value) == extreme).to_dicts()
                named = "; ".join(map(location, tied[:TIES]))
                more = f"; and {len(tied) - TIES} more" if len(tied) > TIES else ""
                lines.append(f"{word} {name}: {number(extreme)} at {named}{more}.")
            if len(known) >= MANY and known.dtype.is_numeric():
                lines.append(f"Median {name}: {number(known.median())} of {len(known)} values.")
        if len(known) < group.height:
            of = f" ({where})" if where else ""
            lines.append(f"Not defined{of}: {count(group.height - len(known), 'place')}.")
    return lines


def _order(data: pl.DataFrame, text: FigureText) -> list[str]:
    if text.order is None:
        return []
    lines = []
    others = [c for c in text.places if c != text.order]
    for where, group in _groups(data, text, others):
        known = group.filter(pl.col(text.value).is_not_null())
        if known.height < 2:
            continue
        ranked = known.sort(text.value, descending=True, maintain_order=True).to_dicts()
        ranking = ""
        for before, row in zip([None, *ranked], ranked, strict=False):
            if before is not None:
                ranking += " = " if before[text.value] == row[text.value] else " > "
            ranking += f"{visible(row[text.order])} {number(row[text.value])}"
        lines.append(f"{where or 'all'}: {ranking}.")
    return lines


def _beyond_rule(data: pl.DataFrame, text: FigureText) -> list[str]:
    """How many intervals are above the rule, and how many below."""
    if text.rule is None or "low" not in data.columns:
        return []
    lines = []
    for where, group in _groups(data, text, text.split):
        tested = group.filter(pl.col("low").is_not_null())
        above = tested.filter(pl.col("low") > text.rule).height
        below = tested.filter(pl.col("high") < text.rule).height
        before = f"{where}: of" if where else "Of"
        lines.append(
            f"{before} {count(tested.height, 'interval')}, {above} are above {text.rule:g}, "
            f"{below} are below, and {tested.height - above - below} contain it."
        )
    return lines


def _differences(differences: pl.DataFrame | None, text: FigureText, over: str) -> list[Block]:
    """How many differences are significant, and a table of all, the significant ones first."""
    if differences is None or differences.is_empty():
        return [text.no_differences]
    tested = differences.filter(pl.col("q").is_not_null())
    significant = (pl.col("outcome") == OUTCOMES[0]) & pl.col("q").is_not_null()
    many = differences.filter(significant).height
    if tested.is_empty():
        lines = [
            f"None of {count(differences.height, 'difference')} is tested: "
            f"a test needs at least {MINIMUM} {over}."
        ]
    else:
        lines = [
            f"{many} of {count(tested.height, 'difference')} {'is' if many == 1 else 'are'} "
            f"significant: the 95 % confidence interval over {over} excludes 0, and q < {LEVEL}.",
            f"q: p ({TESTED}), corrected by Benjamini–Hochberg over the layers (and heads) shown "
            "here. Intervals are not corrected. Differences are computed before rounding.",
        ]
    if "paired" in differences.columns and not differences["paired"].all():
        lines[0] += " Unpaired: the two were measured on different prompts."
    if differences["minus"].n_unique() == 1 < PAIRED <= differences["of"].n_unique():
        first = visible(differences["minus"][0])
        lines.append(f"There are many models, so each is compared only with {first}.")
    places = [column for column in text.places if column in differences.columns]
    columns = [*places, "of", "minus", "difference", "low", "high", "q", "n"]
    table = differences.with_columns(significant.alias("significant"))
    table = table.sort(~pl.col("significant"), maintain_order=True)
    return [*lines, table.select(*columns, "significant")]
