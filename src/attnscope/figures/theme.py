"""Themes: colours and fonts of figures, in one object that users can replace.

`PUBLISHED` has the colours of the published figures. `SAFE` has those of Okabe and Ito, which
readers with a common colour blindness can distinguish. Both have a light and a dark form: `config`
holds everything that depends on the background.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attnscope.errors import InputError, unknown
from attnscope.tokens.class_colours import CLASS_COLOURS, OTHER_COLOURS, class_colours

# Liberation Sans has the metrics of Arial, so server and browser give the same layout.
SANS = "Liberation Sans, Arial, Helvetica, DejaVu Sans, sans-serif"
MONO = "DejaVu Sans Mono, Liberation Mono, Menlo, Consolas, monospace"


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours and fonts of a figure. Derive your own: `dataclasses.replace(SAFE, font="Inter")`."""

    name: str
    classes: Mapping[str, str]
    """Colour of a token class, by its name."""
    others: tuple[str, ...]
    """Colours for classes without one of their own, in their order."""
    models: tuple[str, ...]
    """Colours of models (or of layers) where they are lines."""
    without: str
    """The base prompt, without filler."""
    filled: str
    """The variant, with filler."""
    span: str
    """Shading of the inserted span."""
    sequential: tuple[str, ...]
    """From little to much."""
    diverging: tuple[str, ...]
    """From negative over none to positive."""
    dark: bool = False
    font: str = SANS
    mono: str = MONO
    size: float = 11.0
    """Size of axis labels in pixels; other sizes follow from it."""
    inks: tuple[str, str] = field(default=("#1a1a1a", "#ececec"))
    """Text and rules, on light and on dark."""
    faints: tuple[str, str] = field(default=("#5f6368", "#a8adb4"))
    """Secondary text."""
    grids: tuple[str, str] = field(default=("#e3e5e8", "#3a3f46"))
    papers: tuple[str, str] = field(default=("#ffffff", "#16191d"))

    def on(self, *, dark: bool) -> Theme:
        """The same theme for a dark or a light page."""
        return replace(self, dark=dark)

    @property
    def ink(self) -> str:
        """Colour of text and rules."""
        return self.inks[self.dark]

    @property
    def paper(self) -> str:
        """Colour of the background."""
        return self.papers[self.dark]

    def class_colours(self, names: Iterable[str]) -> list[str]:
        """A colour for every class: its own, or the next of `others`."""
        return class_colours(names, self.classes, self.others)

    def series_colours(self, count: int) -> list[str]:
        """Colours for `count` lines that are models or layers."""
        return [self.models[i % len(self.models)] for i in range(count)]

    def config(self) -> dict[str, Any]:
        """The part of a chart that depends on the theme's background, fonts and sizes."""
        ink, faint, grid = self.ink, self.faints[self.dark], self.grids[self.dark]
        small, middle, large = self.size - 1, self.size, self.size + 1
        text: dict[str, Any] = {"labelColor": ink, "titleColor": ink, "titleFontWeight": "normal"}
        text |= {"labelLimit": 400, "labelFontSize": middle, "titleFontSize": large}
        rules = {"gridColor": grid, "domainColor": faint, "tickColor": faint, "titlePadding": 8}
        keys = {"titleFontSize": middle, "titleLimit": 400}
        title = {"color": ink, "fontSize": self.size + 3, "fontWeight": "bold", "offset": 12}
        subtitle = {"subtitleColor": ink, "subtitleFontSize": middle, "subtitlePadding": 5}
        return {
            "background": self.paper,
            "font": self.font,
            "padding": 12,
            "title": title
            | subtitle
            | {"subtitleLineHeight": middle + 3.5, "anchor": "start", "frame": "bounds"},
            "axis": text | rules,
            "header": text | {"labelFontSize": large},
            "legend": text | keys | {"gradientLength": 160, "gradientThickness": 10},
            "view": {"stroke": None},
            "style": {
                "ink": {"color": ink, "stroke": ink, "fill": None},
                "ink-text": {"color": ink, "fontSize": small},
                "faint-text": {"color": faint, "fontSize": small},
                "small-print": {
                    "fill": faint,
                    "fontSize": small,
                    "fontWeight": "normal",
                    "lineHeight": small + 3.5,
                },
                "faint-rule": {"color": faint, "stroke": faint, "fill": None},
                "chosen-row": {"color": grid},
                "span": {"color": self.span, "opacity": 0.22 if self.dark else 1.0},
                "panel-title": {"color": ink, "fontSize": large, "fontWeight": "bold"},
                "paper-edge": {"stroke": self.paper},
            },
        }


PUBLISHED = Theme(
    name="published",
    classes=CLASS_COLOURS,
    others=OTHER_COLOURS,
    models=("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#d62728", "#17becf", "#8c564b", "#e377c2"),
    without="#e8603c",
    filled="#1a9e96",
    span="#dff3dc",
    sequential=("#f2f4f8", "#fdd49e", "#fc8d59", "#d7301f", "#7f0000"),
    diverging=("#2166ac", "#92c5de", "#f7f7f7", "#f4a582", "#b2182b"),
)

SAFE = Theme(
    name="safe",
    classes={
        "hash": "#d55e00",
        "star": "#0072b2",
        "whitespace": "#999999",
        "slash": "#7a4b00",
        "newline": "#cccccc",
        "digit": "#009e73",
        "operator": "#cc79a7",
        "conjunction": "#56b4e9",
        "punctuation": "#f0e442",
        "word": "#e69f00",
        "special": "#4b2e83",
        "other": "#5b6670",
    },
    others=("#332288", "#88ccee", "#44aa99", "#117733", "#ddcc77", "#cc6677", "#aa4499"),
    models=("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#7a4b00", "#999999"),
    without="#d55e00",
    filled="#0072b2",
    span="#d7efe6",
    sequential=("#f2f4f8", "#b8d6e6", "#6aaed6", "#2070b4", "#08306b"),
    diverging=("#0072b2", "#8fc1de", "#f7f7f7", "#f0b27a", "#d55e00"),
)


@dataclass(frozen=True, kw_only=True)
class Style:
    """Theme and size of a chart."""

    theme: Theme = PUBLISHED
    width: float = 780
    """Width of a row of panels in pixels, without axes."""
    height: float = 240
    """Height of one panel in pixels."""
    screen: bool = False
    """True for the screen with zoom, False for print."""


THEMES: Mapping[str, Theme] = {"published": PUBLISHED, "safe": SAFE}
"""The themes by name."""


def theme_named(theme: str | Theme, *, dark: bool = False) -> Theme:
    """A theme by its name, or a theme object, for a light or a dark page."""
    if isinstance(theme, Theme):
        return theme.on(dark=dark or theme.dark)
    if not isinstance(theme, str):
        raise InputError(
            f"theme must be a Theme or one of {', '.join(THEMES)}, not {theme!r}",
            code="unknown-theme",
            value=theme,
            known=list(THEMES),
        )
    if theme not in THEMES:
        raise unknown("theme", theme, THEMES)
    return THEMES[theme].on(dark=dark)
