"""The forward pass of an experiment."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnscope
from attnscope.experiment.model_pass import forward
from attnscope.experiment.plan import make_plan
from attnscope.experiment.results import measure_batch
from attnscope.interception import sites
from families import build


def test_no_unused_cache_is_filled() -> None:
    model, ids = build("qwen2"), torch.randint(5, 97, (2, 12))
    caches: list[Any] = []
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: caches.append(kwargs.get("past_key_values")), with_kwargs=True
    )
    with forward(model, {"input_ids": ids}, {"all": "all"}):
        pass
    assert caches == [None]


def test_one_pass_serves_all_queries_and_class_sets(small: Any, tmp_path: Path) -> None:
    """Three choices of queries and two class sets with flow: one pass a batch and condition, and
    the numbers of runs that ask for one of them each."""
    (tmp_path / "two.yaml").write_text("classes:\n- digit\n- {name: rest, every: token}\n")
    sets = ["default", str(tmp_path / "two.yaml")]
    asked = {"measures": ["mass", "flow", "entropy", "lambda", "affine", "affine_heads"]}
    queries = ["all", "last", "after:question"]
    experiment = small(**asked, queries=queries, classes=sets)
    plan = make_plan(experiment).models[0]
    model, _ = attnscope.load(plan.info.name)
    passes: list[Any] = []
    sites.find(model).base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    batch = plan.batches[0]
    together = measure_batch(experiment, plan, model, batch)
    assert len(passes) == len(experiment.conditions)

    def numbers(experiment: Any) -> dict[Any, Any]:
        found = measure_batch(experiment, plan, model, batch)
        return {
            (condition, reading.queries, column): values[..., n]
            for condition, measured in found.items()
            for reading in measured.readings
            for values in [np.concatenate([value for value, *_ in reading.numbers], axis=2)]
            for n, column in enumerate(reading.columns)
        }

    assert together.keys() == set(experiment.conditions)
    all_at_once, one_by_one = numbers(experiment), {}
    for one in queries:
        for classes in sets:
            one_by_one |= numbers(small(**asked, queries=[one], classes=[classes]))
    assert all_at_once.keys() == one_by_one.keys()
    for key, value in one_by_one.items():
        np.testing.assert_allclose(all_at_once[key], value, rtol=0, atol=2e-6, err_msg=str(key))
