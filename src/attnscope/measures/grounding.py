"""Whether a head attends to the part of a picture that the question is about."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from attnscope.measures.layer import Array, Layer
from attnscope.measures.measure import POSITIVE, SHARE, Measure, Numbers
from attnscope.vision.image_tokens import ImageTokens
from attnscope.vision.views import Box

COLUMNS = {
    "pointing": "1 if the cell of the picture that gets the most attention lies in the box of what "
    "the question is about, else 0 (equal cells share it); `uniform`: the share of the cells that "
    "lie there",
    "box_ratio": "attention to the box over attention to the picture, divided by the share of the "
    "area that is in the box; 1 if every cell gets the same",
}


def pointed(cells: Array, inside: NDArray[np.bool_]) -> Array:
    """[H]: the share of the largest cells [H, rows, columns] that lie inside."""
    largest = cells == cells.max((-2, -1), keepdims=True)
    return np.asarray((largest & inside).sum((-2, -1)) / largest.sum((-2, -1)))


def ratio(cells: Array, cover: Array) -> Array:
    """[H]: the share of a map that is in a box, over that of its area; nan for an empty map."""
    total = cells.sum((-2, -1))
    part = np.divide((cells * cover).sum((-2, -1)), total, where=total > 0, out=total * np.nan)
    return np.asarray(part / cover.mean())


def cells_in(tokens: ImageTokens, box: Box) -> tuple[Array, NDArray[np.bool_]]:
    """[rows, columns] each: how much of a cell is in a box, and whether its middle is. The cell
    with the middle of the box always counts. All 0 if the box is outside the map."""
    rows, columns, (left, top, right, bottom) = tokens.grid
    across, x = _along(columns, left, right, box[0], box[2])
    down, y = _along(rows, top, bottom, box[1], box[3])
    return down[:, None] * across, y[:, None] & x


def _along(
    cells: int, start: float, end: float, low: float, high: float
) -> tuple[Array, NDArray[np.bool_]]:
    """[cells] each: how much of each part of start … end is in low … high, and whether its middle
    is."""
    edges = np.linspace(start, end, cells + 1)
    inside = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
    cover = np.clip(inside, 0, None) / ((end - start) / cells)
    middles = (edges[1:] + edges[:-1]) / 2
    counted = (middles >= low) & (middles <= high)
    at = math.floor(((low + high) / 2 - start) / (end - start) * cells)
    if 0 <= at < cells:
        counted[at] = True
    return cover, counted


def _grounding(layer: Layer) -> Numbers:
    received = layer.sums.received.double().cpu().numpy()
    count = layer.sums.count.cpu().numpy()
    value = np.full((*received.shape[:2], len(COLUMNS)), np.nan)
    uniform = np.full((len(received), 1, len(COLUMNS)), np.nan)
    for row, target in enumerate(layer.question_targets):
        if target is None or count[row] == 0:
            continue
        tokens, box = target
        cover, inside = cells_in(tokens, box)
        if cover.sum() == 0:
            continue
        cells = tokens.to_map(received[row])
        value[row, :, 0], value[row, :, 1] = pointed(cells, inside), ratio(cells, cover)
        uniform[row, 0] = inside.mean(), 1.0
    return Numbers(value, uniform=uniform)


GROUNDING = Measure(
    name="grounding",
    range={"pointing": SHARE, "box_ratio": POSITIVE},
    description="attention to the part of a picture that the question is about; the prompts have "
    "one picture each and the metadata `box`",
    level="head",
    columns=COLUMNS,
    needs=frozenset({"sums", "box"}),
    function=_grounding,
)
