"""An experiment in which the model answers: what is measured while it does, and what is kept."""

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from transformers import AutoModelForCausalLM

import attnscope
from attnscope import zoo
from attnscope.errors import InputError
from attnscope.experiment import plan
from attnscope.experiment.completion import Drawn, _gumbels
from attnscope.experiment.execute import run
from attnscope.experiment.plan import make_plan
from attnscope.spec.experiment import Experiment
from made_models import save_model
from run_bytes import bytes_of
from support_errors import raises


def _dense(folder: str, ids: list[int]) -> np.ndarray:
    """[layers, H, n, n] of the finished text in one eager pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        seen = model(torch.tensor([ids]), output_attentions=True).attentions
    return torch.cat(seen).numpy()


def test_the_numbers_are_those_of_the_rows_that_were_generated(small, folder, tmp_path):
    experiment = small(
        prompts={"source": "math", "count": 2, "level": 1},
        queries=["generated", "predicts:generated", "all", "last", "after:question"],
        keys=["all", "question", "generated"],
        classes=["whole"],
        generate={"max_new_tokens": 6},
        measures=["mass", "entropy", "lambda", "profile"],
    )
    run(experiment, tmp_path / "run")
    opened = attnscope.open_run(tmp_path / "run")
    values, tokens = opened.values.collect(), opened.tokens.collect()
    model = AutoModelForCausalLM.from_pretrained(folder)
    planned = {(c.prompt, c.condition): c.tokens for c in make_plan(experiment).models[0].cells()}
    for cell in opened.cells.iter_rows(named=True):
        here = pl.col("prompt") == cell["prompt"], pl.col("condition") == cell["condition"]
        its = tokens.filter(*here)
        before = planned[cell["prompt"], cell["condition"]]
        given = torch.from_numpy(before.ids[None])
        output = model.generate(given, max_new_tokens=6, do_sample=False)[0, len(before) :].tolist()
        assert cell["generated_tokens"] == len(output)
        assert its["id"].to_list() == [*before.ids.tolist(), *output[:-1]]
        assert set(its.filter(role="generated")["position"]) == set(range(len(before), len(its)))
        dense = _dense(folder, its["id"].to_list())
        n, P = len(its), len(before)
        behind = int(np.flatnonzero(before.mask("question"))[-1]) + 1
        rows = {
            "generated": slice(P, n),
            "predicts:generated": slice(P - 1, n),
            "all": slice(0, n),
            "last": slice(P - 1, P),
            "after:question": slice(behind, n),
        }
        keys = {
            "all": np.ones(n, dtype=bool),
            "question": np.r_[before.mask("question"), np.zeros(n - P, dtype=bool)],
            "generated": np.arange(n) >= P,
        }
        mine = values.filter(*here, pl.col("measure") == "mass")
        for row in mine.iter_rows(named=True):
            part = dense[row["layer"], row["head"], rows[row["queries"]]]
            want = part[:, keys[row["keys"]]].sum(1).mean()
            assert row["value"] == pytest.approx(want, abs=1e-5), (row, n, P, behind)


def test_the_text_is_kept_and_comes_again(small, tmp_path):
    asked = {"queries": "generated", "measures": ["entropy"], "conditions": {"base": {}}}
    for seed, out in ((3, "one"), (3, "two"), (4, "other")):
        sampled = {"max_new_tokens": 5, "sample": True, "seed": seed}
        run(small(**asked, generate=sampled), tmp_path / out)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    texts = {
        out: attnscope.open_run(tmp_path / out).cells["generated"].to_list()
        for out in ("one", "other")
    }
    assert texts["one"] != texts["other"]
    assert all(isinstance(text, str) for text in texts["one"])
    for out in ("one", "other"):
        assert json.loads((tmp_path / out / "environment.json").read_text())["repeatable"] is True


def test_sampled_without_a_seed_is_recorded_as_unrepeatable(small, tmp_path):
    once = small(queries="generated", measures=["entropy"], generate={"sample": True})
    assert once.generate.seed is None
    run(once.with_keys(prompts={"source": "math", "count": 1}), tmp_path / "run")
    environment = attnscope.open_run(tmp_path / "run").environment
    assert environment["repeatable"] is False
    assert "generate" not in environment["seeds"]


def test_an_answer_of_one_token_has_no_generated_queries(small, tmp_path):
    asked = small(
        queries=["generated", "predicts:generated"],
        measures=["mass", "entropy"],
        generate={"max_new_tokens": 1},
        conditions={"base": {}},
        prompts={"source": "math", "count": 1},
    )
    run(asked, tmp_path / "run")
    values = attnscope.open_run(tmp_path / "run").values.collect()
    assert values.filter(queries="generated")["value"].is_null().all()
    assert (
        values.filter(queries="predicts:generated", measure="entropy")["value"].is_not_null().all()
    )


def test_predicts_a_region_is_that_region_one_earlier(small, folder, tmp_path):
    asked = small(queries=["predicts:question"], measures=["entropy"], conditions={"base": {}})
    run(asked, tmp_path / "run")
    values = attnscope.open_run(tmp_path / "run").values.collect()
    for cell in make_plan(asked).models[0].cells()[:2]:
        dense = _dense(folder, cell.tokens.ids.tolist())
        before = np.flatnonzero(cell.tokens.mask("question")) - 1
        rows = dense[:, :, before[before >= 0]]
        entropy = -(rows * np.log(np.where(rows > 0, rows, 1))).sum(-1).mean(-1)
        mine = values.filter(prompt=cell.prompt).sort("layer", "head")["value"].to_numpy()
        np.testing.assert_allclose(mine, entropy.ravel(), atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"generate": {"seed": 1}}, "needs-sampling"),
        ({"generate": {"max_new_tokens": 0}}, "bad-value"),
        ({"queries": ["generated", "sample:8"]}, "sample-with-generate"),
        ({"queries": "generated", "measures": ["flow"]}, "measure-with-generate"),
        ({"queries": "generated", "measures": ["affine"]}, "measure-with-generate"),
        ({"queries": "predicts:"}, "unknown-queries"),
    ],
)
def test_what_cannot_be_measured_during_generation(small, keys, code):
    with raises(InputError, code):
        small(**keys)


def test_a_completion_beyond_the_models_positions_is_refused(small):
    asked = small(queries="generated", generate={"max_new_tokens": 100_000}, measures=["mass"])
    with raises(InputError, "too-many-tokens", prompt=0):
        make_plan(asked)


def test_a_model_that_cannot_generate_is_refused(small, tmp_path):
    encoder = save_model(tmp_path / "encoder", kind="bert", chat=False)
    with raises(InputError, "cannot-generate"):
        make_plan(small(models=[encoder], queries="generated", measures=["mass"], chat=False))


def test_what_is_copied_and_looked_back_at(small, folder, tmp_path):
    """Lookback, retrieval and masses by step against the papers' formulas on dense attention."""
    asked = small(
        prompts={"source": "math", "count": 2, "level": 1},
        queries=["predicts:generated"],
        keys=["question", "all"],
        classes=["whole"],
        generate={"max_new_tokens": 24},
        measures=["lookback", "retrieval", "step_mass"],
        conditions={"base": {}},
    )
    run(asked, tmp_path / "run")
    opened = attnscope.open_run(tmp_path / "run")
    values, tokens = opened.values.collect(), opened.tokens.collect()
    model = AutoModelForCausalLM.from_pretrained(folder)
    copied = 0
    for cell in opened.cells.iter_rows(named=True):
        its = tokens.filter(prompt=cell["prompt"])
        ids = its["id"].to_list()
        P = its.filter(pl.col("role") != "generated").height
        output = model.generate(torch.tensor([ids[:P]]), max_new_tokens=24, do_sample=False)
        full = output[0].tolist()
        dense = _dense(folder, ids)
        masks = {
            "question": its["regions"].list.contains("question").to_numpy(),
            "all": np.ones(len(ids), dtype=bool),
        }
        for row in values.filter(prompt=cell["prompt"]).iter_rows(named=True):
            A = dense[row["layer"], row["head"]]
            if row["measure"] == "step_mass":
                at, mask = P - 2 + int(row["target"]), masks[row["keys"]]
                if at >= len(ids):
                    assert row["value"] is None
                    continue
                want = A[at, mask].sum()
            elif row["measure"] == "retrieval":
                mask = masks[row["keys"]]
                top = {t: int(A[t].argmax()) for t in range(P - 1, len(ids))}
                hits = {j for t, j in top.items() if mask[j] and ids[j] == full[t + 1]}
                want = len(hits) / mask.sum()
                copied += len(hits)
            else:
                ratios = []
                for t in range(P, len(ids)):
                    context, new = A[t, :P].sum(), A[t, P:].sum()
                    if row["measure"] == "lookback_per_token":
                        context, new = context / P, new / (t - P + 1)
                    ratios.append(context / (context + new))
                want = np.mean(ratios)
            assert row["value"] == pytest.approx(want, abs=1e-5), row
    assert copied  # else nothing was tried


