"""Conditions that do something to the model: what a run says is what the blocks do."""

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import attnscope
from attnscope.errors import InputError
from attnscope.experiment.execute import run
from attnscope.experiment.plan import make_plan
from support_errors import raises

CONDITIONS = {
    "base": {},
    "cut": {"knockout": {"tokens": "digit", "region": "question", "layers": [1], "heads": [0, 2]}},
    "less": {"steer": {"region": "question", "factor": 0.25}, "insert": {"count": 5}},
    "arm": {"arm": {"share": 0.2, "p1": 95.0, "seed": 3}},
}


def test_rows_are_those_of_the_blocks(small: Any, folder: str, tmp_path: Any) -> None:
    experiment = small(
        conditions=CONDITIONS,
        prompts={"source": "math", "count": 3, "level": 1},
        measures=["mass", "entropy", "activations", "lambda"],
    )
    assert isinstance(hash(experiment), int)
    run(experiment, tmp_path / "run")
    values = attnscope.open_run(tmp_path / "run").values.collect()
    model, _ = attnscope.load(folder)
    (plan,) = make_plan(experiment).models
    kinds = experiment.classes["default"]
    digit = kinds.index("digit")
    for cell in plan.cells():
        ids = torch.from_numpy(cell.tokens.ids[None])
        classes = kinds.ids(cell.tokens.ids[None], plan.tokenizer)
        question = torch.from_numpy(cell.tokens.mask("question")[None])
        blocks = {
            "base": lambda: attnscope.watch(model),
            "cut": lambda q=question, c=classes: attnscope.knockout(
                model, keys=q & torch.from_numpy(c == digit), layers=[1], heads=[0, 2]
            ),
            "less": lambda q=question: attnscope.steer(model, keys=q, factor=0.25),
            "arm": lambda: attnscope.arm(model, share=0.2, p1=95.0, seed=3),
        }
        with torch.no_grad(), blocks[cell.condition](), attnscope.watch(model) as scope:
            model(input_ids=ids)
        mine = values.filter(
            (pl.col("prompt") == cell.prompt) & (pl.col("condition") == cell.condition)
        )
        for layer in (0, 1):
            there = (pl.col("layer") == layer) & (pl.col("queries") == "all")
            got = mine.filter(there & (pl.col("measure") == "entropy")).sort("head")["value"]
            np.testing.assert_allclose(got, scope.entropy(layer)[0], atol=2e-4)
            is_digit = (pl.col("measure") == "mass") & (pl.col("item") == "digit")
            got = mine.filter(there & is_digit & (pl.col("keys") == "all")).sort("head")["value"]
            mass = scope.mass(layer, classes, len(kinds))[0, :, digit]
            np.testing.assert_allclose(got, mass, atol=2e-4)
    near = values.filter((pl.col("measure") == "near_zero") & (pl.col("layer") == 0))
    by = {c: near.filter(pl.col("condition") == c)["value"].mean() for c in ("base", "cut", "arm")}
    assert by["cut"] == pytest.approx(by["base"], abs=0.02)
    assert by["arm"] < by["base"] - 0.02


def test_conditions_that_cannot_be(small: Any) -> None:
    for condition, code in (
        ({"knockout": {}}, "no-keys-chosen"),
        ({"steer": {"region": "question", "factor": 0}}, "bad-value"),
        ({"arm": {"p1": 101}}, "bad-value"),
    ):
        with raises(InputError, code):
            small(conditions={"base": {}, "other": condition})
    for knocked_out, code, value in (
        ({"tokens": "digits"}, "unknown-class", "digits"),
        ({"region": "maps"}, "unknown-region", "maps"),
    ):
        with raises(InputError, code, value=value):
            make_plan(small(conditions={"base": {}, "other": {"knockout": knocked_out}}))
