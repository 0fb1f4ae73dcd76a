"""Lists every figure by name for the command line, the report and the documentation.

A new figure is one file that declares `FIGURE`, and one line here. A file is imported when its
figure is drawn, so that listing the names is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError, InputError, unknown

if TYPE_CHECKING:
    from attnscope.figures.figure import Drawing, Figure
    from attnscope.figures.theme import Theme
    from attnscope.figures.verdict_cache import VerdictCache
    from attnscope.run.store import Run

FIGURES: Mapping[str, str] = {
    "token-types": "token_types",
    "filler-profile": "filler_profile",
    "filler-vs-sentence": "filler_vs_sentence",
    "effect-heads": "effect_heads",
    "head-map": "head_map",
    "head-strip": "head_strip",
    "classes": "classes",
    "lift": "lift",
    "lambda": "lambda_heads",
    "lambda-length": "lambda_length",
    "flow": "flow",
    "depth": "depth",
    "steps": "steps",
    "by-query": "by_query",
    "order": "order",
    "needle-map": "needle_map",
    "activations": "activations",
    "near-zero": "near_zero",
    "variance": "variance",
    "text": "text",
    "sensitivity": "sensitivity",
}
"""Name of a figure → name of the file that declares it."""


def figure_named(name: str) -> Figure[Any]:
    """The declaration of a figure."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    figure: Figure[Any] = import_module(f"attnscope.figures.{FIGURES[name]}").FIGURE
    return figure


def draw(
    run: Run, name: str, *, theme: str | Theme = "published", dark: bool = False, **options: Any
) -> Drawing:
    """The figure `name` of a run.

    Options that all figures take: `models`, `layers`, `heads`, `conditions`, `prompts`, `queries`,
    `keys`, `classes`, `items` choose what is shown. `cluster` and `strata` are columns of prompt
    metadata; intervals and tests resample by them (as in `stats.paired.compare`). `title`,
    `width`, `height`, `theme` ("published", "safe", or a `Theme`) and `dark` set the layout. A
    figure may have further options.
    """
    from attnscope.figures.figure import draw as draw_figure

    return draw_figure(run, figure_named(name), theme=theme, dark=dark, **options)


def drawable(
    run: Run, *, verdict_cache: VerdictCache | None = None, **options: Any
) -> tuple[list[Drawing], dict[str, str]]:
    """Every figure that the run has numbers for, and the reason for each other one."""
    from attnscope.figures.figure import draw as draw_figure
    from attnscope.figures.verdict_cache import VerdictCache

    units = {name: options[name] for name in ("cluster", "strata") if name in options}
    verdict_cache = verdict_cache or VerdictCache(run, **units)
    drawn, missing = [], {}
    for name in FIGURES:
        try:
            drawn.append(
                draw_figure(run, figure_named(name), verdict_cache=verdict_cache, **options)
            )
        except AttnscopeError as error:
            missing[name] = str(error)
    if not drawn:
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise InputError(
            f"no figure can be drawn from this run: {reasons}",
            code="nothing-to-draw",
            missing=list(missing),
        )
    return drawn, missing


def table() -> str:
    """The table of docs/figures.md: all figures, what they show, their options."""
    rows = ["| name | shows | further options |", "| --- | --- | --- |"]
    for figure in map(figure_named, FIGURES):
        options = " · ".join(option.help for option in figure.options.values())
        rows.append(f"| `{figure.name}` | {figure.shows} | {options} |")
    return "\n".join(rows)
