"""`engine: vllm` with an engine that transformers plays: the same run as of the other engine.

`tests/integrations/test_vllm_engine.py` does the same with vLLM itself.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import attnscope
from attnscope.errors import InputError, ModelError
from attnscope.experiment import local, vllm_model
from attnscope.experiment.completion import end_tokens
from attnscope.experiment.execute import run
from attnscope.experiment.measuring_environment import describe_model
from attnscope.experiment.plan import make_plan
from attnscope.experiment.vllm_model import VllmModel
from picture_models import picture, write_prompts
from support_errors import raises


class Played(VllmModel):
    """Reads every prompt alone, and then all texts together, padded on the right."""

    runs = 0
    unstable = False

    def measure(self, prompts, queries, *, new_tokens, keep):
        self.runs += 1
        texts, completions = [], []
        for ids in prompts:
            given = torch.tensor([ids])
            out = self.llm.generate(given, max_new_tokens=new_tokens or 1, do_sample=False)[0]
            new = out[len(ids) :].tolist()
            ends = [n for n, one in enumerate(new) if one in end_tokens(self, self.tokenizer)]
            new = new[: ends[0] + 1] if ends else new
            if self.unstable:
                new[-1] = self.runs
            completions.append(new)
            texts.append([*ids, *(new[:-1] if new_tokens else [])])
        B, K = len(texts), max(map(len, texts))
        ids = torch.zeros(B, K, dtype=torch.int64)
        real, counted = torch.zeros(B, K, dtype=torch.bool), torch.zeros(B, K, dtype=torch.bool)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            real[row, : len(text)] = True
            counted[row, len(prompts[row]) - 1] = True
        if not isinstance(queries, str):
            counted = torch.nn.functional.pad(queries, (0, K))[:, :K] & real
        elif queries != "last":
            counted = real
        with attnscope.watch(self.llm, queries=counted, keep=keep) as scope, torch.no_grad():
            self.llm(ids, attention_mask=real.long())
        return scope, completions

    def close(self):
        self.closed = True


@pytest.fixture
def played(monkeypatch):
    """The models that were loaded."""
    models: list[Any] = []

    def load(plan, of_model):
        model = AutoModelForCausalLM.from_pretrained(of_model.info.pinned)
        models.append(Played(model, of_model.tokenizer, model.generation_config, None, "auto"))
        return models[-1]

    monkeypatch.setattr(local, "load_vllm", load)
    monkeypatch.setattr(
        local, "describe_vllm", lambda plan, model: describe_model(plan, model.llm, "streaming")
    )
    return models


KEYS: dict[str, dict[str, Any]] = {
    "texts": {
        "queries": ["all", "last", "after:question", "predicts:question"],
        "measures": ["mass", "entropy", "lambda", "profile", "query_entropy", "nearby"],
    },
    "completions": {
        "queries": ["generated", "all", "last", "predicts:generated"],
        "keys": ["all", "question", "generated"],
        "generate": {"max_new_tokens": 6},
        "measures": ["mass", "entropy", "profile", "retrieval", "step_mass"],
    },
    "completions of one token": {
        "queries": ["generated", "last"],
        "generate": {"max_new_tokens": 1},
        "measures": ["mass", "entropy"],
    },
}


@pytest.mark.parametrize("name", KEYS)
def test_both_engines_give_the_same_tables(small, played, tmp_path, name):
    keys = KEYS[name] | {"classes": ["whole"], "prompts": {"source": "math", "count": 4}}
    runs = []
    for engine in ("transformers", "vllm"):
        experiment = small(engine=engine, **keys)
        assert run(experiment, tmp_path / engine).complete
        runs.append(attnscope.open_run(tmp_path / engine))
    assert played[0].closed
    ours, theirs = runs
    assert ours.cells.drop("cell").equals(theirs.cells.drop("cell"))
    for table in ("values", "tokens", "positions"):
        one, other = (getattr(each, table).collect() for each in runs)
        exact = [column for column, kind in one.schema.items() if not kind.is_float()]
        one, other = (each.sort(exact, nulls_last=True) for each in (one, other))
        assert one.select(exact).equals(other.select(exact))
        for column in set(one.columns) - set(exact):
            a, b = (each[column].fill_nan(None) for each in (one, other))
            assert (a.is_null() == b.is_null()).all()
            assert ((a - b).abs().max() or 0.0) < 1e-4, column
    assert ours.experiment.engine == "transformers"
    assert theirs.experiment.engine == "vllm"
    assert "vllm" in theirs.environment["packages"]
    assert "vllm" not in ours.environment["packages"]


def test_the_engine_belongs_to_the_cells(small):
    one, other = (
        {cell.id for cell in make_plan(small(engine=engine)).models[0].cells()}
        for engine in ("transformers", "vllm")
    )
    assert not one & other
    assert small().digest == small(engine="transformers").digest != small(engine="vllm").digest


def test_completions_that_differ_between_choices_are_an_error(small, played, monkeypatch, tmp_path):
    monkeypatch.setattr(Played, "unstable", True)
    keys = KEYS["completions"] | {"classes": ["whole"]}
    with raises(ModelError, "nothing-measured"):
        run(small(engine="vllm", **keys), tmp_path)
    assert played[0].runs > 1


@pytest.mark.parametrize(
    "keys",
    [
        {"measures": ["flow"]},
        {"measures": ["max_logit"]},
        {"conditions": {"base": {}, "cut": {"knockout": {"tokens": "digit"}}}},
        {"queries": ["sample:8"]},
        {"generate": {"sample": True}},
        {"backend": "eager-fallback"},
    ],
)
def test_what_vllm_cannot_do_is_refused(small, keys):
    small(**keys)
    with raises(InputError, "not-with-vllm"):
        small(engine="vllm", **keys)


def test_prompts_with_pictures_are_refused(small, tmp_path):
    picture(0).save(tmp_path / "a.png")
    path = write_prompts(tmp_path, [{"image": "a.png", "question": "What is it?"}])
    prompts = {"source": "file", "path": str(path), "template": "<image>{question}"}
    with raises(InputError, "not-with-vllm"):
        make_plan(small(engine="vllm", prompts=prompts))


def test_without_vllm_the_error_names_the_package(small, monkeypatch):
    plan = make_plan(small(engine="vllm"))
    monkeypatch.setattr(vllm_model, "find_spec", lambda name: None)
    with raises(InputError, "missing-package", package="vllm"):
        vllm_model.load_vllm(plan, plan.models[0])


def test_a_packed_model_or_an_adapter_is_refused(small, monkeypatch):
    plan = make_plan(small(engine="vllm"))
    source = SimpleNamespace(adapter="folder", packed=None, name="BASE+ADAPTER")
    monkeypatch.setattr(vllm_model, "find", lambda name: source)
    monkeypatch.setattr(vllm_model, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=None))
    with raises(InputError, "not-with-vllm"):
        vllm_model.load_vllm(plan, plan.models[0])
