"""Tokens as text one can see, and shades to see them in, the same wherever they are shown.

Text from a model's vocabulary may hold anything: line breaks, terminal escape codes, marks that
turn the writing direction around. It is shown, never obeyed.

This module must not know where text and colours are put.
"""

import unicodedata

STRONGEST = "#f06543"
"""The shade of a token that is looked at most."""


def mixed(colour: str, white: float) -> str:
    """A colour with so much white in it, 0 to 1."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + white * (255 - part)):02x}" for part in parts)


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
