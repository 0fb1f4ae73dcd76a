"""Figures of a run by name: one, or all that it has the numbers for.

This module must not know any single figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError, InputError
from attnscope.figures.figure import Drawing
from attnscope.figures.figure import draw as draw_figure
from attnscope.figures.judged import Judged
from attnscope.figures.registry import FIGURES, figure_named
from attnscope.figures.theme import Theme

if TYPE_CHECKING:
    from attnscope.run.store import Run

__all__ = ["draw", "drawable"]


def draw(
    run: Run, name: str, *, theme: str | Theme = "published", dark: bool = False, **options: Any
) -> Drawing:
    """The figure `name` of a run.

    Options that all figures take: `models`, `layers`, `heads`, `conditions`, `prompts`, `queries`,
    `keys`, `classes`, `items` choose what is shown; `title`, `width`, `height`, `theme`
    ("published", "safe", or a `Theme`) and `dark` say how. A figure may have options of its own.
    """
    return draw_figure(run, figure_named(name), theme=theme, dark=dark, **options)


def drawable(
    run: Run, *, judged: Judged | None = None, **options: Any
) -> tuple[list[Drawing], dict[str, str]]:
    """Every figure that the run has the numbers for; and for each other one, why not."""
    judged = judged or Judged(run)
    drawn, missing = [], {}
    for name in FIGURES:
        try:
            drawn.append(draw_figure(run, figure_named(name), judged=judged, **options))
        except AttnscopeError as error:
            missing[name] = str(error)
    if not drawn:
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise InputError(f"this run has nothing to draw: {reasons}")
    return drawn, missing
