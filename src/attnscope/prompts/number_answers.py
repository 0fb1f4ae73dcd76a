"""Whether a completion has the right number, which is read from the text and compared."""

import re
from fractions import Fraction

# Digits, with commas or without, then decimals and an exponent: 12, 1,200, 12.50, .5, 1.2e1.
_UNSIGNED = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,2}(?![0-9]))?"
)
# A minus after a letter, a digit or a bracket is an operator: 24-12 has no negative number.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w).])[-\u2212])?[$€£]?(?P<late_sign>[-\u2212](?<=[$€£].))?"
    rf"(?:(?P<integer>[0-9]+)\s+(?=[0-9]+/[0-9]))?(?P<top>{_UNSIGNED})"
    rf"(?:\s*/\s*(?P<bottom>{_UNSIGNED}))?"
)
_NAMED = re.compile(r"[Tt]he answer is:?[\s*]*(?=[-\u2212$€£.0-9])")


def same_number(answer: str, completion: str) -> bool:
    """Whether the number after "The answer is", or the last number, has the right value."""
    named = _NAMED.search(completion)
    number = _NUMBER.match(completion, named.end()) if named else None
    numbers = [number] if number else list(_NUMBER.finditer(completion))
    return bool(numbers) and _value(numbers[-1]) == Fraction(answer)


def _value(number: re.Match[str]) -> Fraction | None:
    """The exact value; None for a division by 0, and for more than 100 digits."""
    parts = [(number[name] or "").replace(",", "") for name in ("integer", "top", "bottom")]
    if max(map(len, parts)) > 100:
        return None
    integer, top, bottom = (
        Fraction(part or default) for part, default in zip(parts, "001", strict=True)
    )
    if not bottom:
        return None
    value = integer + top / bottom
    return -value if number["sign"] or number["late_sign"] else value
