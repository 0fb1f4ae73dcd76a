"""Pictures of shapes: what the questions say is what the pixels show."""

import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from attnscope.errors import InputError
from attnscope.prompts.shapes import (
    COLORS,
    FIRST_SEED,
    SHAPES,
    SIDE,
    TASKS,
    Shape,
    bitmap,
    picture_question,
    render,
    shape_records,
)
from attnscope.spec.experiment import make_experiment
from attnscope.vision.pictures import decode
from support_errors import raises


def test_equal_arguments_give_equal_pixels_and_questions() -> None:
    first, second = picture_question(5, seed=3), picture_question(5, seed=3)
    np.testing.assert_array_equal(first.picture, second.picture)
    assert (first.question, first.answer) == (second.question, second.answer)
    assert not np.array_equal(first.picture, picture_question(6, seed=3).picture)


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_shape_fills_its_box_and_nothing_else(name: str) -> None:
    shape = Shape(name, "black", 60.0, 100.0, 24.0)
    dark = render((shape,), np.random.default_rng(0)).mean(-1) < 120
    rows, columns = np.flatnonzero(dark.any(1)), np.flatnonzero(dark.any(0))
    left, top, right, bottom = (SIDE * edge for edge in shape.box)
    assert left - 1 <= columns[0]
    assert columns[-1] <= right
    assert top - 1 <= rows[0]
    assert rows[-1] <= bottom
    assert dark.sum() > 0.25 * (2 * shape.radius) ** 2


@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_the_scene(task: str) -> None:
    for index in range(40):
        one = picture_question(index, seed=1, task=task)
        assert 2 <= len(one.shapes) <= 5
        assert len({shape.name for shape in one.shapes}) == len(one.shapes)
        assert len({shape.color for shape in one.shapes}) == len(one.shapes)
        for shape in one.shapes:
            color = one.picture[int(shape.y), int(shape.x)]
            if shape.name != "ring":  # its centre is empty
                assert np.abs(color - np.array(COLORS[shape.color])).max() < 40
            assert all(0 <= edge <= 1 for edge in shape.box)
        for one_shape in one.shapes:
            if one_shape is one.target:
                expected = {
                    "color": one_shape.color,
                    "shape": one_shape.name,
                    "place": one_shape.location,
                }
                if task in expected:
                    assert one.answer == expected[task]
        if task == "count":
            assert one.answer == str(len(one.shapes))


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(InputError) as error:
        picture_question(0, task="sing")
    assert error.value.code == "unknown-task"


def test_records_have_the_picture_as_a_file_and_the_box_of_the_target() -> None:
    tasks = ("color", "count")
    records = list(islice(shape_records(3, tasks), 6))
    assert [record["task"] for record in records] == ["color", "count"] * 3
    for number, record in enumerate(records):
        one = picture_question(number, seed=FIRST_SEED + 3, task=tasks[number % 2])
        np.testing.assert_array_equal(np.asarray(decode(record["image"], "bmp")), one.picture)
        assert (record["question"], record["answer"]) == (one.question, one.answer)
        if one.target is None:
            assert record["box"] is record["target"] is None
        else:
            assert record["box"] == pytest.approx(one.target.box, abs=1e-6)
            assert record["target"] == f"{one.target.color} {one.target.name}"


def test_a_bitmap_pads_its_rows() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    np.testing.assert_array_equal(np.asarray(decode(bitmap(pixels), "bmp")), pixels)


def test_experiments_have_other_pictures_than_training_and_test() -> None:
    training = Path(__file__).parents[2] / "training" / "shapes_vlm" / "train.py"
    (used,) = re.findall(r"^TRAIN, TEST = (\d+), (\d+)", training.read_text("utf-8"), re.M)
    assert all(int(seed) < FIRST_SEED for seed in used)
    with raises(InputError, "bad-value", key="prompts.shapes.seed"):
        make_experiment(name="x", models=["m"], prompts={"source": "shapes", "seed": -1})
    with raises(InputError, "unknown-task", value="sing"):
        make_experiment(name="x", models=["m"], prompts={"source": "shapes", "tasks": ["sing"]})
