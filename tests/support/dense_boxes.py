"""Pointing and ratio of a square of image tokens, one cell after the other."""

from typing import Any


def expected(weights: Any, box: list[float], side: int) -> tuple[list[float], list[float]]:
    """Of weights [heads, side²]: whether the largest cell lies in the box, and the share of the
    weights in the box over its area."""
    pointing, ratios = [], []
    for head in weights:
        best = int(head.argmax())
        x, y = (best % side + 0.5) / side, (best // side + 0.5) / side
        pointing.append(float(box[0] <= x <= box[2] and box[1] <= y <= box[3]))
        inside = 0.0
        for token, weight in enumerate(head):
            left, top = token % side / side, token // side / side
            wide = max(0.0, min(left + 1 / side, box[2]) - max(left, box[0]))
            high = max(0.0, min(top + 1 / side, box[3]) - max(top, box[1]))
            inside += weight * wide * high * side**2
        ratios.append(inside / head.sum() / ((box[2] - box[0]) * (box[3] - box[1])))
    return pointing, ratios
