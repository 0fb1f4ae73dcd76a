"""Finds figures by name for the command line, the report and the documentation.

A figure is a file in `declarations`, or in `tables` if it is drawn from a table that no run holds.
The file declares `FIGURE` and has the figure's name, with underscores. It is imported when its
figure is drawn, so that listing the names is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError, InputError, unknown
from attnscope.recipes import RECIPES

if TYPE_CHECKING:
    from polars import DataFrame

    from attnscope.figures.drawing import Drawing
    from attnscope.figures.figure import Figure
    from attnscope.figures.theme import Theme
    from attnscope.figures.verdict_cache import VerdictCache
    from attnscope.run.store import Run


def _modules(folder: str) -> dict[str, str]:
    """Name of a figure → its module. A trailing underscore keeps a file apart from a keyword."""
    files = iter_modules([str(Path(__file__).parent / folder)])
    return {
        file.name.rstrip("_").replace("_", "-"): f"attnscope.figures.{folder}.{file.name}"
        for file in files
    }


FIGURES: Mapping[str, str] = _modules("declarations")
"""The figures of runs."""
TABLE_FIGURES: Mapping[str, str] = _modules("tables")
"""The figures of tables that no run holds."""


def figure_named(name: str) -> Figure:
    """The declaration of a figure."""
    modules = {**FIGURES, **TABLE_FIGURES}
    if name not in modules:
        raise unknown("figure", name, FIGURES)
    figure: Figure = import_module(modules[name]).FIGURE
    return figure


def draw(
    run: Run, name: str, *, theme: str | Theme = "published", dark: bool = False, **options: Any
) -> Drawing:
    """The figure `name` of a run.

    Options that all figures take: `models`, `layers`, `heads`, `conditions`, `prompts`, `queries`,
    `keys`, `classes`, `items` choose what is shown. `cluster` and `strata` are columns of prompt
    metadata; intervals and tests resample by them (as in `stats.paired.compare`). `title`,
    `width`, `height`, `theme` ("published", "safe", or a `Theme`) and `dark` set the layout. A
    figure may have further options. For the run of a recipe, options that are not given are those
    of the recipe.
    """
    from attnscope.figures.drawing import draw as draw_figure

    figure, options = figure_named(name), {"theme": theme, "dark": dark, **options}
    recipe = RECIPES.get(run.experiment.name)
    published = {} if recipe is None else recipe.figures.get(name, {})
    try:
        return draw_figure(run, figure, **{**published, **options})
    except AttnscopeError:
        if not published:
            raise
        # The experiment has the name of the recipe, and other keys.
        return draw_figure(run, figure, **options)


def draw_table(name: str, table: DataFrame, **words: Any) -> Drawing:
    """The figure `name` of a table that no run holds, such as scores under conditions."""
    from attnscope.figures.drawing import draw_table as draw_figure

    return draw_figure(figure_named(name), table, **words)


def drawable(
    run: Run,
    *,
    verdict_cache: VerdictCache | None = None,
    drawn: Mapping[str, Drawing] | None = None,
    **options: Any,
) -> tuple[list[Drawing], dict[str, str]]:
    """Every figure that the run has numbers for, and the reason for each other one. Those in
    `drawn`, by name, are not drawn again. The figures of a recipe come first, then bars, lines,
    dots, matrices and texts."""
    from attnscope.figures.verdict_cache import VerdictCache

    units = {name: options[name] for name in ("cluster", "strata") if name in options}
    verdict_cache = verdict_cache or VerdictCache(run, **units)
    figures, missing = dict(drawn or {}), {}
    for name in FIGURES:
        try:
            if name not in figures:
                figures[name] = draw(run, name, verdict_cache=verdict_cache, **options)
        except AttnscopeError as error:
            missing[name] = str(error)
    if not figures:
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise InputError(
            f"no figure can be drawn from this run: {reasons}",
            code="nothing-to-draw",
            missing=list(missing),
        )
    recipe = RECIPES.get(run.experiment.name)
    first = [] if recipe is None else list(recipe.figures)
    order = {name: rank for rank, name in enumerate(first)}
    return sorted(figures.values(), key=lambda f: (order.get(f.name, 99), f.rank, f.name)), missing


def table() -> str:
    """The tables of the page of figures: all figures, what they show, their options."""
    rows = ["| name | shows | further options |", "| --- | --- | --- |"]
    helps: dict[str, dict[str, list[str]]] = {}
    for figure in map(figure_named, FIGURES):
        options = ", ".join(f"`{name}`" for name in figure.options)
        rows.append(f"| `{figure.name}` | {figure.shows} | {options} |")
        for name, option in figure.options.items():
            helps.setdefault(name, {}).setdefault(option.help, []).append(figure.name)
    rows += ["", "| option | values |", "| --- | --- |"]
    for name, meanings in sorted(helps.items()):
        common = max(meanings, key=lambda text: len(meanings[text]))
        others = (
            f"; of {', '.join(f'`{figure}`' for figure in meanings[text])}: {text}"
            for text in meanings
            if text != common
        )
        rows.append(f"| `{name}` | {common}{''.join(others)} |")
    return "\n".join(rows)
