"""The spatial task: turn the shape of the current map into that of the target map.

A shape is a centre, drawn `*`, with straight arms in some of eight directions, drawn `#`. The
rest of a map is blank; every row has the full width. The nine atomic actions are exact:

* `rotate 45`, `rotate 90`, `rotate 180`: clockwise about the centre. An arm of length n keeps its
  length, counted in cells, and turns by one, two or four of the eight directions. Seen on the
  grid, the square ring at distance r around the centre (8 r cells) moves on by r, 2 r or 4 r
  cells, so that two turns by 45 are one by 90 and eight are none.
* `scale x2`: every arm twice as long. `scale x1/2`: half as long, and only where every length is
  even, so that it undoes `scale x2` exactly.
* `move left`, `move right`, `move up`, `move down`: by one cell.

An action is possible where the result fits on the map. In every sample exactly one of the nine
actions leads from the current map to the result. Training and evaluation data both come from
here: `split` keeps their problems apart.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from attnscope.errors import InputError, unknown
from attnscope.prompts.sample import Sample, compose
from attnscope.tokens.regions import Prompt, join

# Clockwise from up; (rows down, columns right).
_DIRECTIONS = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))
_TURNS = {"rotate 45": 1, "rotate 90": 2, "rotate 180": 4}
_STEPS = {"move left": (0, -1), "move right": (0, 1), "move up": (-1, 0), "move down": (1, 0)}
ACTIONS = (*_TURNS, "scale x2", "scale x1/2", *_STEPS)

_SYSTEM = (
    "Turn the current map into the target map, one action at a time. "
    f"Actions: {', '.join(ACTIONS)}. Rotations go clockwise around *."
)
_QUESTIONS = {
    "action": "Which action turns the current map into the target map?",
    "map": "Draw the current map after this action: {action}",
}
# One problem in ten is for testing.
_TEST_SHARE = 10


@dataclass(frozen=True)
class Shape:
    """A centre and the length of its arm in each of the eight directions, clockwise from up."""

    row: int
    column: int
    arms: tuple[int, ...]

    def cells(self) -> Iterator[tuple[int, int]]:
        """The cells of the arms, without the centre."""
        for (down, right), length in zip(_DIRECTIONS, self.arms, strict=True):
            for n in range(1, length + 1):
                yield self.row + n * down, self.column + n * right

    def fits(self, size: int) -> bool:
        """Whether all of it is on a map of this size."""
        tips = [
            (self.row + n * down, self.column + n * right)
            for (down, right), n in zip(_DIRECTIONS, self.arms, strict=True)
        ]
        return all(0 <= row < size and 0 <= column < size for row, column in tips)


def apply(action: str, shape: Shape, size: int) -> Shape | None:
    """The shape after an action; None where the action is not possible."""
    if action in _TURNS:
        turn = _TURNS[action]
        changed = replace(shape, arms=shape.arms[-turn:] + shape.arms[:-turn])
    elif action in _STEPS:
        down, right = _STEPS[action]
        changed = replace(shape, row=shape.row + down, column=shape.column + right)
    elif action == "scale x2":
        changed = replace(shape, arms=tuple(2 * n for n in shape.arms))
    elif action == "scale x1/2":
        if any(n % 2 for n in shape.arms):
            return None
        changed = replace(shape, arms=tuple(n // 2 for n in shape.arms))
    else:
        raise unknown("action", action, ACTIONS)
    return changed if changed.fits(size) else None


def draw_map(shape: Shape, size: int) -> str:
    """The map as text: `size` rows of `size` characters, each with its line break."""
    grid = [[" "] * size for _ in range(size)]
    for row, column in shape.cells():
        grid[row][column] = "#"
    grid[shape.row][shape.column] = "*"
    return "".join("".join(row) + "\n" for row in grid)


def spatial_samples(
    count: int,
    *,
    seed: int = 0,
    size: int = 9,
    task: Literal["action", "map"] = "action",
    split: Literal["train", "test"] | None = None,
) -> Iterator[Sample]:
    """`count` samples, the same for a seed; actions come up equally often.

    `task` says what is asked: the `action` that leads to the target, or the `map` that an action
    leads to (the target is then one action further on). The regions are `system`, `maps` (with
    `target` and `current` inside), `history` and `question`. `metadata` has the `action`, the
    `history`, and the `current`, `target` and `result` maps.
    """
    if count < 0:
        raise InputError(
            f"cannot make {count} samples; count must be 0 or more", code="bad-count", value=count
        )
    if size < 7:
        raise InputError(
            f"a map of size {size} is too small to scale shapes on; use 7 or more",
            code="map-too-small",
            size=size,
            smallest=7,
        )
    if task not in _QUESTIONS:
        raise unknown("spatial task", task, _QUESTIONS)
    if split not in (None, "train", "test"):
        raise unknown("split", split, ("train", "test"))
    for index in range(count):
        # A generator of its own for each sample: sample 7 is the same, however many are made.
        yield _sample(Random(f"spatial:{seed}:{index}"), size, task, split)


def _sample(draw: Random, size: int, task: str, split: str | None) -> Sample:
    action = draw.choice(ACTIONS)
    while True:
        history: list[str] = []
        current = draw_shape(draw, size)
        for earlier in draw.choices(ACTIONS, k=draw.randint(0, 3)):
            following = apply(earlier, current, size)
            if following is not None and following != current:
                history.append(earlier)
                current = following
        result = apply(action, current, size)
        if result is None or [a for a in ACTIONS if apply(a, current, size) == result] != [action]:
            continue
        target = result if task == "action" else _one_further(draw, current, result, size)
        if target is not None and split in (None, _split_of(current, result)):
            return _written(current, target, result, history, action, size, task)


def draw_shape(draw: Random, size: int) -> Shape:
    """Two to four arms of one to three cells, or of two and four, which can be halved."""
    lengths = draw.choice(((1, 2, 3), (2, 4)))
    while True:
        arms = [0] * 8
        for direction in draw.sample(range(8), draw.randint(2, 4)):
            arms[direction] = draw.choice(lengths)
        shape = Shape(draw.randrange(size), draw.randrange(size), tuple(arms))
        if shape.fits(size):
            return shape


def _one_further(draw: Random, current: Shape, result: Shape, size: int) -> Shape | None:
    """A target beyond the result, so that the answer cannot be copied from it."""
    further = (apply(action, result, size) for action in draw.sample(ACTIONS, len(ACTIONS)))
    return next((shape for shape in further if shape not in (None, current, result)), None)


def _split_of(current: Shape, result: Shape) -> str:
    """By the problem itself, not by chance: what is tested was never trained on, for any seed."""
    digest = hashlib.sha256(repr((current, result)).encode()).digest()
    return "test" if digest[0] % _TEST_SHARE == 0 else "train"


def _written(
    current: Shape,
    target: Shape,
    result: Shape,
    history: list[str],
    action: str,
    size: int,
    task: str,
) -> Sample:
    maps = {
        name: draw_map(shape, size)
        for name, shape in (("current", current), ("target", target), ("result", result))
    }
    statement = ", ".join(history) or "none"
    body: Prompt = join(
        [
            (
                "maps",
                join(
                    [
                        (None, "Target map:\n"),
                        ("target", maps["target"]),
                        (None, "Current map:\n"),
                        ("current", maps["current"]),
                    ]
                ),
            ),
            ("history", f"History: {statement}\n"),
            ("question", _QUESTIONS[task].format(action=action)),
        ]
    )
    answer = action if task == "action" else maps["result"]
    metadata = {"action": action, "history": statement, **maps}
    return Sample(compose(_SYSTEM, body), answer, metadata)
