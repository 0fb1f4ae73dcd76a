"""Draws a figure: computes its numbers, writes its text, and puts both with a chart together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.blocks import Section, as_markdown
from attnscope.figures.caption import figure_text, sentences
from attnscope.figures.describe import described
from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.options import LAYOUT, UNITS, parse
from attnscope.figures.reading import means_of
from attnscope.figures.select import AbsentError
from attnscope.figures.shapes.shape import figure_spec
from attnscope.figures.theme import Style, Theme, theme_named
from attnscope.figures.verdict_cache import VerdictCache
from attnscope.stats.resampling import ResamplingUnits

if TYPE_CHECKING:
    from attnscope.run.store import Run

VEGA_LITE = "6.4"
"""The Vega-Lite version that altair writes and vl-convert reads."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure of a run: chart, data and description. A notebook displays it."""

    name: str
    title: str
    data: pl.DataFrame
    """Every number shown, rounded as shown."""
    what: str
    """The first sentence of the caption: what the reader sees."""
    small_print: str
    """The rest of the caption."""
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
    rank: int
    """Its place among the figures of a report."""
    claims: Sequence[str] = ()
    """Names of the claims on the measures of the figure."""

    @property
    def caption(self) -> str:
        """What the reader sees, and the small print."""
        return f"{self.what} {self.small_print}"

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
        """The chart for the screen, with zoom and finer bins where the print had to bin."""
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


def draw(
    run: Run,
    figure: Figure,
    *,
    theme: str | Theme = "published",
    dark: bool = False,
    verdict_cache: VerdictCache | None = None,
    **keywords: Any,
) -> Drawing:
    """Draw a figure of a run: compute the numbers, describe them, chart them."""
    if "normalize" in keywords:  # both spellings are accepted
        keywords["normalise"] = keywords.pop("normalize")
    choice, options = parse(figure.name, figure.options, keywords)
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
        if figure.from_table is not None:
            raise AbsentError(f"{figure.name} is drawn from a table, not from a run")
        numbers = (figure.numbers or means_of)(request, figure)
    except AbsentError as error:
        raise InputError(f"{error}; {figure.needs}", code=error.code, **error.values) from None
    claims = request.verdict_cache.claims_on(numbers.measures)
    verdicts = request.verdict_cache.section(claims)
    layout = {name: keywords.get(name) for name in LAYOUT}
    drawing = _drawing(figure, numbers, request.theme, request, verdicts=verdicts, **layout)
    return replace(drawing, claims=claims)


def draw_table(
    figure: Figure, table: pl.DataFrame, *, theme: str = "published", **words: Any
) -> Drawing:
    """Draw a figure of a table that no run holds; `words` are those of its title and caption."""
    assert figure.from_table is not None
    return _drawing(figure, figure.from_table(table, words), theme_named(theme))


def _drawing(
    figure: Figure,
    numbers: Numbers,
    theme: Theme,
    request: Request | None = None,
    *,
    verdicts: Section | None = None,
    title: str | None = None,
    width: float | None = None,
    height: float | None = None,
) -> Drawing:
    """Put numbers and text together; the chart is made on first use."""
    data, shape = numbers.data, figure.shape_of(numbers)
    text = figure_text(figure, numbers, request)
    text = replace(text, title=title or text.title)
    over = "prompts" if request is None else request.unit_name
    sections, alt_text = described(data, text, numbers.differences, verdicts, over)
    what, small_print = sentences([text.what]), sentences(text.small_print)
    style = Style(theme=theme, width=width or shape.width(data), height=height or figure.height)

    def make(screen: bool) -> Mapping[str, Any]:
        rows = numbers.fine if screen and numbers.fine is not None else data
        return figure_spec(
            figure.chart(rows, replace(style, screen=screen), **numbers.settings),
            title=text.title,
            what=what,
            small_print=small_print,
            alt_text=alt_text,
            width=style.width + shape.margin(data),
            theme=theme,
        )

    return Drawing(
        name=figure.name,
        title=text.title,
        data=data,
        what=what,
        small_print=small_print,
        sections=sections,
        alt=alt_text,
        theme=theme,
        make=make,
        zooms=numbers.fine is not None,
        rank=shape.rank_for(data) if figure.rank is None else figure.rank,
    )
