"""Tasks from a file: rules of judging, choices by likelihood, classes of one's own, intervals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from scipy.stats import beta

import attnscope
from attnscope.errors import InputError
from attnscope.evaluate.evaluation import Evaluation, evaluate, measure_effects
from attnscope.evaluate.tasks import MATCHES, find_task
from attnscope.report.scores import compare_with_base, score_table
from attnscope.run.store import open_run
from attnscope.stats.proportions import wilson
from attnscope.tokens import apply_chat_template, load_classes, tokenize
from attnscope.tokens.chat import as_question
from support_errors import raises

MODEL = "zoo:math-qwen2"
WORDS = "classes: [{name: sum, words: [1 + 1]}, {name: other, every: token}]\n"


def write(folder: Path, records: list[dict[str, Any]]) -> str:
    file = folder / "own.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.mark.parametrize(
    ("match", "answer", "completion", "right"),
    [
        ("exact", "No", "No", True),
        ("exact", "No", "No.", False),
        ("starts-with", "No", "No, there is no bread.", True),
        ("starts-with", "No", " no.", True),
        ("starts-with", "No", "None of them", False),
        ("starts-with", "No", "Oh no", False),
        ("contains", "no bread", "There is  No\nbread.", True),
        ("contains", "no", "I know", False),
        ("regex", r"^\s*(No|Nope)\b", "Nope.", True),
        ("regex", r"^No$", "No.", False),
    ],
)
def test_rules(match: str, answer: str, completion: str, right: bool) -> None:
    assert MATCHES[match](answer, completion) is right


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choices")
    (folder / "classes.yaml").write_text(WORDS)
    records = [
        {"prompt": "1 + 1 =", "answer": "2", "choices": ["2", "3", "seven and a half"]},
        {"prompt": "What is 2 + 2?", "answer": "5", "choices": ["4", "5"]},
    ]
    asked = Evaluation(
        model=MODEL,
        task=write(folder, records),
        match="choices",
        classes=str(folder / "classes.yaml"),
    )
    conditions = ["baseline", "filler:5", "knockout:sum"]
    evaluate(asked, conditions, folder / "run")
    before = (folder / "run" / "completions.parquet").stat().st_mtime_ns
    evaluate(asked, conditions, folder / "run")
    assert (folder / "run" / "completions.parquet").stat().st_mtime_ns == before
    return folder / "run"


def logprob(model: Any, context: list[int], ids: list[int], cut: Any) -> float:
    together = torch.tensor([[*context, *ids]])
    with torch.no_grad():
        if cut is not None:
            keys = torch.nn.functional.pad(cut, (0, len(ids)))
            with attnscope.knockout(model, keys=keys):
                logits = model(together).logits
        else:
            logits = model(together).logits
    each = logits.double().log_softmax(-1)[0, :-1].gather(1, together[0, 1:, None])
    return float(each[len(context) - 1 :].sum())


def test_choices_are_those_of_single_forward_passes(chosen: Path) -> None:
    run = open_run(chosen)
    model, tokenizer = attnscope.load(MODEL)
    rows = run.completions.filter(metric="probability").rows_by_key(
        ["prompt", "condition"], named=True, unique=True
    )
    prompt = apply_chat_template(as_question("1 + 1 =", tokenizer, chat=False), tokenizer)
    context = tokenize(prompt, tokenizer).ids.tolist()
    new = [
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in ("2", "3", "seven and a half")
    ]
    assert len({len(ids) for ids in new}) > 1
    keys = load_classes(chosen.parent / "classes.yaml").ids(np.array([context]), tokenizer) == 0
    assert keys.sum() > 1
    for condition, cut in (("baseline", None), ("knockout:sum", torch.from_numpy(keys))):
        values = np.array([logprob(model, context, ids, cut) for ids in new])
        row = rows[0, condition]
        expected = np.exp(values[0]) / np.exp(values).sum()
        assert row["value"] == pytest.approx(expected, rel=1e-4)
        assert row["completion"] == ("2", "3", "seven and a half")[values.argmax()]
    assert rows[0, "baseline"]["value"] != pytest.approx(rows[0, "knockout:sum"]["value"], rel=1e-3)
    # The second prompt has no such words, so this condition changes nothing there.
    assert rows[1, "baseline"]["value"] == pytest.approx(rows[1, "knockout:sum"]["value"], rel=1e-5)


def test_the_run_of_choices_has_no_completions(chosen: Path) -> None:
    run = open_run(chosen)
    assert run.experiment.generate is None
    assert run.cells["generated"].null_count() == run.cells.height == 6
    right = run.completions.filter(metric="right (choices)")
    assert (
        right["value"].to_list() == (right["completion"] == right["answer"]).cast(float).to_list()
    )
    assert set(run.values.filter(measure="mass").collect()["item"]) == {"sum", "other"}
    table = score_table(run)
    assert table["metric"].unique(maintain_order=True).to_list() == [
        "right (choices)",
        "probability",
    ]


def test_classes_of_ones_own_in_effects(tmp_path: Path) -> None:
    (tmp_path / "classes.yaml").write_text(WORDS)
    asked = Evaluation(
        model=MODEL,
        task=write(tmp_path, [{"prompt": "1 + 1 =", "answer": "2"}]),
        classes=str(tmp_path / "classes.yaml"),
    )
    table = measure_effects(asked, ["sum"], tmp_path, layers=[0])
    assert table.height == 12
    assert (table["effect"] != 0).any()


@pytest.mark.parametrize(
    ("choices", "answer"),
    [(None, "2"), (["2"], "2"), (["1", "3"], "2"), (["2", "2"], "2"), ([1, "2"], "2")],
)
def test_bad_choices_are_refused(tmp_path: Path, choices: Any, answer: str) -> None:
    record = {"prompt": "1 + 1 =", "answer": answer, "choices": choices}
    asked = Evaluation(model=MODEL, task=write(tmp_path, [record]), match="choices")
    with raises(InputError, "bad-choices", problem=0, value=choices):
        evaluate(asked, ["baseline"])


def test_bad_rules_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, [{"prompt": "1 + 1 =", "answer": "(", "choices": ["a", "b"]}])
    with raises(InputError, "unknown-match", value="ends-with"):
        find_task(file, 1, match="ends-with")
    with raises(InputError, "unsupported-argument", match="contains", task="math"):
        find_task("math", 1, match="contains")
    with raises(InputError, "bad-pattern", pattern="(", problem=0):
        evaluate(Evaluation(model=MODEL, task=file, match="regex"), ["baseline"])
    with raises(InputError, "unsupported-argument", samples=2):
        asked = Evaluation(model=MODEL, task=file, match="choices", samples=2)
        evaluate(asked, ["baseline"])


def test_every_score_has_an_interval() -> None:
    right = np.array([1.0] * 15 + [0.0] * 5)
    shares = np.linspace(0.2, 0.9, 20)
    scores = {"baseline": right, "arm": shares}
    rows = compare_with_base(scores, "baseline").rows_by_key("condition", named=True, unique=True)
    low, high = wilson(right)
    assert (rows["baseline"]["score_low"], rows["baseline"]["score_high"]) == (low, high)
    # Wilson's interval lies inside that of Clopper and Pearson, which is conservative.
    assert beta.ppf(0.025, 15, 6) < low < 0.75 < high < beta.ppf(0.975, 16, 5)
    mean = shares.mean()
    assert 0 < rows["arm"]["score_low"] < mean < rows["arm"]["score_high"] < 1
    few = compare_with_base({"baseline": right[:5]}, "baseline")
    assert few["score_low"].dtype == pl.Float64
    assert few["score_low"].is_null().all()
    assert wilson(np.zeros(8))[0] == 0
    assert wilson(np.ones(8))[1] == 1
