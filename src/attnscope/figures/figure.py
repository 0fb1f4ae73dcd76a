"""Declares what a figure is (numbers, chart, text, options) and draws it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import polars as pl

from attnscope.errors import InputError, unknown
from attnscope.figures.blocks import Section, as_markdown
from attnscope.figures.caption import bundled_note, caption, unfinished_note
from attnscope.figures.describe import FigureText, described
from attnscope.figures.select import AbsentError, Choice
from attnscope.figures.theme import Style, Theme, theme_named
from attnscope.figures.verdict_cache import VerdictCache
from attnscope.stats.resampling import ResamplingUnits

if TYPE_CHECKING:
    from attnscope.run.store import Run

VEGA_LITE = "6.4"
"""The Vega-Lite version that altair writes and vl-convert reads."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of one figure. Its default is `default`, or the first of `known`."""

    help: str
    """For the list of options in the docs."""
    known: tuple[Any, ...] | None = None
    """Allowed values; None: the figure checks the value."""
    default: Any = None

    def read(self, name: str, value: Any) -> Any:
        """The value, checked."""
        # By type too: to Python, True is 1.
        same = [k for k in self.known or () if type(k) is type(value) and k == value]
        if self.known is not None and not same:
            raise unknown(name, value, [k for k in self.known if k is not None])
        return value


COMBINE = Option(
    help="`combine`: mean, sum or max over heads; default: as in the experiment",
    known=(None, "mean", "sum", "max"),
)
"""How heads are combined into one number; None: as in the experiment."""


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
    def unit_name(self) -> str:
        """The unit that intervals and tests resample: prompts or clusters."""
        return "clusters" if self.units.nested else "prompts"


@dataclass(frozen=True, kw_only=True)
class FigureNumbers(Generic[T]):
    """The numbers of a figure, and the context that its text needs."""

    data: pl.DataFrame
    """Every number shown, rounded as shown."""
    context: T
    """How the numbers were selected, and other inputs of the text."""
    measures: Sequence[str] = ()
    """The measures that the data are of."""
    differences: pl.DataFrame | None = None
    fine: pl.DataFrame | None = None
    """The data for the screen, where print had to bin them."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chart."""
    width: float = 780
    """Default width of the chart in pixels."""
    margin: float = 50
    """Width of axes and labels in pixels: the caption is this much wider than the chart."""


@dataclass(frozen=True, kw_only=True)
class Figure(Generic[T]):
    """The declaration of a figure."""

    name: str
    shows: str
    """A short phrase for the list of figures."""
    needs: str
    """Which experiment has the numbers; part of the error if a run does not have them."""
    numbers: Callable[[Request], FigureNumbers[T]]
    chart: Callable[..., Any]
    """From the data, a `Style` and the settings to an altair chart; its docstring names the
    columns, so that users can draw their own tables with it."""
    text: Callable[[FigureNumbers[T], Request], FigureText]
    height: float = 240
    """Default height of a panel in pixels."""
    options: Mapping[str, Option] = field(default_factory=dict)
    claims: Sequence[str] = ()
    """Built-in claims that the figure shows evidence for. Claims of the run on its measures are
    added."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure of a run: chart, data and description. A notebook displays it."""

    name: str
    title: str
    data: pl.DataFrame
    """Every number shown, rounded as shown."""
    caption: str
    sections: Sequence[Section]
    """The description, computed from `data`."""
    alt: str
    """Alternative text: one paragraph in place of the picture."""
    theme: Theme
    make: Callable[[bool], Mapping[str, Any]]
    """Makes the chart as Vega-Lite, for print or (True) for the screen. It runs on first use,
    because charts are slow to build."""
    zooms: bool
    """Whether the two charts differ."""
    claims: Sequence[str] = ()
    """Names of the claims that the figure shows evidence for."""

    @property
    def description(self) -> str:
        """What the figure shows, as Markdown."""
        return as_markdown(self.sections)

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """The chart for print, as Vega-Lite; its embedded data are the rows of `data`."""
        return self.make(False)

    @cached_property
    def interactive(self) -> Mapping[str, Any]:
        """The chart for the screen: zoom, brush, and finer bins where the print had to bin."""
        return self.make(True) if self.zooms else self.spec

    @cached_property
    def svg(self) -> str:
        """The chart for print as SVG, which PNG and PDF are made from."""
        import vl_convert

        return vl_convert.vegalite_to_svg(dict(self.spec), vl_version=VEGA_LITE)

    @property
    def chart(self) -> Any:
        """The chart for print, as an altair object that can be changed further."""
        import altair as alt

        return alt.Chart.from_dict(dict(self.spec))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        import base64

        from attnscope.figures.export import png

        return {
            "application/vnd.vegalite.v6+json": json.loads(json.dumps(self.interactive)),
            "image/png": base64.b64encode(png(self, scale=1.25)).decode(),
            "text/plain": f"{self.title}\n{self.caption}",
        }


