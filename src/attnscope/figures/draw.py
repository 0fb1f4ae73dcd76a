"""Figures by name: what a run can show, and how a figure of it is made.

A new figure is one file and one line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from attnscope.errors import AttnscopeError, InputError, unknown
from attnscope.figures.choice import Choice
from attnscope.figures.claims import claims_of
from attnscope.figures.classes import draw as _classes
from attnscope.figures.depth import draw as _depth
from attnscope.figures.effect_heads import draw as _effect_heads
from attnscope.figures.figure import Figure, Run
from attnscope.figures.filler_profile import draw as _filler_profile
from attnscope.figures.filler_vs_sentence import draw as _filler_vs_sentence
from attnscope.figures.flow import draw as _flow
from attnscope.figures.lambda_heads import draw as _lambda_heads
from attnscope.figures.lambda_length import draw as _lambda_length
from attnscope.figures.lift import draw as _lift
from attnscope.figures.sensitivity import draw as _sensitivity
from attnscope.figures.style import Style
from attnscope.figures.text import draw as _text
from attnscope.figures.theme import Theme, theme_named
from attnscope.figures.token_types import draw as _token_types

__all__ = ["FIGURES", "draw", "drawable"]

FIGURES: Mapping[str, Callable[..., Figure]] = {
    "token-types": _token_types,
    "filler-profile": _filler_profile,
    "filler-vs-sentence": _filler_vs_sentence,
    "effect-heads": _effect_heads,
    "classes": _classes,
    "lift": _lift,
    "lambda": _lambda_heads,
    "lambda-length": _lambda_length,
    "flow": _flow,
    "depth": _depth,
    "text": _text,
    "sensitivity": _sensitivity,
}
"""Every figure, by its name."""


def draw(
    run: Run, name: str, *, theme: str | Theme = "published", dark: bool = False, **options: Any
) -> Figure:
    """The figure `name` of a run.

    Options that all figures take: `models`, `layers`, `heads`, `conditions`, `prompts`, `queries`,
    `keys`, `classes`, `items` choose what is shown; `title`, `width`, `height`, `theme`
    ("published", "safe", or a `Theme`) and `dark` say how. A figure may have options of its own.
    """
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    make = FIGURES[name]
    chosen = {f.name for f in fields(Choice)}
    looks = {"title", "width", "height"}
    own = [p for p in inspect.signature(make).parameters if p not in ("run", "choice", "style")]
    for option in options:
        if option not in chosen | looks | set(own):
            known = [*own, *sorted(chosen), *sorted(looks), "theme", "dark"]
            raise unknown(f"option of {name}", option, known)
    figure = make(
        run,
        Choice(**{k: v for k, v in options.items() if k in chosen}),
        Style(
            theme=theme_named(theme, dark=dark),
            **{k: v for k, v in options.items() if k in looks},
        ),
        **{k: v for k, v in options.items() if k in own},
    )
    judged = claims_of(run, name)
    text = figure.description.replace("### Every value", f"{judged}### Every value", 1)
    return replace(figure, description=text)


def drawable(run: Run, **options: Any) -> tuple[list[Figure], dict[str, str]]:
    """Every figure that the run has the numbers for; and for each other one, why not."""
    drawn, missing = [], {}
    for name in FIGURES:
        try:
            drawn.append(draw(run, name, **options))
        except AttnscopeError as error:
            missing[name] = str(error)
    if not drawn:
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise InputError(f"this run has nothing to draw: {reasons}")
    return drawn, missing
