"""Declares what a figure is: what is read, by which columns, in which shape, and its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import polars as pl

from attnscope.figures.numbers import rounded
from attnscope.figures.options import Option
from attnscope.figures.select import Choice, Selection
from attnscope.figures.shapes.shape import Shape
from attnscope.figures.theme import Style, Theme
from attnscope.figures.verdict_cache import VerdictCache
from attnscope.stats.resampling import ResamplingUnits

if TYPE_CHECKING:
    from attnscope.figures.reading import Rows
    from attnscope.run.store import Run

Column = str | pl.Expr | Callable[[pl.DataFrame], pl.Expr]
"""A column of the table, an expression, or a function of the rows that returns one."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a caller wants from a figure."""

    run: Run
    choice: Choice
    theme: Theme
    width: float | None
    """Width of the chart in pixels, if the caller chose one."""
    options: Mapping[str, Any]
    verdict_cache: VerdictCache
    units: ResamplingUnits
    """What intervals and tests resample."""

    @property
    def combine(self) -> str:
        """How heads are combined: the option, else as in the experiment; the mean for `each`."""
        combine = self.options.get("combine") or self.run.experiment.combine
        return "mean" if combine == "each" else str(combine)

    @property
    def normalise(self) -> str:
        """How masses are normalised: the option, else as in the experiment."""
        return str(self.options["normalise"] or self.run.experiment.normalise)

    @property
    def unit_name(self) -> str:
        """The unit that intervals and tests resample: prompts or clusters."""
        return "clusters" if self.units.column else "prompts"


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers of a figure, and what its text needs besides."""

    data: pl.DataFrame
    """Every number shown, rounded as shown."""
    selection: Selection | None = None
    """The rows that were read. The caption names their models, layers, heads, queries and keys."""
    measures: Sequence[str] = ()
    """The measures that the data are of; claims on them are in the description."""
    differences: pl.DataFrame | None = None
    fine: pl.DataFrame | None = None
    """The data for the screen, where print had to bin them."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the shape that depend on the data. Options with the name of a field are added."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """Values for the placeholders of `title`, `what` and `quantity`."""
    sentences: Sequence[str] = ()
    """Further sentences of the caption; empty ones are skipped."""
    notes: Sequence[str] = ()
    """Further sentences of the description."""
    text: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `FigureText` that differ from what follows from shape and data."""
    models: Sequence[str] = ()
    """The models shown, if there is no `selection`."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The declaration of a figure.

    `title`, `what` and `quantity` may have placeholders: `{y}` is the title of the y axis,
    `{measure}`, `{title}` and `{definition}` are of the chosen measure (`quantities.py`), the
    others come from `Numbers.words`.
    """

    name: str
    """The name of its file, with hyphens."""
    shows: str
    """A short phrase for the list of figures."""
    shape: Shape
    title: str
    what: str
    """What the reader sees: the first sentence of the caption, without a full stop."""
    quantity: str
    """Name of the value shown, in lower case."""
    measures: Sequence[str] = ()
    """The measures that are read; with the option `measure` the preferred ones."""
    by: Sequence[str] = ()
    """The columns that locate a value: those of the table, of `derived`, and of the metadata of
    prompts. `class` and `from` are the item, `to` is the target. Mean over prompts, interval and
    n of each combination follow."""
    derived: Mapping[str, Column] = field(default_factory=dict)
    """Columns computed from others, such as `panel`."""
    also: Sequence[str] = ()
    """Further columns of the table to average."""
    table: str = "values"
    """The table of the run that is read."""
    base_only: bool = True
    """Only the base condition by default; several conditions are shown as models."""
    one_model: bool = False
    """Only the first model by default."""
    all_of: str = ""
    """`queries` or `keys`: all of them by default, in place of the first."""
    layers: Callable[[list[int]], list[int]] = list
    """The layers that are shown by default."""
    normalise: str = "mass"
    """Of masses; the option `normalise` is used in its place."""
    pooled: bool = False
    """Whether layers and heads are combined within each prompt: their mean, or as the option
    `combine` says."""
    change: Callable[[Rows], Rows] | None = None
    """A step of one's own between the rows and their means."""
    numbers: Callable[[Request, Figure], Numbers] | None = None
    """The numbers, if they are not the means of the measures by `by`."""
    from_table: Callable[[pl.DataFrame, Mapping[str, Any]], Numbers] | None = None
    """The numbers from a table and the words that come with it, if no run has them."""
    differences: str = "models"
    """What is compared: `models`; `base` with the other conditions; or a sentence that stands in
    place of differences."""
    heads: str = ""
    """How heads and layers are combined, for the caption; default: from the rows."""
    sentences: Sequence[str] = ()
    """Further sentences of the caption; those of `Numbers` follow."""
    undefined: str = ""
    """Why values may be undefined."""
    intervals: str = "Student's t, corrected for skewness"
    """How confidence intervals are computed."""
    notes: Callable[[pl.DataFrame], Sequence[str]] = lambda data: ()
    """Sentences of the description that are computed from the data."""
    needs: str = ""
    """Which experiment has the numbers; default: one with the measures."""
    height: float = 240
    """Default height of a panel in pixels."""
    options: Mapping[str, Option] = field(default_factory=dict)
    rank: int | None = None
    """Its place in a report, from 0; default: by its shape."""

    def __post_init__(self) -> None:
        if not self.needs:
            each = " or " if "measure" in self.options else " and "
            measures = each.join(f"`{measure}`" for measure in self.measures)
            needs = f"an experiment with {measures} among its measures has the numbers"
            object.__setattr__(self, "needs", needs)

    def chart(self, frame: pl.DataFrame, style: Style, **settings: Any) -> Any:
        """An altair chart of a table with these columns; `settings` are fields of the shape."""
        return replace(self.shape, **settings).for_data(frame).draw(frame, style)

    def shape_of(self, numbers: Numbers) -> Shape:
        """The shape for these numbers."""
        return replace(self.shape, **numbers.settings).for_data(numbers.data)


def numbers_of_means(table: pl.DataFrame, words: Mapping[str, Any]) -> Numbers:
    """The numbers of a table that has `value`, `low`, `high` and `n` already: means over texts."""
    counts = sorted(table["n"].unique().to_list())
    least, most = counts[0], counts[-1]
    n = f"n = {most}" if least == most else f"n = {least} to {most}"
    drawn = "; intervals: 95 %, over texts" if table["low"].null_count() < table.height else ""
    return Numbers(
        data=rounded(table),
        words=words,
        sentences=[f"{n} texts{drawn}", "Layers and heads are counted from 0"],
    )
