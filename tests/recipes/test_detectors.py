"""Detectors of wrong answers: prompts, labels, held-out scores and their AUROC."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.recipes.detectors import (
    RECIPE,
    answers,
    auroc,
    best_feature,
    classified,
    folds,
    held_out,
    right_answers,
)
from support_errors import raises


def test_auroc_compares_answers_of_one_fold() -> None:
    rows = np.array([[3.0, 1, 0], [1, 0, 0], [0, 1, 1], [0, 0, 1], [-9, 1, 2]])
    assert auroc(rows[:2]) == 1
    assert auroc(rows) == 0.75  # a tie counts half; the last has no wrong answer beside it
    assert np.isnan(auroc(rows[4:]))


def test_every_fold_has_both_kinds() -> None:
    right = np.array([1.0] * 9 + [0.0] * 8)
    of = folds(right)
    for fold in range(4):
        assert {1.0, 0.0} == set(right[of == fold])


@pytest.mark.parametrize("method", [best_feature, classified])
def test_noise_is_at_chance_where_it_is_not_judged_on_what_it_learned_from(method: Any) -> None:
    draw = np.random.default_rng(0)
    areas = []
    for _ in range(20):
        features, right = draw.normal(size=(40, 60)), (draw.random(40) < 0.5).astype(float)
        areas.append(auroc(held_out(features, right, method)))
    assert 0.4 < np.mean(areas) < 0.6
    own = method(features, right, features)
    assert auroc(np.stack([own, right, 0 * right], axis=1)) > 0.7  # learned by heart


@pytest.mark.parametrize("method", [best_feature, classified])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_feature_that_separates_is_found(method: Any, sign: int) -> None:
    draw = np.random.default_rng(0)
    features, right = draw.normal(size=(40, 30)), (np.arange(40) % 3 == 0).astype(float)
    features[:, 7] += 12 * sign * right
    assert auroc(held_out(features, right, method)) > 0.9


def run_of(prompts: pl.DataFrame, generated: list[str]) -> Any:
    cells = {"model": "m", "condition": "base", "prompt": range(len(generated))}
    frame = pl.DataFrame({"generated": generated}).with_columns(
        **{name: pl.lit(value) for name, value in cells.items() if isinstance(value, str)},
        prompt=pl.Series(range(len(generated))),
    )
    return SimpleNamespace(
        prompts=prompts, cells=frame, experiment=SimpleNamespace(base="base", models={"m": "x"})
    )


def test_answers_are_judged_by_their_number() -> None:
    prompts = pl.DataFrame({"prompt": [0, 1], "quantities": ["[5, 12]", "[7]"]})
    run = run_of(prompts, ["First 5. The answer is 12.0.\n\n7", "The answer is 8."])
    assert answers(run) == {0: "12", 1: "7"}
    assert right_answers(run, "m") == {0: True, 1: False}
    assert right_answers(run_of(prompts.select("prompt"), ["1"]), "m") == {}


def test_products_differ_from_each_other_and_from_the_examples() -> None:
    records = RECIPE(prompts=300).prompts.records
    questions = [record["question"].rsplit("What is ", 1)[1] for record in records]
    assert len(set(questions)) == 300
    assert "4 * 6?\nAnswer:" not in questions
    for question, record in zip(questions, records, strict=True):
        a, b = question.split("?")[0].split(" * ")
        assert int(record["answer"]) == int(a) * int(b)
        assert 2 <= min(int(a), int(b)) <= max(int(a), int(b)) <= 99
    with raises(InputError, "bad-count", value=9_000):
        RECIPE(prompts=9_000)
    assert RECIPE(models=["zoo:math-qwen2"], prompts=4).prompts.source == "math"