def test_measures_of_completions_need_a_completion(small):
    with raises(InputError, "needs-completion", measure="lookback"):
        small(measures=["lookback"])


def test_random_tokens_twice_over(small, folder, tmp_path):
    asked = small(
        prompts={"source": "tokens", "count": 2, "length": 9, "repeats": 2},
        queries=["region:repeat:2"],
        measures=["induction"],
        conditions={"base": {}},
    )
    run(asked, tmp_path / "run")
    opened = attnscope.open_run(tmp_path / "run")
    values = opened.values.collect()
    for prompt in range(2):
        ids = opened.tokens.collect().filter(prompt=prompt)["id"].to_list()
        assert ids[:9] == ids[9:]
        assert len(set(ids)) == 9
        dense = _dense(folder, ids)
        want = np.mean([dense[:, :, i, i - 9 + 1] for i in range(9, 18)], axis=0)
        mine = values.filter(prompt=prompt).sort("layer", "head")["value"].to_numpy()
        np.testing.assert_allclose(mine, want.ravel(), atol=1e-5)
    with raises(InputError, "vocabulary-too-small", needed=50_000):
        make_plan(asked.with_keys(prompts={"source": "tokens", "length": 50_000}))
    with raises(InputError, "tokens-with-chat"):
        small(prompts={"source": "tokens"}, chat=True)


