"""Formats numbers and names in the same way for captions, descriptions and tables."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import PurePath

DIGITS = 6
"""Significant digits of every number that a figure shows, in all of its formats."""

BUNDLED = "tiny model trained for this project, not the published one"
"""The note on every bundled model."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a formula in spreadsheet programs."""
# Whitespace that is invisible or breaks a line.
BLANKS = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})
# Characters with a meaning in Markdown or HTML. Between blanks, < and > are comparison signs.
_MARKS = str.maketrans({c: "\\" + c for c in "\\`*_[]#|~"} | {"&": "&amp;"})
_TAGS = re.compile("(?<! )[<>]|[<>](?! )")


def number(value: object) -> str:
    """A number as in the data, which are already rounded; — if it is not defined."""
    if value is None:
        return "—"
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    return str(value)


def visible(value: object) -> str:
    """A value as one line of text with visible whitespace."""
    return number(value).translate(BLANKS)


def inline(value: object) -> str:
    """A value escaped for a line of Markdown."""
    marked = visible(value).translate(_MARKS)
    return _TAGS.sub(lambda match: "&lt;" if match[0] == "<" else "&gt;", marked)


def join(parts: Sequence[str], last: str = "and", separator: str = ", ") -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{separator.join(parts[:-1])} {last} {parts[-1]}"


def upper_first(text: str) -> str:
    """The text with a capital first letter; symbols such as λ stay."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def lower_first(text: str) -> str:
    """The text with a small first letter; names such as MLP stay."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def count(number_of: int, thing: str) -> str:
    """`1 prompt`, `64 prompts`."""
    return f"{number_of:,} {thing}{'' if number_of == 1 else 's'}"


def wrap(text: str, pixels: float, size: float) -> list[str]:
    """Lines of at most `pixels`, for a proportional font of `size`; long words are broken."""
    width = max(12, int(pixels / (size * 0.485)))
    # `n = 12` and `q < 0.05` stay together.
    kept = re.sub(r"\b([nqλ]) ([=<]) (?=\S)", "\\1\u00a0\\2\u00a0", text)
    # Names are broken at their hyphens only if they would not fit into a line at all.
    long = any(len(word) > width for word in kept.split())
    return textwrap.wrap(kept, width, break_long_words=True, break_on_hyphens=long) or [""]


def no_formula(text: str) -> str:
    """A text for a CSV file: a spreadsheet program does not read it as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def model_name(name: object) -> str:
    """The name of a model; of a folder or file with an absolute path, only its own name."""
    path = PurePath(str(name))
    return path.name if path.is_absolute() else str(name)
