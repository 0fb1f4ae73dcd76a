"""A figure: a chart together with the numbers it shows and the words that say what it shows.

This module must not know how any figure is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import polars as pl

from attnscope.figures.theme import Theme
from attnscope.question.spec import Experiment

__all__ = ["VEGA_LITE", "Figure", "Run"]

VEGA_LITE = "6.4"
"""What altair writes and vl-convert reads."""


class Run(Protocol):
    """What a figure reads of a run; `attnscope.open_run` gives one."""

    @property
    def values(self) -> pl.LazyFrame:
        """One row per number."""

    @property
    def positions(self) -> pl.LazyFrame:
        """One row per token of a profile."""

    @property
    def tokens(self) -> pl.LazyFrame:
        """One row per token of a prompt."""

    @property
    def cells(self) -> pl.DataFrame:
        """One row per model, prompt and condition."""

    @property
    def experiment(self) -> Experiment:
        """What was asked."""

    @property
    def environment(self) -> Mapping[str, Any]:
        """With what it was measured."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart, its data and its description. In a notebook it shows itself."""

    name: str
    title: str
    on_paper: Callable[[], Mapping[str, Any]]
    """Makes `spec`; only when it is asked for, because a chart takes its time."""
    on_screen: Callable[[], Mapping[str, Any]] | None = None
    """Makes `interactive`, where it is not the same."""
    data: pl.DataFrame
    """Every number shown, rounded as shown."""
    caption: str
    description: str
    """Markdown, computed from `data`."""
    alt: str
    """One paragraph in place of the picture."""
    theme: Theme

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """The chart for print, as Vega-Lite; its embedded data are the rows of `data`."""
        return self.on_paper()

    @cached_property
    def interactive(self) -> Mapping[str, Any]:
        """The chart for the screen: zoom, brush, and finer bins where the print had to bin."""
        return self.spec if self.on_screen is None else self.on_screen()

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
