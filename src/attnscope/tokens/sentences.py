"""Sentences of a text: where each one ends, and which sentence a token belongs to."""

import re

import numpy as np
from numpy.typing import NDArray

FEWEST = 10
"""Shorter pieces, such as `1.` or `e.g.`, belong to the sentence after them."""
_END = re.compile(r"[.!?][\"')\]}*]*\s+|\n\s*\n")


def sentence_ends(text: str) -> list[int]:
    """The end of each sentence, in characters; the last is the length of the text.

    A sentence ends after `.`, `!` or `?` with whitespace behind it, and at an empty line. It
    includes that whitespace.
    """
    ends: list[int] = []
    start = 0
    for match in _END.finditer(text):
        if len(text[start : match.end()].strip()) >= FEWEST:
            ends.append(match.end())
            start = match.end()
    if start < len(text):
        if text[start:].strip() or not ends:
            ends.append(len(text))
        else:
            ends[-1] = len(text)
    return ends


def sentences_of_tokens(text: str, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """[K]: the number of the sentence, from 0, of the first letter of each token; -1 for a token
    without text. `offsets` [K, 2] are the characters of the tokens."""
    ends = np.array(sentence_ends(text), dtype=np.int64)
    numbers = np.full(len(offsets), -1, dtype=np.int64)
    for n, (first, last) in enumerate(offsets):
        if last > first:
            token = text[first:last]
            indent = len(token) - len(token.lstrip())
            letter = first + (indent if indent < len(token) else 0)
            numbers[n] = np.searchsorted(ends, letter, side="right")
    return numbers
