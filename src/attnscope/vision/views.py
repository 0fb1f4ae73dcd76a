"""Views of a picture: the grids of image tokens that a processor makes of it, and their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as fractions of the width and height of the picture. Values below 0
or above 1 lie outside the picture, where the processor padded it."""
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class View:
    """A grid of image tokens, row by row, over a part of the picture."""

    rows: int
    columns: int
    box: Box | None = WHOLE
    """The part of the picture under the grid; None for tokens without a place in the picture."""
    newline: bool = False
    """Whether a token without a place ends each row."""

    @property
    def tokens(self) -> int:
        """The number of tokens, newline tokens included."""
        return self.rows * (self.columns + self.newline)

    def token_boxes(self) -> NDArray[np.float64]:
        """[tokens, 4]: the box of each token; nan for tokens without a place."""
        boxes = np.full((self.rows, self.columns + self.newline, 4), np.nan)
        if self.box is not None:
            left, top, right, bottom = self.box
            x = np.linspace(left, right, self.columns + 1)
            y = np.linspace(top, bottom, self.rows + 1)
            placed = boxes[:, : self.columns]
            placed[..., 0], placed[..., 2] = x[:-1], x[1:]
            placed[..., 1], placed[..., 3] = y[:-1, None], y[1:, None]
        return boxes.reshape(-1, 4)


def tiles(rows: int, columns: int, side: int, box: Box = WHOLE) -> list[View]:
    """Rows × columns of tiles over a box, row by row; each is a grid of side × side tokens."""
    boxes = View(rows, columns, box).token_boxes().tolist()
    return [View(side, side, (left, top, right, bottom)) for left, top, right, bottom in boxes]


def common_grid(views: Sequence[View]) -> tuple[int, int, Box]:
    """The rows, columns and box of a grid that covers all views and is as fine as the finest."""
    placed = [(view, view.box) for view in views if view.box is not None]
    lefts, tops, rights, bottoms = zip(*(box for _, box in placed), strict=True)
    left, top, right, bottom = min(lefts), min(tops), max(rights), max(bottoms)
    rows = max(view.rows / (box[3] - box[1]) for view, box in placed) * (bottom - top)
    columns = max(view.columns / (box[2] - box[0]) for view, box in placed) * (right - left)
    return round(rows), round(columns), (left, top, right, bottom)


def overlaps(
    parts: int, start: float, end: float, cells: int, first: float, last: float
) -> NDArray[np.float64]:
    """[parts, cells]: the share of each part of start … end that lies in each cell of first … last.

    Both intervals are divided evenly. Rows add up to 1 if the cells cover the parts.
    """
    if (parts, start, end) == (cells, first, last):
        return np.eye(parts)
    edges, borders = np.linspace(start, end, parts + 1), np.linspace(first, last, cells + 1)
    lows = np.maximum(edges[:-1, None], borders[:-1])
    highs = np.minimum(edges[1:, None], borders[1:])
    return np.asarray(np.clip(highs - lows, 0, None) / ((end - start) / parts))
