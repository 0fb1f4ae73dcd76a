"""The colours of tokens, the same in the terminal and in HTML."""

import numpy as np
from numpy.typing import NDArray

from attnscope.look.text_measures import Look
from attnscope.tokens.class_colours import class_colours
from attnscope.tokens.visible import STRONGEST, mix_with_white

NO_CLASS = "#ffffff"
# The share of white in a token's colour, so that black text is readable.
TINT = 0.55
UNSEEN = "#cccccc"


def back_colours(look: Look) -> dict[str | None, str]:
    """The background colour of each class, the same for every text."""
    tints = [mix_with_white(colour, TINT) for colour in class_colours(look.names)]
    return {**dict(zip(look.names, tints, strict=True)), None: NO_CLASS}


def full_colour(look: Look) -> float:
    """The weight of the strongest shade: the largest weight after the first token.

    In many models the first token receives so much attention that all others would look white.
    """
    others = look.weights[1:] if len(look.weights) > 1 else look.weights
    return float(others.max())


def shades(look: Look) -> list[str]:
    """White to orange-red by attention received; grey for tokens that no query can see."""
    full = full_colour(look)
    strength: NDArray[np.float64] = np.clip(look.weights / full if full > 0 else 0, 0, 1)
    return [
        mix_with_white(STRONGEST, 1 - share) if visible else UNSEEN
        for share, visible in zip(strength.tolist(), look.visible.tolist(), strict=True)
    ]
