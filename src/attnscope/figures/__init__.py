"""Draws figures from the tables of a run: a chart with its data, caption and description.

Every figure is declared in a file of its own, which `registry` finds. This package reads tables
and never loads a model. Each name is imported from its module on first use, so that importing the
package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnscope.figures.drawing import Drawing
    from attnscope.figures.export import save
    from attnscope.figures.figure import Figure
    from attnscope.figures.registry import FIGURES, draw, drawable, figure_named
    from attnscope.figures.theme import PUBLISHED, SAFE, THEMES, Style, Theme

__all__ = [
    "FIGURES",
    "PUBLISHED",
    "SAFE",
    "THEMES",
    "Drawing",
    "Figure",
    "Style",
    "Theme",
    "draw",
    "drawable",
    "figure_named",
    "save",
]

_HOME = {
    "Drawing": "drawing",
    "Figure": "figure",
    **dict.fromkeys(["FIGURES", "draw", "drawable", "figure_named"], "registry"),
    **dict.fromkeys(["PUBLISHED", "SAFE", "THEMES", "Style", "Theme"], "theme"),
    "save": "export",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'attnscope.figures' has no attribute {name!r}")
    return getattr(import_module(f"attnscope.figures.{_HOME[name]}"), name)
