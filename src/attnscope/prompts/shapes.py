"""Pictures of coloured shapes with known boxes, and questions with known answers.

A scene has two to five shapes that do not overlap; no shape and no colour occurs twice, so every
question has one answer. Scenes are drawn from a seed and an index: equal arguments give equal
pixels. Training and evaluation use different seeds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import unknown

SIDE = 192
"""Width and height of a picture in pixels."""
COLORS = {
    "red": (214, 39, 40),
    "green": (40, 150, 60),
    "blue": (40, 80, 210),
    "yellow": (240, 205, 40),
    "orange": (245, 130, 30),
    "purple": (130, 60, 170),
    "pink": (245, 140, 190),
    "black": (25, 25, 25),
}
PLACES = (
    ("top left", "top", "top right"),
    ("left", "center", "right"),
    ("bottom left", "bottom", "bottom right"),
)
TASKS = ("color", "shape", "place", "exists", "count", "describe")
ABOUT_ONE = TASKS[:3]
"""Tasks about one shape of the picture."""
FIRST_SEED = 100
"""Of pictures of experiments; smaller seeds are for the training and the test of models."""
_SAMPLES = 3  # per pixel and direction, so that edges are smooth

Mask = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.bool_]]


def _star(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Five points, folded into one half of a point: its tip at 1, its notch at angle π/5."""
    angle = np.mod(np.arctan2(x, -y), 2 * np.pi / 5)
    folded = np.hypot(x, y) * np.exp(1j * np.minimum(angle, 2 * np.pi / 5 - angle))
    edge = 0.42 * np.exp(1j * np.pi / 5) - 1.0
    return np.asarray((np.conjugate(edge) * (folded - 1.0)).imag >= 0)


SHAPES: dict[str, Mask] = {
    "circle": lambda x, y: x**2 + y**2 <= 1,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) <= 0.9,
    "triangle": lambda x, y: (y <= 0.9) & (2 * abs(x) <= y + 1),
    "diamond": lambda x, y: abs(x) + abs(y) <= 1,
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) <= 0.3) & (np.maximum(abs(x), abs(y)) <= 1),
    "ring": lambda x, y: (x**2 + y**2 <= 1) & (x**2 + y**2 >= 0.3),
    "star": _star,
}
"""By name: whether a point of the square −1 … 1 belongs to the shape; y points down."""


