"""Activations in a run, against numpy on what plain transformers makes of the same tokens."""

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM

import attnscope
from attnscope.activations.log_histogram import GINI_BOUND
from attnscope.experiment.execute import run

Array = np.ndarray[Any, Any]


def made(folder: str, ids: list[int]) -> list[Array]:
    """[n, width] per layer, after the non-linearity."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found: list[Array] = []
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(
            lambda module, args, output: found.append(output[0].double().numpy())
        )
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    return found


def of_all(row: dict[str, Any], a: Array, large: float) -> None:
    """A number of all activations of a text; bins are right to within those of the sketch."""
    if row["measure"] == "activation_gini":
        order = np.sort(np.abs(a), axis=None)
        n = len(order)
        wanted = (2 * np.arange(1, n + 1) - n - 1) @ order / (n * order.sum())
        assert row["value"] == pytest.approx(wanted, abs=GINI_BOUND)
        return
    low, high = float(row["item"]) * large, (float(row["item"]) + 0.05) * large
    wanted = ((a >= low) & (a < high)).mean()
    near_an_edge = sum((np.abs(a - edge) <= 0.03 * abs(edge) + 1e-8).mean() for edge in (low, high))
    assert abs(row["value"] - wanted) <= near_an_edge + 1e-9


def test_rows_are_those_of_stored_activations(small: Any, folder: str, tmp_path: Any) -> None:
    """Prompts of different lengths in a padded batch; the variant held against its base."""
    run(
        small(
            measures=["activations", "class_near_zero", "activation_histogram", "activation_gini"],
            prompts={"source": "math", "count": 3, "level": 1},
            queries=["all", "last"],
            keys=["all", "question"],
        ),
        tmp_path / "run",
    )
    opened = attnscope.open_run(tmp_path / "run")
    values, tokens = opened.values.collect(), opened.tokens.collect()
    assert values["queries"].unique().to_list() == ["all"]
    for prompt in range(3):
        limits: list[tuple[float, float]] = []
        for condition in ("base", "filler"):
            of_cell = (pl.col("prompt") == prompt) & (pl.col("condition") == condition)
            cell = tokens.filter(of_cell).sort("position")
            layers = made(folder, cell["id"].to_list())
            if condition == "base":
                for a in layers:
                    size = np.abs(a)
                    mad = np.median(np.abs(size - np.median(size)))
                    limits.append((1.4826 * 0.25 * mad, float(np.quantile(size, 0.99))))
            for row in values.filter(of_cell).iter_rows(named=True):
                a, (near, large) = layers[row["layer"]], limits[row["layer"]]
                if row["measure"] in ("activation_histogram", "activation_gini"):
                    of_all(row, a, large)
                    continue
                inside = np.array([row["keys"] in n for n in cell["regions"].to_list()])
                there = np.ones(len(a), bool) if row["keys"] == "all" else inside
                if row["item"] is not None:
                    there = there & (cell["class"] == row["item"]).to_numpy()
                assert row["tokens"] == there.sum()
                a = a[there]
                if not len(a):
                    assert row["value"] is None
                    continue
                exact = {
                    "activation_l1": np.abs(a).sum(1).mean(),
                    "activation_l2": np.sqrt((a**2).sum(1)).mean(),
                    "activation_variance": a.var(),
                }
                if row["measure"] in exact:
                    assert row["value"] == pytest.approx(exact[row["measure"]], rel=1e-5)
                    continue
                # Counted exactly; where the cut is, is sketched.
                size = np.abs(a)
                low, high = (size > 1.05 * large).mean(), (size > 0.95 * large).mean()
                if row["measure"] != "large":
                    low, high = (size < 0.9 * near).mean(), (size < 1.1 * near).mean()
                assert low - 1e-9 <= row["value"] <= high + 1e-9
    assert set(values["measure"]) == {
        "near_zero",
        "large",
        "activation_l1",
        "activation_l2",
        "activation_variance",
        "class_near_zero",
        "activation_histogram",
        "activation_gini",
    }
