"""Writes figures as one self-contained HTML file with its scripts, data and styles.

The scripts come from vl-convert, so that the page makes no network request. All text of prompts
and models is escaped.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import vl_convert

from attnscope.figures.blocks import as_html
from attnscope.figures.figure import Drawing

SORTABLE = "sortable"
"""CSS class of tables that readers can sort and filter."""


def _asset(name: str) -> str:
    """A style or script from the folder of this file."""
    return "\n" + Path(__file__).with_name(name).read_text(encoding="utf-8")


STYLE = _asset("page.css")

# The page may make no network request.
POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    'img-src data:; font-src data:">'
)

# The page uses the light or dark configuration of the reader's system, and the light one in print.
SCRIPT = _asset("charts.js")


# Sortable tables: a click on a column heading sorts, the filter keeps rows that contain all words.
# The script reads text and moves rows; it creates no HTML from them.
TABLES = _asset("tables.js")


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
def _bundle() -> str:
    """Vega, Vega-Lite and their embedding, as one script."""
    return (
        vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
        .replace("</script", "<\\/script")
        .replace("<!--", "<\\!--")
    )


def _bare(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A chart without configuration and caption, because the page adds both."""
    bare = {k: v for k, v in spec.items() if k != "config"}
    title = bare.get("title")
    if isinstance(title, dict):
        bare["title"] = {k: v for k, v in title.items() if k != "subtitle"}
    return bare


def charts_script(figures: Sequence[Drawing]) -> str:
    """The scripts and specifications of a page; the charts go to #chart-0, #chart-1 …"""
    specs = [
        {
            "spec": _bare(f.interactive),
            "light": f.theme.on(dark=False).config(),
            "dark": f.theme.on(dark=True).config(),
        }
        for f in figures
    ]
    return (
        f'<script type="application/json" id="specifications">{script_json(specs)}</script>\n'
        f"<script>{_bundle()}</script>\n<script>{SCRIPT}</script>"
    )


def figure_html(figure: Drawing, number: int) -> str:
    """The element for a chart with this number, its caption and its description."""
    return (
        f'<figure id="figure-{escape(figure.name)}"><div class="chart" id="chart-{number}" '
        f'role="img" aria-label="{escape(figure.alt)}"></div>'
        f"<figcaption>{escape(figure.caption)}</figcaption>"
        f"<details><summary>Description of “{escape(figure.title)}”, with every value</summary>"
        f"{as_html(figure.sections)}</details></figure>"
    )


def whole_page(title: str, body: str, figures: Sequence[Drawing]) -> str:
    """A self-contained page with the scripts for its figures and tables."""
    tables = f"\n<script>{TABLES}</script>" if f'class="{SORTABLE}"' in body else ""
    charts = f"\n{charts_script(figures)}" if figures else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'{POLICY}<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}{charts}{tables}\n</body></html>\n"
    )


def page(figures: Sequence[Drawing], *, title: str) -> str:
    """A page that contains only figures."""
    body = "\n".join(figure_html(figure, i) for i, figure in enumerate(figures))
    return whole_page(title, body, figures)