@dataclass(frozen=True)
class Shape:
    """A coloured shape of a picture; the numbers are pixels."""

    name: str
    color: str
    x: float
    """Of the centre, from the left."""
    y: float
    """Of the centre, from the top."""
    radius: float
    """Half of its width and height."""

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom as fractions of the picture."""
        left, top = (self.x - self.radius) / SIDE, (self.y - self.radius) / SIDE
        return left, top, left + 2 * self.radius / SIDE, top + 2 * self.radius / SIDE

    @property
    def location(self) -> str:
        """The cell of a 3 × 3 grid that has the centre."""
        return PLACES[int(self.y * 3 / SIDE)][int(self.x * 3 / SIDE)]


@dataclass(frozen=True, eq=False)
class PictureQuestion:
    """A picture, a question about it, and the answer."""

    picture: NDArray[np.uint8]
    """[SIDE, SIDE, 3]"""
    shapes: tuple[Shape, ...]
    task: str
    question: str
    answer: str
    target: Shape | None
    """The shape that the question is about; None if it is about all of them."""


def scene(random: np.random.Generator) -> tuple[Shape, ...]:
    """Two to five shapes that do not touch, in reading order."""
    number = int(random.integers(2, 6))
    names = random.permutation(list(SHAPES))[:number]
    colors = random.permutation(list(COLORS))[:number]
    placed: list[Shape] = []
    while len(placed) < number:
        placed = []  # again from the start if a shape finds no free place
        for name, color in zip(names.tolist(), colors.tolist(), strict=True):
            free = _free_place(placed, random)
            if free is None:
                break
            placed.append(Shape(name, color, *free))
    return tuple(sorted(placed, key=lambda shape: (int(shape.y * 3 / SIDE), shape.x)))


def _free_place(
    placed: list[Shape], random: np.random.Generator
) -> tuple[float, float, float] | None:
    """Centre and radius of a shape that touches no other; None if 50 tries find none."""
    for _ in range(50):
        radius = float(random.uniform(14, 28))
        x, y = random.uniform(radius + 2, SIDE - radius - 2, 2).tolist()
        if all(max(abs(x - o.x), abs(y - o.y)) > radius + o.radius + 4 for o in placed):
            return x, y, radius
    return None


def render(shapes: tuple[Shape, ...], random: np.random.Generator) -> NDArray[np.uint8]:
    """[SIDE, SIDE, 3]: the shapes on a light ground, with a little noise."""
    ground = random.uniform(215, 250) + random.uniform(-6, 6, 3)
    picture = np.tile(ground.astype(np.float32), (SIDE, SIDE, 1))
    for shape in shapes:
        left, top = int(shape.x - shape.radius) - 1, int(shape.y - shape.radius) - 1
        size = int(2 * shape.radius) + 4
        fine = (np.arange(size * _SAMPLES) + 0.5) / _SAMPLES
        x = (left + fine - shape.x) / shape.radius
        y = (top + fine - shape.y) / shape.radius
        inside = SHAPES[shape.name](x[None, :], y[:, None]).astype(float)
        cover = inside.reshape(size, _SAMPLES, size, _SAMPLES).mean((1, 3))[..., None]
        color = np.array(COLORS[shape.color]) + random.uniform(-14, 14, 3)
        bottom, right = min(top + size, SIDE), min(left + size, SIDE)
        first_row, first_column = max(-top, 0), max(-left, 0)
        part = picture[max(top, 0) : bottom, max(left, 0) : right]
        cover = cover[first_row : bottom - top, first_column : right - left]
        part += cover * (color - part)
    picture += 2.5 * random.standard_normal(picture.shape, dtype=np.float32)
    return picture.clip(0, 255).astype(np.uint8)


def ask(
    shapes: tuple[Shape, ...], task: str, random: np.random.Generator
) -> tuple[str, str, Shape | None]:
    """A question of this task about a scene: its text, the answer, and the shape it is about."""
    target = shapes[int(random.integers(len(shapes)))]
    match task:
        case "color":
            return f"What color is the {target.name}?", target.color, target
        case "shape":
            return f"What shape is {target.color}?", target.name, target
        case "place":
            return f"Where is the {target.name}?", target.location, target
        case "exists":
            if random.random() < 0.5:
                return f"Is there a {target.color} {target.name}?", "yes", target
            colors = [color for color in COLORS if color != target.color]
            other = colors[int(random.integers(len(colors)))]
            return f"Is there a {other} {target.name}?", "no", target
        case "count":
            return "How many shapes are there?", str(len(shapes)), None
        case "describe":
            parts = [f"{shape.color} {shape.name}, {shape.location}" for shape in shapes]
            return "Describe the picture.", "; ".join(parts), None
    raise unknown("task", task, TASKS)


def picture_question(index: int, *, seed: int = 0, task: str | None = None) -> PictureQuestion:
    """Question number `index` of a seed; `task` is one of TASKS, default: any."""
    random = np.random.default_rng([seed, index])
    shapes = scene(random)
    picture = render(shapes, random)
    if task is None:
        task = TASKS[int(random.integers(len(TASKS)))]
    question, answer, target = ask(shapes, task, random)
    return PictureQuestion(picture, shapes, task, question, answer, target)


def shape_records(seed: int, tasks: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Records without end, of the tasks in turn: the picture as a file, question and answer, the
    number of shapes, and the share of the picture in their boxes.

    Of the shape in question the box, and the word that names it in the question; None for a
    question about all shapes."""
    index = 0
    while True:
        one = picture_question(index, seed=FIRST_SEED + seed, task=tasks[index % len(tasks)])
        target = one.target
        word = target and (target.color if one.task == "shape" else target.name)
        yield {
            "image": bitmap(one.picture),
            "question": one.question,
            "answer": one.answer,
            "task": one.task,
            "seed": seed,
            "number": index,
            "shapes": len(one.shapes),
            "covered": round(sum(map(_area, one.shapes)), 6),
            "target": None if target is None else f"{target.color} {target.name}",
            "word": word,
            "box": None if target is None else [round(edge, 6) for edge in target.box],
        }
        index += 1


def _area(shape: Shape) -> float:
    left, top, right, bottom = shape.box
    return (right - left) * (bottom - top)


def bitmap(picture: NDArray[np.uint8]) -> bytes:
    """The BMP file of pixels [height, width, 3], the same bytes on every machine."""
    height, width, _ = picture.shape
    rows = picture[::-1, :, ::-1].reshape(height, -1)  # from the bottom; blue, green, red
    data = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4))).tobytes()
    kind = struct.pack("<2sIHHI", b"BM", 54 + len(data), 0, 0, 54)
    layout = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(data), 0, 0, 0, 0)
    return kind + layout + data
