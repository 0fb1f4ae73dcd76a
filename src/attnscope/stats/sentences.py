"""Writes claims and results as sentences: generated from the line, so that they cannot differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields

from attnscope.run.tables import ranges
from attnscope.spec.claims import Claim, Line, Quantity
from attnscope.stats.outcome import CANNOT_TELL, COUNTS, Result, none_of, word_of


def claim_sentence(claim: Claim, layer: int | None = None) -> str:
    """The claim in words: one sentence with all of its lines."""
    text = "; ".join(_line(line) for line in claim.lines)
    return f"{'' if layer is None else f'In layer {layer}, '}{text}."


def _line(line: Line) -> str:
    """One line in words."""
    subject = _quantity(line.left)
    other = "" if line.right is None else _other(line.left, line.right)
    units = f", with each {line.cluster} as one unit" if line.cluster else ""
    return f"{subject} is {_limit(line, other)}{_scope(line)}{units}"


def _limit(line: Line, other: str) -> str:
    if line.bounds is not None:
        low, high = (f"{end:g}" for end in line.bounds)
        return f"{low} to {high} times {other}" if other else f"between {low} and {high}"
    words = {"more": ("at least", "above"), "less": ("at most", "below")}[line.relation]
    word = words[line.strict]
    if not other:
        return f"{word} {line.offset:g}"
    factor = "" if line.factor == 1 else f"{line.factor:g} times "
    offset = f" {'plus' if line.offset > 0 else 'minus'} {abs(line.offset):g}"
    return f"{word} {factor}{other}{offset if line.offset else ''}"


def _scope(line: Line) -> str:
    scope, layers = line.scope, ""
    if scope.layers is not None:
        many = "s" if len(scope.layers) > 1 else ""
        layers = f"layer{many} {ranges(scope.layers, 3)}"
    if scope.kind in ("mean", "each"):
        return f" in {layers}" if layers and scope.kind == "mean" else ""
    least = f"at least {scope.least}" if isinstance(scope.least, int) else scope.least
    kind = scope.kind[:-1] if scope.least in (1, "every") else scope.kind
    return f" in {least} {kind}{f' of {layers}' if layers else ''}"


def _quantity(quantity: Quantity) -> str:
    words = [quantity.measure]
    if quantity.scale != "mass":
        words.append(f"({quantity.scale})")
    words += [f"of {'+'.join(quantity.cls)}"] if quantity.cls else []
    words += [f"to {quantity.to}"] if quantity.to else []
    words += [f"on {quantity.keys}"] if quantity.keys != "all" else []
    words += [f"from queries {quantity.queries}"] if quantity.queries != "all" else []
    words += [f"in layer {quantity.layer}"] if quantity.layer is not None else []
    words += [f"with {quantity.condition}"] if quantity.condition not in (None, "base") else []
    words += [f"of {quantity.model}"] if quantity.model else []
    return " ".join(words)


_PREPOSITIONS = {"model": "of", "condition": "with", "keys": "on", "cls": "of", "layer": "in layer"}


def _other(left: Quantity, right: Quantity) -> str:
    """The right side; "that of …" if it differs in one thing only."""
    names_of = [field.name for field in fields(Quantity)]
    differing = [name for name in names_of if getattr(left, name) != getattr(right, name)]
    if differing == ["measure"]:
        return right.measure
    if len(differing) != 1:
        return _quantity(right)
    (name,) = differing
    value = getattr(right, name)
    value = "+".join(value) if isinstance(value, tuple) else value
    return f"that {_PREPOSITIONS.get(name, f'from {name}')} {value}"


def result_sentence(line: Line, result: Result) -> str:
    """The numbers of a line: estimate, interval, what was needed, and n."""
    size = f"n = {result.n} prompts"
    if result.units != result.n:
        size += f" in {result.units} clusters"
    note = f", {result.note}" if result.note else ""
    if result.low is None or result.high is None or result.estimate is None:
        return f"{size}{note}"
    cells = cells_of(line, result)
    if result.kind not in COUNTS:
        interval = f"{cells['change']} [{cells['interval']}]"
        return f"{interval}, needed {cells['needed']}, {size}{note}"
    text = (
        f"{result.estimate:.0f} of {result.rows} {result.kind} beyond, shown in "
        f"{cells['interval']}, needed {cells['needed']}, {size}"
    )
    return "; ".join(filter(None, (text, heads_text(result)))) + note


def heads_text(result: Result) -> str:
    """The named heads or layers of a number of them: those that support it; if it is open, also
    those whose estimate is beyond."""
    low, beyond = int(result.low or 0), int(result.estimate or 0)
    parts = []
    for what, names, number in (
        ("supported by", result.heads[:low], low),
        ("beyond, but not shown:", result.heads[low:], beyond - low),
    ):
        if names:
            more = f" and {number - len(names)} more" if number > len(names) else ""
            kind = "heads " if result.kind == "heads" else ""
            parts.append(f"{what} {kind}{', '.join(names)}{more}")
    return "; ".join(parts)


def cells_of(line: Line, result: Result) -> dict[str, str]:
    """`before`, `after`, `change`, `interval`, `needed`, `p`: numbers to the precision of their
    interval; a ratio as a change in per cent. The ends are rounded outwards, to as many decimals
    as the word needs to follow from them."""
    percent, sign = result.kind == "ratio", "+" if result.kind in ("ratio", "difference") else ""

    def shown(value: float) -> float:
        return 100 * (value - 1) if percent else value

    unit = " %" if percent else ""
    values = [float(f"{shown(x):.9g}") for x in result.needed]
    limits = " to ".join(f"{x:{sign}.9g}" if x else "0" for x in values)
    at_least = line.relation == "more" or result.kind in COUNTS
    relation = "" if len(values) == 2 else "≥ " if at_least else "≤ "
    cells = dict.fromkeys(("before", "after", "change", "interval", "p"), "–")
    cells["needed"] = f"{relation}{limits}{unit}"
    digits = decimals(None if result.estimate is None else abs(shown(result.estimate)) / 10)
    spread = None if result.after is None else abs(result.after) / 50
    if result.low is not None and result.high is not None:
        low, high, digits = _ends(line, result, shown(result.low), shown(result.high), values)
        ends = ("no limit" if math.isinf(end) else f"{end:{sign}.{digits}f}" for end in (low, high))
        cells["interval"] = f"{' … '.join(ends)}{unit}"
        if math.isfinite(high - low):
            spread = (high - low) * (abs(result.before or 0) / 100 if percent else 1)
    if result.estimate is not None:
        change = round(shown(result.estimate), digits) + 0.0  # no minus before a 0
        cells["change"] = f"{change:{sign}.{digits}f}{unit}"
    for name, value in (("before", result.before), ("after", result.after)):
        if value is not None:
            cells[name] = f"{value:.{decimals(spread)}f}"
    if result.p is not None:
        cells["p"] = "<.001" if result.p < 0.001 else f"{result.p:.3f}"
    return cells


def _ends(
    line: Line, result: Result, low: float, high: float, needed: list[float]
) -> tuple[float, float, int]:
    """The printed ends of an interval, and their decimals."""
    if result.kind in COUNTS:
        return low, high, 0
    none = None if none_of(line, result.kind) is None else 0.0  # as printed
    width = high - low
    if math.isinf(width):
        width = max((abs(end) for end in (low, high) if math.isfinite(end)), default=1.0)
    least = decimals(width)
    for digits in range(least, least + 9):
        ends = outwards(low, high, digits)
        if result.word == CANNOT_TELL or word_of(line, *ends, tuple(needed), none) == result.word:
            break
    return *ends, digits


def outwards(low: float, high: float, digits: int) -> tuple[float, float]:
    """The ends of an interval with so many decimals, rounded away from its middle."""

    def rounded(value: float, away: Callable[[float], int]) -> float:
        scaled = value * 10**digits
        if math.isinf(scaled):
            return value
        near = round(scaled)
        exact = abs(scaled - near) <= 1e-9 * max(1.0, abs(scaled))
        return float((near if exact else away(scaled)) / 10**digits + 0.0)

    return rounded(low, math.floor), rounded(high, math.ceil)


def decimals(width: float | None) -> int:
    """Decimals that show two digits of a width."""
    if width is None or not width > 0 or math.isinf(width):
        return 3
    return max(0, min(9, 1 - math.floor(math.log10(width))))
