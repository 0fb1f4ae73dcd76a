"""Visible text and shades for tokens, the same in the terminal, in notebooks and on pages.

Text from a vocabulary may contain line breaks, terminal escape codes or marks that reverse the
writing direction. Such characters are displayed as signs, never passed on.
"""

import unicodedata

STRONGEST = "#f06543"
"""The shade of the token with the most attention."""


def mix_with_white(colour: str, white: float) -> str:
    """A colour mixed with a share of white, 0 to 1."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + white * (255 - part)):02x}" for part in parts)


def visible_text(token: str) -> str:
    """The text of a token with signs for invisible characters; line breaks are kept."""
    # Inside a token, a joiner combines two characters into one (emoji families, Indic letters).
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
    # Invisible controls, direction marks and private-use characters, by their code point.
    return f"‹{ord(letter):x}›" if unicodedata.category(letter).startswith("C") else letter
