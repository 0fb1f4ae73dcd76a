"""Figures that travel with their numbers: DataFrame in, chart out, with data and description.

Right of the wall: reads tables, never loads a model.
"""

from attnscope.figures.draw import FIGURES, draw, drawable
from attnscope.figures.export import save
from attnscope.figures.figure import Figure
from attnscope.figures.theme import PUBLISHED, SAFE, THEMES, Theme
from attnscope.figures.token_types import token_types

__all__ = [
    "FIGURES",
    "PUBLISHED",
    "SAFE",
    "THEMES",
    "Figure",
    "Theme",
    "draw",
    "drawable",
    "save",
    "token_types",
]
