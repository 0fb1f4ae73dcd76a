"""The colours of tokens, the same in the terminal and in HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.tokens.class_colours import class_colours
from attnscope.tokens.visible import STRONGEST, mix_with_white

if TYPE_CHECKING:
    from attnscope.look.text_measures import Look

NO_CLASS = "#ffffff"
# The share of white in a token's colour, so that black text is readable.
TINT = 0.55
UNSEEN = "#cccccc"


def back_colours(look: Look) -> dict[str | None, str]:
    """The background colour of each class, the same for every text."""
    tints = [mix_with_white(colour, TINT) for colour in class_colours(look.names)]
    return {**dict(zip(look.names, tints, strict=True)), None: NO_CLASS}


def full_weight(weights: NDArray[np.float64]) -> float:
    """The weight of the strongest shade: the largest weight after the first token.

    In many models the first token receives so much attention that all others would look white.
    """
    others = weights[1:] if len(weights) > 1 else weights
    return max(float(others.max(initial=0.0)), 1e-30)


def token_colours(look: Look) -> list[str]:
    """The background of each token: by its class, or from white to orange-red by the attention it
    receives, and grey if no query can see it."""
    if look.colour == "class":
        colours = back_colours(look)
        return [colours[c] for c in look.classes]
    strength = np.clip(look.weights / full_weight(look.weights), 0, 1)
    return [
        mix_with_white(STRONGEST, 1 - share) if visible else UNSEEN
        for share, visible in zip(strength.tolist(), look.visible.tolist(), strict=True)
    ]


def legend(look: Look) -> str:
    """The line below the text that explains the shades; empty for colours of classes."""
    if look.colour == "class":
        return ""
    return f"full colour: a weight of {full_weight(look.weights):.3g} or more"