def test_texts_are_cut_and_drawn_at_random(small):
    asked = small(truncate=20, conditions={"base": {}, "drawn": {"random": 0}}, measures=["mass"])
    cells = make_plan(asked).models[0].cells()
    assert {len(cell.tokens) for cell in cells} == {20}
    drawn = [cell for cell in cells if cell.condition == "drawn"]
    assert len({tuple(cell.tokens.ids) for cell in drawn}) == len(drawn) == 6


ANSWERED = {
    "prompts": {"source": "math", "count": 3},
    "queries": ["generated", "predicts:generated", "all", "last", "after:question"],
    "keys": ["all", "question", "generated"],
    "classes": ["whole"],
    "measures": [
        "mass",
        "entropy",
        "distance",
        "first_token",
        "previous_token",
        "induction",
        "by_distance",
        "largest",
        "lookback",
        "retrieval",
        "step_mass",
        "query_mass",
        "query_weight",
        "lambda",
        "profile",
    ],
    "conditions": {
        "base": {},
        "filler": {"insert": {"count": 9}},
        "cut": {"knockout": {"region": "question"}},
    },
}


@pytest.mark.parametrize(
    "generate",
    [
        {"max_new_tokens": 7},
        {"max_new_tokens": 7, "sample": True, "seed": 5, "temperature": 1.3, "top_p": 0.9},
    ],
    ids=["greedy", "sampled"],
)
def test_a_batch_answers_as_each_prompt_alone(small, tmp_path, monkeypatch, generate):
    """Prompts of different lengths, padded on the left, some of whose answers end early."""
    monkeypatch.setattr(plan, "PADDING", {})
    ends = save_model(tmp_path / "ends")
    settings = json.loads((tmp_path / "ends" / "generation_config.json").read_text())
    settings["eos_token_id"] = list(range(2, 400, 5))
    (tmp_path / "ends" / "generation_config.json").write_text(json.dumps(settings))
    found = {}
    for out, budget in (("alone", 1), ("together", 100_000)):
        asked = small(**ANSWERED, models={"tiny": ends}, generate=generate, batch_tokens=budget)
        run(asked, tmp_path / out)
        found[out] = attnscope.open_run(tmp_path / out)
    alone, together = found["alone"], found["together"]
    assert (len(alone.batches), len(together.batches)) == (3, 1)
    order = ["prompt", "condition"]
    texts = [run.cells.sort(order).drop("cell") for run in (alone, together)]
    assert_frame_equal(*texts)
    assert texts[0]["tokens"].n_unique() > 2
    assert 1 < texts[0]["generated_tokens"].n_unique() < 7
    tables = {
        "values": [
            "model",
            *order,
            "queries",
            "keys",
            "layer",
            "head",
            "measure",
            "item",
            "target",
        ],
        "positions": [*order, "queries", "layer", "head", "position"],
        "by_query": [*order, "queries", "keys", "layer", "head", "measure", "item", "position"],
        "tokens": [*order, "position"],
    }
    for table, by in tables.items():
        both = [getattr(run, table).collect().sort(by) for run in (alone, together)]
        assert_frame_equal(*both, abs_tol=2e-5, rel_tol=2e-5)
        assert both[0].height > 100


def test_answers_are_drawn_by_the_probabilities_of_their_tokens():
    """Gumbel numbers on logits: as often as the softmax says, and never what top-p leaves out."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    draw = Drawn([_gumbels(1 + n) for n in range(4000)], 1.0, top_p=0.9)
    drawn = draw(torch.zeros(4000, 1).long(), logits).argmax(1)
    often = torch.bincount(drawn, minlength=4) / 4000
    wanted = torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95
    torch.testing.assert_close(often, wanted, rtol=0, atol=0.03)
    draw = Drawn([_gumbels(1 + n) for n in range(1000)], 1.0, top_p=0.9)
    again = draw(torch.zeros(1000, 1).long(), logits[:1000]).argmax(1)
    assert torch.equal(again, drawn[:1000])  # whatever else is in the batch


def test_an_answer_ends_where_the_tokenizer_says_too(tmp_path):
    """A fine-tune, whose tokenizer names the end that it learnt and whose configuration does not:
    it went on until there was no room."""
    folder = tmp_path / "model"
    shutil.copytree(Path(zoo.__file__).parent / "math-qwen2", folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 5}))
    experiment = Experiment(
        name="ends",
        models={"tuned": str(folder)},
        prompts={"source": "math", "count": 1, "level": 1},
        conditions={"base": {}},
        queries=["last"],
        measures=["entropy"],
        generate={"max_new_tokens": 60},
    )
    run(experiment, tmp_path / "run")
    cell = attnscope.open_run(tmp_path / "run").cells.row(0, named=True)
    assert cell["generated_tokens"] < 60
    assert cell["generated"].count("The answer is") == 1
