"""Figures on an HTML page that needs nothing else: scripts, data and styles inside one file.

The scripts come from vl-convert, so no address is ever asked. Everything that came from a prompt
or a model is escaped, in text and in scripts. This module must not know any single figure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from typing import Any

import vl_convert

from attnscope.figures.blocks import as_html
from attnscope.figures.figure import Drawing

SORTABLE = "sortable"
"""The kind of table that a page's reader can sort and filter."""

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --faint: #5f6368; --paper: #ffffff;
  --line: #dfe2e6; --card: #f7f8fa; --accent: #1558b0; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --faint: #a8adb4; --paper: #16191d;
  --line: #3a3f46; --card: #1e2227; --accent: #8ab4f8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 66rem; background: var(--paper);
  color: var(--ink);
  font: 16px/1.55 "Liberation Sans", Arial, Helvetica, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; border-bottom: 1px solid var(--line);
  padding-bottom: .25rem; }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
a { color: var(--accent); }
p, li { overflow-wrap: anywhere; }
figure { margin: 0 0 2.5rem; }
figcaption, .faint { color: var(--faint); font-size: .9rem; }
.chart { overflow-x: auto; max-width: 100%; }
.scroll { overflow: auto; max-height: 28rem; }
h4 { margin: 1rem 0 .25rem; }
.contents { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; list-style: none; }
table { border-collapse: collapse; font-size: .85rem; margin: .5rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: left;
  vertical-align: top; }
th { position: sticky; top: 0; background: var(--card); }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { background: var(--card); border: 1px solid var(--line); padding: .75rem; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.45 "DejaVu Sans Mono",
  "Liberation Mono", Menlo, Consolas, monospace; }
code { font-family: "DejaVu Sans Mono", "Liberation Mono", Menlo, Consolas, monospace;
  font-size: .9em; }
table.sortable th { cursor: pointer; white-space: nowrap; }
table.sortable td:last-child { min-width: 12rem; }
th[aria-sort="ascending"]::after { content: " ▲"; }
th[aria-sort="descending"]::after { content: " ▼"; }
.filter { font: inherit; font-size: .9rem; padding: .25rem .5rem; margin: .5rem .75rem 0 0;
  width: 22rem; max-width: 100%; color: inherit; background: var(--card);
  border: 1px solid var(--line); }
summary { cursor: pointer; color: var(--accent); }
.vega-embed, .vega-embed.has-actions { padding-right: 0; }
@media print {
  :root { --ink: #000; --faint: #333; --paper: #fff; --line: #bbb; --card: #fff; --accent: #000; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  table { font-size: 6.5pt; } th, td { padding: .1rem .25rem; } td.number { white-space: normal; }
  h2, h3 { break-after: avoid; } figure, tr { break-inside: avoid; }
  .scroll { max-height: none; overflow: visible; } .chart { overflow: visible; }
  .chart svg { max-width: 100%; height: auto; } details > summary { list-style: none; }
  .screen, details:not([open]) { display: none; }
}
"""

# No address may be asked, not even by accident.
POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    'img-src data:; font-src data:">'
)

# One chart, two configurations: the page takes the one that suits the reader's light or dark, and
# the light one for paper.
SCRIPT = """
(() => {
  const figures = JSON.parse(document.getElementById("specifications").textContent);
  const darkness = window.matchMedia("(prefers-color-scheme: dark)");
  const draw = (dark) => Promise.all(figures.map((figure, i) => {
    const spec = {...figure.spec, config: dark ? figure.dark : figure.light};
    return vegaEmbed(document.getElementById("chart-" + i), spec,
      {renderer: "svg", actions: false, mode: "vega-lite"});
  })).then(() => { document.documentElement.dataset.drawn = dark ? "dark" : "light"; });
  let queue = draw(darkness.matches);
  const again = (dark) => { queue = queue.then(() => draw(dark)); };
  darkness.addEventListener("change", () => again(darkness.matches));
  window.addEventListener("beforeprint", () => { if (darkness.matches) again(false); });
  window.addEventListener("afterprint", () => { if (darkness.matches) again(true); });
})();
"""


# Tables of the kind `sortable`: a click on a head sorts, words in the box keep the rows with all of
# them. Only text is read and rows are moved: nothing is ever made from it.
TABLES = """
(() => {
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    const rows = [...body.rows].map((row) => {
      const cells = [...row.cells].map((cell) => cell.textContent);
      return {row, cells, words: cells.join(" ").toLowerCase()};
    });
    const value = (text) => (text === "" || Number.isNaN(Number(text)) ? text : Number(text));
    const before = (a, b) => {
      if (a === "—" || b === "—") return (a === "—") - (b === "—");
      [a, b] = [value(a), value(b)];
      if (typeof a === "number" && typeof b === "number") return a - b;
      return String(a).localeCompare(String(b));
    };
    heads.forEach((head, i) => {
      head.tabIndex = 0;
      const sort = () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        rows.sort((a, b) => (down ? -1 : 1) * before(a.cells[i], b.cells[i]));
        body.append(...rows.map(({row}) => row));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    });
    const filter = document.createElement("input"), count = document.createElement("span");
    Object.assign(filter, {type: "search", className: "filter screen",
      placeholder: "only rows with these words"});
    filter.setAttribute("aria-label", filter.placeholder);
    count.className = "faint screen";
    const narrow = () => {
      const words = filter.value.toLowerCase().split(/\\s+/).filter(Boolean);
      rows.forEach(({row, words: text}) => { row.hidden = !words.every((w) => text.includes(w)); });
      count.textContent = `${rows.filter(({row}) => !row.hidden).length} of ${rows.length} rows`;
    };
    filter.addEventListener("input", narrow);
    narrow();
    if (rows.length > 8) table.parentElement.before(filter, count);
  }
})();
"""


def script_json(value: Any) -> str:
    """JSON that cannot end the script it stands in, whatever text is inside."""
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
    """A chart without its configuration and caption, which the page has itself."""
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
    """Place, caption and description of the chart with this number."""
    return (
        f'<figure id="figure-{escape(figure.name)}"><div class="chart" id="chart-{number}" '
        f'role="img" aria-label="{escape(figure.alt)}"></div>'
        f"<figcaption>{escape(figure.caption)}</figcaption>"
        f"<details><summary>Description of “{escape(figure.title)}”, with every value</summary>"
        f"{as_html(figure.sections)}</details></figure>"
    )


def whole_page(title: str, body: str, figures: Sequence[Drawing]) -> str:
    """A page that needs nothing else, with the scripts for its figures and tables."""
    tables = f"\n<script>{TABLES}</script>" if f'class="{SORTABLE}"' in body else ""
    charts = f"\n{charts_script(figures)}" if figures else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'{POLICY}<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}{charts}{tables}\n</body></html>\n"
    )


def page(figures: Sequence[Drawing], *, title: str) -> str:
    """A page with nothing but figures."""
    body = "\n".join(figure_html(figure, i) for i, figure in enumerate(figures))
    return whole_page(title, body, figures)
