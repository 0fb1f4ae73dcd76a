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

__all__ = ["NO_CLASS", "class_colours", "full_colour", "shades", "visible_text"]

# Light enough for black text, and apart from each other also for the colour-blind where it
# matters most: hash, star and whitespace are what the published figures compare.
_PALETTE = (
    "#f4a582",
    "#92c5de",
    "#fee391",
    "#d9d9d9",
    "#bdbdbd",
    "#b8e186",
    "#f1b6da",
    "#c2a5cf",
    "#dfc27d",
    "#e6f5d0",
    "#80cdc1",
    "#f7f7f7",
)
NO_CLASS = "#ffffff"


def class_colours(look: Look) -> dict[str | None, str]:
    """A colour for each class of the set, the same for every text."""
    colours: dict[str | None, str] = {
        name: _PALETTE[n % len(_PALETTE)] for n, name in enumerate(look.names)
    }
    return colours | {None: NO_CLASS}


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
    white, strong = np.array([255, 255, 255]), np.array([240, 101, 67])
    found = []
    for share, visible in zip(strength.tolist(), look.visible.tolist(), strict=True):
        red, green, blue = (white + share * (strong - white)).round().astype(int).tolist()
        found.append(f"#{red:02x}{green:02x}{blue:02x}" if visible else "#cccccc")
    return found


def visible_text(token: str) -> str:
    """A token's text with a visible sign for what cannot be seen; line breaks keep breaking."""
    return "".join(_visible(letter) for letter in token)


def _visible(letter: str) -> str:
    if letter == "\n":
        return "↵\n"
    if letter == "\t":
        return "→\t"
    if ord(letter) < 0x20:
        return chr(0x2400 + ord(letter))
    if letter == "\x7f":
        return "␡"
    # Unseen controls, directions and private signs; U+FFFD already stands for part of a character.
    return "\ufffd" if unicodedata.category(letter).startswith("C") else letter