LAYOUT = ("title", "width", "height")
UNITS = ("cluster", "strata")


def _parse(figure: Figure[Any], keywords: Mapping[str, Any]) -> tuple[Choice, dict[str, Any]]:
    """The choice of data and the options of the figure; an unknown option is an error."""
    chosen = [f.name for f in fields(Choice)]
    for name in keywords:
        if name not in (*figure.options, *chosen, *LAYOUT, *UNITS):
            known = [*figure.options, *sorted(chosen), *sorted(LAYOUT), *UNITS, "theme", "dark"]
            raise InputError(
                f"unknown option {name!r} of {figure.name}; known: {', '.join(known)}",
                code="unknown-option",
                value=name,
                known=known,
            )
    for name in ("width", "height"):
        size = keywords.get(name)
        if size is not None and not (isinstance(size, int | float) and 20 <= size <= 20_000):
            raise InputError(
                f"{name} must be between 20 and 20,000 pixels, not {size!r}",
                code="bad-size",
                option=name,
                value=size,
            )
    options = {
        name: option.read(name, keywords[name])
        if name in keywords
        else (option.known[0] if option.known and option.default is None else option.default)
        for name, option in figure.options.items()
    }
    return Choice(**{name: value for name, value in keywords.items() if name in chosen}), options


def draw(
    run: Run,
    figure: Figure[T],
    *,
    theme: str | Theme = "published",
    dark: bool = False,
    verdict_cache: VerdictCache | None = None,
    **keywords: Any,
) -> Drawing:
    """Draw a figure of a run: compute the numbers, describe them, chart them."""
    if "normalize" in keywords:  # both spellings are accepted
        keywords["normalise"] = keywords.pop("normalize")
    choice, options = _parse(figure, keywords)
    units = {name: keywords[name] for name in UNITS if name in keywords}
    request = Request(
        run=run,
        choice=choice,
        theme=theme_named(theme, dark=dark),
        width=keywords.get("width"),
        options=options,
        verdict_cache=verdict_cache or VerdictCache(run, **units),
        units=ResamplingUnits(run.prompts, **units),
    )
    try:
        numbers = figure.numbers(request)
    except AbsentError as error:
        raise InputError(f"{error}; {figure.needs}", code=error.code, **error.values) from None
    text = figure.text(numbers, request)
    text = replace(text, title=keywords.get("title") or text.title)
    numbers = replace(numbers, width=request.width or numbers.width)
    style = Style(
        theme=request.theme, width=numbers.width, height=keywords.get("height") or figure.height
    )
    claims = request.verdict_cache.claims_for(numbers.measures, figure.claims)
    section = request.verdict_cache.section(claims)
    described_as = described(numbers.data, text, numbers.differences, section, request.unit_name)
    notes = (bundled_note(run, text.models), unfinished_note(run))
    drawing = _drawing(figure.name, numbers, text, described_as, figure.chart, style, notes)
    return replace(drawing, claims=claims)


def draw_table(
    name: str,
    data: pl.DataFrame,
    text: FigureText,
    chart: Callable[..., Any],
    *,
    width: float,
    height: float,
    theme: str = "published",
) -> Drawing:
    """Draw a table that no run holds, such as scores under conditions or effects of heads."""
    style = Style(theme=theme_named(theme, dark=False), width=width, height=height)
    numbers = FigureNumbers(data=data, context=None, width=width, margin=60)
    return _drawing(name, numbers, text, described(data, text), chart, style)


def _drawing(
    name: str,
    numbers: FigureNumbers[Any],
    text: FigureText,
    described_as: tuple[list[Section], str],
    chart: Callable[..., Any],
    style: Style,
    notes: Sequence[str] = (),
) -> Drawing:
    """Put numbers and text together; the chart is made on first use."""
    sections, alt_text = described_as
    caption_text = caption([*text.caption, *notes])

    def make(screen: bool) -> Mapping[str, Any]:
        from attnscope.figures.charts.common import figure_spec

        data = numbers.fine if screen and numbers.fine is not None else numbers.data
        return figure_spec(
            chart(data, replace(style, screen=screen), **numbers.settings),
            title=text.title,
            caption=caption_text,
            alt_text=alt_text,
            width=numbers.width + numbers.margin,
            theme=style.theme,
        )

    return Drawing(
        name=name,
        title=text.title,
        data=numbers.data,
        caption=caption_text,
        sections=sections,
        alt=alt_text,
        theme=style.theme,
        make=make,
        zooms=numbers.fine is not None,
    )
