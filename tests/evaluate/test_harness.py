"""Tasks of lm-evaluation-harness get the same scores as our own evaluation."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

import attnscope
from attnscope.errors import InputError
from attnscope.evaluate.conditions import parse
from attnscope.evaluate.evaluation import Evaluation, evaluate
from attnscope.experiment.plan import make_plan
from attnscope.prompts import math_samples
from attnscope.report import build
from attnscope.run.store import open_run
from attnscope.stats.run_stats import compare_run
from attnscope.tokens import DEFAULT
from support_errors import raises

pytest.importorskip("lm_eval", reason="the extra attnscope[eval] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and its packages

MODEL = "zoo:math-qwen2"
CONDITIONS = ["baseline", "arm:share=0.3", "filler:9", "knockout:digit"]
COUNT = 4


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks on the same problems: one with completions, one with choices."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = []
    for sample in math_samples(COUNT, seed=77, level=1):
        right = int(sample.answer)
        prompt = f"{sample.prompt.text}\n\n"
        lines.append(
            {
                "prompt": prompt,
                "answer": str(right),
                "choices": [str(right + n) for n in (1, 0, -3)],
            }
        )
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {folder / "cache"}}}
test_split: test
doc_to_text: "{{{{prompt}}}}"
"""
    (folder / "generated.yaml").write_text(
        f"""task: generated{data}output_type: generate_until
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["The answer"], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
    )
    (folder / "chosen.yaml").write_text(
        f"""task: chosen{data}output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 1
target_delimiter: " The answer is "
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    return folder


@pytest.fixture(scope="module")
def found(tasks: Path) -> dict[str, pl.DataFrame]:
    return {
        name: evaluate(
            Evaluation(model=MODEL, task=str(tasks / f"{name}.yaml"), problems=COUNT, chat=False),
            CONDITIONS,
            tasks / name,
            batch=3,
        )
        for name in ("generated", "chosen")
    }


def completions(folder: Path) -> list[dict[str, Any]]:
    return open_run(folder).completions.to_dicts()


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_completions_equal_those_of_our_own_evaluation(
    tasks: Path, found: dict[str, pl.DataFrame]
) -> None:
    asked = Evaluation(model=MODEL, task=str(tasks / "problems.jsonl"), problems=COUNT, chat=False)
    evaluate(asked, CONDITIONS, tasks / "own")
    own = {(r["condition"], r["prompt"]): r["completion"] for r in completions(tasks / "own")}
    harness = completions(tasks / "generated")
    assert len(harness) == len(own) == COUNT * len(CONDITIONS)
    for row in harness:
        expected = own[row["condition"], row["prompt"]].split("The answer")[0]
        assert expected.startswith(row["completion"])  # the harness stops after 24 tokens
        assert len(row["completion"]) > 10 or row["completion"] == expected
    by = {name: [r["completion"] for r in harness if r["condition"] == name] for name in CONDITIONS}
    assert by["baseline"] != by["filler:9"]
    assert by["baseline"] != by["knockout:digit"]


@torch.no_grad()
def test_choices_equal_those_of_single_forward_passes(
    tasks: Path, found: dict[str, pl.DataFrame]
) -> None:
    """Without batches, padding or code of evaluations."""
    model, tokenizer = attnscope.load(MODEL)
    right: dict[str, list[float]] = {name: [] for name in CONDITIONS}
    for n, problem in enumerate(lines(tasks / "problems.jsonl")):
        for name in CONDITIONS:
            text = problem["prompt"]
            if name == "filler:9":
                text = "/" * 9 + "\n" + text
            likely = [_likely(model, tokenizer, name, text, c) for c in problem["choices"]]
            right[name].append(float(np.argmax(likely) == 1))
            row = next(
                r
                for r in completions(tasks / "chosen")
                if (r["condition"], r["prompt"]) == (name, n)
            )
            stored = [
                float(part.split(",")[0].strip("([")) for part in row["completion"].split(" | ")
            ]
            assert np.allclose(stored, likely, atol=1e-3)
    table = found["chosen"].rows_by_key("condition", named=True, unique=True)
    for name in CONDITIONS:
        assert table[name]["score"] == pytest.approx(np.mean(right[name]))


def _likely(model: Any, tokenizer: Any, name: str, text: str, choice: str) -> float:
    context = tokenizer(text.rstrip())["input_ids"]
    whole = torch.tensor([tokenizer(f"{text} The answer is {choice}")["input_ids"]])
    block: Any = attnscope.watch(model)
    if name.startswith("arm"):
        block = attnscope.arm(model, share=0.3)
    if name.startswith("knockout"):
        digits: Tensor = torch.from_numpy(DEFAULT.ids(whole.numpy(), tokenizer))
        keys = (digits == DEFAULT.index("digit")) & (torch.arange(whole.shape[1]) < len(context))
        block = attnscope.knockout(model, keys=keys)
    with block:
        logits = model(input_ids=whole).logits.log_softmax(-1)[0, :-1]
    each = logits.gather(1, whole[0, 1:, None])[len(context) - 1 :]
    return float(each.sum())


@pytest.mark.slow
def test_the_run_has_the_attention(tasks: Path, found: dict[str, pl.DataFrame]) -> None:
    run = open_run(tasks / "generated")
    assert run.complete
    assert run.prompts["document"].to_list() == list(range(COUNT))
    values = run.values.collect()
    assert set(values["measure"]) == {"entropy", "first_token", "mass"}
    assert values["prompt"].n_unique() == COUNT
    mass = values.filter(pl.col("measure") == "mass")
    keys = ["condition", "prompt", "layer", "head"]
    assert np.allclose(mass.group_by(keys).agg(pl.col("value").sum())["value"], 1, atol=1e-4)
    cut = mass.filter(pl.col("condition") == "knockout:digit", pl.col("item") == "digit")
    assert cut["value"].max() == 0
    assert found["generated"]["entropy"].null_count() == 0
    assert compare_run(run).filter(measure="entropy").height > 0
    assert "<h3>Scores</h3>" in build(run)


def test_finished_conditions_are_not_repeated(
    tasks: Path, found: dict[str, pl.DataFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnscope.evaluate import harness_run

    asked = Evaluation(model=MODEL, task=str(tasks / "generated.yaml"), problems=COUNT, chat=False)
    whole, part = tasks / "generated", tmp_path / "part"
    shutil.copytree(whole, part)
    (part / "manifest.json").unlink()
    lost = json.loads((part / "plan.json").read_text())["batches"][2]
    (part / "cells" / f"{lost}.json").unlink()
    measured: list[Any] = []
    run_task = harness_run.run_task

    def counted(lm: Any, *arguments: Any, **options: Any) -> Any:
        measured.append(lm.condition)
        return run_task(lm, *arguments, **options)

    monkeypatch.setattr(harness_run, "run_task", counted)
    assert evaluate(asked, CONDITIONS, part, batch=3).equals(found["generated"])
    assert measured == [parse("filler:9")]
    assert (part / "cells" / f"{lost}.json").read_bytes() == (
        whole / "cells" / f"{lost}.json"
    ).read_bytes()
    assert evaluate(asked, CONDITIONS, part).equals(found["generated"])
    assert len(measured) == 1


def test_an_experiment_of_the_harness_is_measured_by_evaluate(
    tasks: Path, found: dict[str, pl.DataFrame]
) -> None:
    with pytest.raises(InputError) as error:
        make_plan(open_run(tasks / "generated").experiment)
    assert error.value.code == "harness-prompts"


def test_the_filler_is_before_the_question_of_a_chat() -> None:
    from attnscope.evaluate.harness import ConditionedLM

    model, tokenizer = attnscope.load(MODEL)
    lm = ConditionedLM(model, tokenizer, parse("filler:9"))
    text = lm.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    )
    put = lm._changed(SimpleNamespace(doc_id=0), text).prompt.text
    assert put.index("Be brief.") < put.index("/////////") < put.index("1 + 1?")


@pytest.mark.parametrize("condition", ["filler:9", "knockout:digit", "steer:digit:2"])
def test_conditions_that_change_a_missing_context_are_refused(condition: str) -> None:
    """Else the condition would do nothing, and the difference would be exactly 0."""
    from attnscope.evaluate.harness import ConditionedLM

    model, tokenizer = attnscope.load(MODEL)
    request = SimpleNamespace(args=("", " 1 + 1 = 2"), task_name="none", doc_id=0)
    (bare,) = ConditionedLM(model, tokenizer, parse("baseline")).loglikelihood([request])
    assert bare[0] < 0
    with pytest.raises(InputError) as error:
        ConditionedLM(model, tokenizer, parse(condition)).loglikelihood([request])
    assert error.value.code == "no-context"
    assert error.value.values["condition"] == parse(condition).kind
    with pytest.raises(InputError) as error:
        ConditionedLM(model, tokenizer, parse(condition)).loglikelihood_rolling([])
    assert error.value.code == "no-context"


def test_a_text_longer_than_the_positions_is_refused() -> None:
    from attnscope.evaluate.harness import ConditionedLM

    model, tokenizer = attnscope.load(MODEL)
    lm = ConditionedLM(model, tokenizer, parse("filler:5000:a"))
    request = SimpleNamespace(args=("1 + 1 =", " 2"), task_name="none", doc_id=0)
    with pytest.raises(InputError) as error:
        lm.loglikelihood([request])
    assert error.value.code == "too-many-tokens"


def test_bad_tasks_are_refused(tasks: Path, tmp_path: Path) -> None:
    from attnscope.evaluate.harness import _generation_settings

    asked = Evaluation(model=MODEL, task=str(tmp_path / "none.yaml"), problems=1)
    with raises(InputError, "file-missing"):
        evaluate(asked, ["baseline"])
    (tmp_path / "bad.yaml").write_text("task: bad\noutput_type: nothing\n")
    asked = Evaluation(model=MODEL, task=str(tmp_path / "bad.yaml"), problems=1)
    with raises(InputError, "task-refused"):
        evaluate(asked, ["baseline"])
    chosen = (tasks / "chosen.yaml").read_text()
    for name, right in (("beyond", "doc_to_target: 3"), ("template", 'doc_to_target: "{{answer"')):
        file = tmp_path / f"{name}.yaml"
        file.write_text(chosen.replace("doc_to_target: 1", right))
        with raises(InputError, "task-refused"):
            evaluate(Evaluation(model=MODEL, task=str(file), problems=1), ["baseline"])
    assert _generation_settings({"until": "\n", "do_sample": False, "temperature": 0.7}) == (
        256,
        0.0,
        ("\n",),
    )
    with raises(InputError, "unsupported-argument", argument="num_beams", value=4):
        _generation_settings({"num_beams": 4})
