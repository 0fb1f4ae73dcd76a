"""Colours and visible text, the same in the terminal and in HTML.

Text from a model's vocabulary may hold anything: line breaks, terminal escape codes, marks that
turn the writing direction around. It is shown, never obeyed.

This module must not know where the colours are put.
"""

from __future__ import annotations

import unicodedata

import numpy as np
from numpy.typing import NDArray

from attnscope.look.measure import Look
from attnscope.tokens.colours import class_colours

NO_CLASS = "#ffffff"
# How much white there is in a token's colour: black text stands on it.
TINT = 0.55
STRONGEST, UNSEEN = "#f06543", "#cccccc"


def back_colours(look: Look) -> dict[str | None, str]:
    """A background for each class of the set, the same for every text."""
    tints = [_mixed(colour, TINT) for colour in class_colours(look.names)]
    return {**dict(zip(look.names, tints, strict=True)), None: NO_CLASS}


def _mixed(colour: str, white: float) -> str:
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + white * (255 - part)):02x}" for part in parts)


def full_colour(look: Look) -> float:
    """The weight that gets the strongest shade: the largest, the first token's aside.

    The first token soaks up so much attention in many models that nothing else would show.
    """
    others = look.weights[1:] if len(look.weights) > 1 else look.weights
    return float(others.max())


def shades(look: Look) -> list[str]:
    """White to orange-red by attention received; grey where nobody could look."""
    full = full_colour(look)
    strength: NDArray[np.float64] = np.clip(look.weights / full if full > 0 else 0, 0, 1)
    return [
        _mixed(STRONGEST, 1 - share) if visible else UNSEEN
        for share, visible in zip(strength.tolist(), look.visible.tolist(), strict=True)
    ]


def visible_text(token: str) -> str:
    """A token's text with a visible sign for what cannot be seen; line breaks keep breaking."""
    # Inside a token, a joiner makes one sign of two (families of emoji, Indic letters).
    inside = token[1:-1]
    return "".join(
        letter if letter in _JOINERS and letter in inside else _visible(letter) for letter in token
    )


_JOINERS = ("\u200c", "\u200d")


def _visible(letter: str) -> str:
    if letter == "\n":
        return "↵\n"
    if letter == "\t":
        return "→\t"
    if ord(letter) < 0x20:
        return chr(0x2400 + ord(letter))
    if letter == "\x7f":
        return "␡"
    # Unseen controls, directions and private signs, by their number.
    return f"‹{ord(letter):x}›" if unicodedata.category(letter).startswith("C") else letter
