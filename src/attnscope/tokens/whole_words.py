"""Finds whole words in a text, and the tokens that contain them."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import regex
from numpy.typing import NDArray

# A letter or digit of a script that separates words by spaces; other scripts have no word edges.
_IN_A_WORD = r"[\w--[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]"
NOT_TEXT = b"\x00"
"""Stands for a special token: no word contains it, and a word may begin or end beside it."""


class WholeWords:
    """Words to find: "know" does not contain "now". A word may have several parts ("do not")."""

    def __init__(self, words: Sequence[str], *, ignore_case: bool = False):
        """Of words that begin at the same place, the longest is found. With `ignore_case`, any
        whitespace may separate the parts of a word."""
        longest_first = sorted(filter(None, words), key=len, reverse=True)
        pattern = "|".join(_bounded(word, any_space=ignore_case) for word in longest_first)
        self._pattern = regex.compile(
            pattern or r"(?!)", regex.V1 | (regex.I | regex.F if ignore_case else 0)
        )

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Start and end of every place that has one of the words."""
        return [match.span() for match in self._pattern.finditer(text, overlapped=True)]

    def in_tokens(self, pieces: Sequence[bytes]) -> NDArray[np.bool_]:
        """[tokens] True for tokens with at least one byte of a word; `pieces` are their bytes."""
        # A byte that is not part of a complete character becomes one surrogate, so bytes count.
        text = b"".join(pieces).decode(errors="surrogateescape")
        ends = np.cumsum([0, *map(len, pieces)])
        marked = np.zeros(len(pieces), dtype=bool)
        spans = self.spans(text)
        if spans:
            byte_of = _byte_offsets(text)
            for start, end in spans:
                marked |= (ends[:-1] < byte_of[end]) & (ends[1:] > byte_of[start])
        return marked


def _bounded(word: str, *, any_space: bool) -> str:
    """The pattern of one word, with its edges."""
    before, after = (
        f"(?{side}{_IN_A_WORD})" if regex.match(_IN_A_WORD, edge, regex.V1) else ""
        for side, edge in (("<!", word[0]), ("!", word[-1]))
    )
    parts = word.split() if any_space and not word.isspace() else [word]
    return before + r"\s+".join(map(regex.escape, parts)) + after


def _byte_offsets(text: str) -> Sequence[int]:
    """The byte at which each character begins, and the number of bytes."""
    if text.isascii():
        return range(len(text) + 1)
    sizes = (1 if "\udc80" <= c <= "\udcff" else len(c.encode()) for c in text)
    return [0, *accumulate(sizes)]
