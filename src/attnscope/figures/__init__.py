"""Figures that travel with their numbers: DataFrame in, chart out, with data and description.

Right of the wall: reads tables, never loads a model.
"""

from attnscope.figures.classes import classes
from attnscope.figures.depth import depth
from attnscope.figures.draw import FIGURES, draw, drawable
from attnscope.figures.effect_heads import effect_heads
from attnscope.figures.export import save
from attnscope.figures.figure import Figure
from attnscope.figures.filler_profile import filler_profile
from attnscope.figures.filler_vs_sentence import filler_vs_sentence
from attnscope.figures.flow import flow
from attnscope.figures.lambda_heads import lambda_heads
from attnscope.figures.lambda_length import lambda_length
from attnscope.figures.lift import lift
from attnscope.figures.sensitivity import sensitivity
from attnscope.figures.text import text
from attnscope.figures.theme import PUBLISHED, SAFE, THEMES, Theme
from attnscope.figures.token_types import token_types

__all__ = [
    "FIGURES",
    "PUBLISHED",
    "SAFE",
    "THEMES",
    "Figure",
    "Theme",
    "classes",
    "depth",
    "draw",
    "drawable",
    "effect_heads",
    "filler_profile",
    "filler_vs_sentence",
    "flow",
    "lambda_heads",
    "lambda_length",
    "lift",
    "save",
    "sensitivity",
    "text",
    "token_types",
]
