"""Writes claims and results as sentences: generated from the line, so that they cannot differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields

from attnscope.spec.claims import Claim, Line, Quantity
from attnscope.stats.outcome import NAMED, Result

Names = Callable[[Quantity], tuple[str, str]]
"""From a quantity to the names of its model and condition."""


def claim_sentence(claim: Claim, names: Names, layer: int | None = None) -> str:
    """The claim in words: one sentence with all of its lines."""
    text = "; ".join(line_sentence(line, names) for line in claim.lines)
    return f"{'' if layer is None else f'In layer {layer}, '}{text}."


def line_sentence(line: Line, names: Names) -> str:
    """One line in words."""
    subject = _quantity(line.left, names)
    other = "" if line.right is None else _other(line.left, line.right, names)
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
    offset = (
        f" {'plus' if line.offset > 0 else 'minus'} {abs(line.offset):g}" if line.offset else ""
    )
    return f"{word} {factor}{other}{offset}"


def _scope(line: Line) -> str:
    scope = line.scope
    layers = ""
    if scope.layers is not None:
        many = "s" if len(scope.layers) > 1 else ""
        layers = f"layer{many} {', '.join(map(str, scope.layers))}"
    if scope.kind in ("mean", "each"):
        return f" in {layers}" if layers and scope.kind == "mean" else ""
    least = f"at least {scope.least}" if isinstance(scope.least, int) else scope.least
    one = scope.least in (1, "every")
    return (
        f" in {least} {scope.kind[:-1] if one else scope.kind}{f' of {layers}' if layers else ''}"
    )


def _quantity(quantity: Quantity, names: Names) -> str:
    model, condition = names(quantity)
    words = [quantity.measure]
    if quantity.scale != "mass":
        words.append(f"({quantity.scale})")
    words += [f"of {'+'.join(quantity.cls)}"] if quantity.cls else []
    words += [f"to {quantity.to}"] if quantity.to else []
    words += [f"on {quantity.keys}"] if quantity.keys != "all" else []
    words += [f"from queries {quantity.queries}"] if quantity.queries != "all" else []
    words += [f"in layer {quantity.layer}"] if quantity.layer is not None else []
    words += [f"with {condition}"] if condition not in ("", "base") else []
    words += [f"of {model}"] if model else []
    return " ".join(words)


_PREPOSITIONS = {"model": "of", "condition": "with", "keys": "on", "cls": "of", "layer": "in layer"}


def _other(left: Quantity, right: Quantity, names: Names) -> str:
    """The right side; "that of …" if it differs in one thing only."""
    differing = [
        field.name
        for field in fields(Quantity)
        if getattr(left, field.name) != getattr(right, field.name)
    ]
    if differing == ["measure"]:
        return right.measure
    if len(differing) != 1:
        return _quantity(right, names)
    (name,) = differing
    value = getattr(right, name)
    if name in ("model", "condition"):
        value = names(right)[0 if name == "model" else 1]
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
    text = f"{cells['change']} [{cells['interval']}], needed {cells['needed']}, {size}"
    if result.kind in ("heads", "layers"):
        text = (
            f"{result.estimate:.0f} of {result.rows} {result.kind} beyond, shown in "
            f"{cells['interval']}, needed {cells['needed']}, {size}"
        )
        if result.heads:
            more = f" and {result.low - NAMED:.0f} more" if result.low > NAMED else ""
            text += f"; {', '.join(result.heads)}{more}"
    return text + note


def cells_of(line: Line, result: Result) -> dict[str, str]:
    """`before`, `after`, `change`, `interval`, `needed`, `p`: numbers to the precision of their
    interval; a ratio as a change in per cent."""
    low, high = result.low, result.high
    percent = result.kind == "ratio"

    def shown(value: float | None) -> float | None:
        return None if value is None else 100 * (value - 1) if percent else value

    width = None if low is None or high is None else shown(high) - shown(low)  # type: ignore[operator]
    if width is not None and math.isinf(width):
        width = abs(100 * ((result.estimate or 0) - (low or 0)))
    digits = _digits(width or abs(shown(result.estimate) or 0.0) / 10)
    if result.kind in ("heads", "layers"):
        digits = 0
    sign = "" if result.kind in ("value", "heads", "layers") else "+"

    def number(value: float | None, places: int = digits) -> str:
        if value is None:
            return "–"
        return "no limit" if math.isinf(value) else f"{value:{sign}.{places}f}"

    relation = {"more": "≥ ", "less": "≤ ", "within": ""}[line.relation]
    relation = "≥ " if result.kind in ("heads", "layers") else relation
    needed = " to ".join(f"{shown(x):{sign}g}".replace("+0", "0") for x in result.needed)
    unit = " %" if percent else ""
    ends = "–" if low is None else f"{number(shown(low))} … {number(shown(high))}{unit}"
    outer = _digits(None if result.after is None else abs(result.after) / 50)
    return {
        "before": "–" if result.before is None else f"{result.before:.{outer}f}",
        "after": "–" if result.after is None else f"{result.after:.{outer}f}",
        "change": f"{number(shown(result.estimate))}{unit}",
        "interval": ends,
        "needed": f"{relation}{needed}{unit}",
        "p": "–" if result.p is None else "<.001" if result.p < 0.001 else f"{result.p:.3f}",
    }


def _digits(width: float | None) -> int:
    """Decimals that show two digits of a width."""
    if width is None or not width > 0 or math.isinf(width):
        return 3
    return max(0, min(6, 1 - math.floor(math.log10(width))))
