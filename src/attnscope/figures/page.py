"""Writes figures as one self-contained HTML file with its scripts, data and styles.

Jinja escapes all text of prompts and models. The scripts come from vl-convert, so that the page
makes no network request.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from attnscope.figures.drawing import Drawing
from attnscope.figures.text_format import visible
from attnscope.figures.theme import PUBLISHED, Theme
from attnscope.tokens.visible import STRONGEST

TEMPLATES = Path(__file__).parent / "templates"
COLOURS = {
    "line": ("#d5dae0", "#3a3f46"),
    "accent": ("#1558b0", "#8ab4f8"),
    "shade": (", ".join(str(n) for n in bytes.fromhex(STRONGEST[1:])), "178, 62, 32"),
}
"""Colours of pages beside those of a theme, on light and on dark."""


def templates(*folders: Path) -> Environment:
    """The templates in these folders, then those of pages; they escape every text."""
    environment = Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["visible"] = visible
    environment.globals |= {
        "specifications": lambda drawings: Markup(script_json(_specifications(drawings))),
        "vega": lambda: Markup(_vega_in_page()),
        "theme_css": lambda: Markup(theme_css()),
        "file": lambda name: Markup((TEMPLATES / name).read_text(encoding="utf-8")),
    }
    return environment


def theme_css() -> str:
    """The colours of all pages as CSS variables, light and dark."""
    of_text = {"ink": PUBLISHED.inks, "faint": PUBLISHED.faints, "paper": PUBLISHED.papers}
    colours = of_text | COLOURS
    light, dark = (
        "; ".join(f"--{name}: {both[n]}" for name, both in colours.items()) for n in (0, 1)
    )
    return (
        f":root {{ color-scheme: light dark; {light}; }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark}; }} }}\n"
    )


def chart_colours() -> dict[str, Any]:
    """What the charts of the live page take from a theme."""
    sides = [PUBLISHED.without, PUBLISHED.filled]
    return {**_on_page(PUBLISHED), "sides": sides, "shade": STRONGEST}


def script_json(value: Any) -> str:
    """JSON that cannot close the surrounding script element."""
    return (
        json.dumps(value, ensure_ascii=False, allow_nan=False)
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


@cache
def vega() -> str:
    """Vega, Vega-Lite and their embedding, as one script."""
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


@cache
def _vega_in_page() -> str:
    return vega().replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _specifications(drawings: Sequence[Drawing]) -> list[dict[str, Any]]:
    """The charts #chart-0, #chart-1 … with the configurations for light and dark pages."""
    return [{"spec": _bare(drawing.interactive), **_on_page(drawing.theme)} for drawing in drawings]


def _on_page(theme: Theme) -> dict[str, Any]:
    """The configurations of charts on light and on dark pages."""
    page = {"background": "transparent", "padding": 5}
    return {
        "light": theme.on(dark=False).config() | page,
        "dark": theme.on(dark=True).config() | page,
    }


def _bare(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A chart without configuration, title and caption, because the page adds them."""
    (chart,) = ({k: v for k, v in one.items() if k != "title"} for one in spec["vconcat"])
    return {k: v for k, v in spec.items() if k not in ("config", "title")} | {"vconcat": [chart]}


def page(drawings: Sequence[Drawing], *, title: str) -> str:
    """A page that contains only figures."""
    template = templates().get_template("page.html")
    return template.render(title=title, drawings=drawings, sortable=False)
