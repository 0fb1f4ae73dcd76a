"""Evaluation: scores are right, and an evaluation is a run that every reader opens."""

import io
import math
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from typer.testing import CliRunner

import attnscope
from attnscope.cli import app
from attnscope.errors import InputError
from attnscope.evaluate.conditions import expand, parse, parse_conditions, settings
from attnscope.evaluate.evaluation import Evaluation, evaluate, measure_effects
from attnscope.evaluate.tasks import answers_of, find_task, same_text
from attnscope.experiment.prompt_list import samples_of
from attnscope.prompts.number_answers import same_number
from attnscope.report import build
from attnscope.report.scores import compare_with_base, pass_at, score_table
from attnscope.run.store import open_run
from attnscope.spec.conditions import ArmSpec, Condition, Insert, KnockoutSpec, SteerSpec
from attnscope.tokens import DEFAULT, apply_chat_template, tokenize_all
from picture_models import model_folder, picture, write_prompts
from support_errors import raises

MODEL = "zoo:math-qwen2"


CONDITIONS = ["baseline", "filler:9", "arm"]
ASKED = Evaluation(model=MODEL, problems=3, level=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evaluation") / "run"
    evaluate(ASKED, CONDITIONS, out)
    return out


def test_pass_at_k_is_what_all_choices_give() -> None:
    for n in (1, 4, 6):
        for right in range(n + 1):
            for k in range(1, n + 1):
                marks = [True] * right + [False] * (n - right)
                every = [any(some) for some in combinations(marks, k)]
                assert pass_at(k, n, right) == pytest.approx(np.mean(every))
    with raises(InputError, "too-few-samples", k=3, samples=2):
        pass_at(3, 2, 1)


def test_scores_are_paired_by_problem() -> None:
    """Equal accuracy gives a difference of 0; more solved problems give their share."""
    right = {"baseline": [1, 0] * 10, "filler": [0, 1] * 10, "arm": [1] * 20}
    scores = {name: np.array(hits, dtype=float) for name, hits in right.items()}
    found = compare_with_base(scores, "baseline").rows_by_key("condition", named=True, unique=True)
    assert found["baseline"]["score"] == 0.5
    assert found["baseline"]["difference"] is None
    assert found["filler"]["difference"] == pytest.approx(0)
    assert found["filler"]["p"] > 0.9
    assert found["arm"]["difference"] == pytest.approx(0.5)
    assert 0.2 < found["arm"]["low"] < 0.5 < found["arm"]["high"] < 0.8
    assert found["arm"]["p"] < 0.01


def test_texts_are_judged_exactly() -> None:
    assert same_text("up", " up\n")
    assert not same_text("up", "up or not")
    assert not same_number("12", "I do not know")
    assert not same_number("12", "The answer is 120, or 12")


@pytest.mark.parametrize(
    ("answer", "number", "right"),
    [
        ("12", "12", True),
        ("12", "12.", True),
        ("12", "12.0", True),
        ("12", "12.00", True),
        ("12", "$12", True),
        ("12", "$12.00.", True),
        ("12", "**12**", True),
        ("12", "12%", True),
        ("12", "12 apples", True),
        ("12", "24/2", True),
        ("12", "12.5", False),
        ("12", "12.50", False),
        ("12", "0.12", False),
        ("12", ".12", False),
        ("12", "-12", False),
        ("12", "1/12", False),
        ("12", "12/5", False),
        ("12", "12 1/2", False),
        ("12", "12/0", False),
        ("12", "112", False),
        ("12", "1.2e1", True),
        ("12", "12e3", False),
        ("2", "1/2", False),
        ("1200", "1,200", True),
        ("1200", "1,200.00", True),
        ("120000", "1,20,000", True),
        ("200", "1,200", False),
        ("1200", "1, 200", False),
        ("-12", "-12", True),
        ("-12", "\u221212", True),
        ("-12", "-$12.00", True),
        ("-12", "$-12", True),
        ("-12", "12", False),
        ("0", "-0.0", True),
        ("5", "4.999999999999999999999", False),
        ("5", "9" * 5000, False),
    ],
)
def test_numbers_are_judged_by_their_value(answer: str, number: str, right: bool) -> None:
    assert same_number(answer, f"It had 7. The answer is {number}") is right
    assert same_number(answer, f"First 7, so he has {number}") is right


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("20-8=12", True),
        ("it is 24-12", True),  # an operator, no sign
        ("7, 9, 12", True),
        ("12, 13", False),
        ("- 12 apples", True),  # an item of a list
        ("The answer is 12, not 13.", True),
        ("The answer is: 12", True),
        ("twelve", False),
    ],
)
def test_which_number_of_a_completion_is_judged(completion: str, right: bool) -> None:
    assert same_number("12", completion) is right


def test_an_evaluation_is_a_run(folder: Path) -> None:
    run = open_run(folder)
    assert run.complete
    assert run.experiment.conditions == parse_conditions(CONDITIONS)
    answers = answers_of(run.experiment)
    rows = run.completions.to_dicts()
    assert len(rows) == run.cells.height == 9
    for row, cell in zip(rows, run.cells.to_dicts(), strict=True):
        assert (row["prompt"], row["condition"]) == (cell["prompt"], cell["condition"])
        assert row["completion"] == cell["generated"]
        assert row["answer"] == answers[row["prompt"]]
        assert row["value"] == same_number(row["answer"], row["completion"])
    table = score_table(run)
    assert table["condition"].to_list() == CONDITIONS
    assert table["problems"].to_list() == [3, 3, 3]
    entropy = run.values.filter(measure="entropy", condition="arm").collect()["value"].mean()
    assert table.row(2, named=True)["entropy"] == pytest.approx(entropy)


@pytest.mark.slow
def test_every_reader_opens_an_evaluation(folder: Path) -> None:
    invoke = CliRunner().invoke
    asked = "SELECT condition, AVG(value) AS score FROM completions GROUP BY condition"
    assert "filler:9" in invoke(app, ["query", str(folder), asked]).stdout
    compared = invoke(app, ["compare", str(folder), "--measure", "entropy", "--layer", "0"])
    assert compared.exit_code == 0, compared.output
    scores = score_table(open_run(folder))
    assert f"{scores['score'][1]:.3f}" in compared.stdout
    text = build(open_run(folder))
    assert "<h3>Scores</h3>" in text


def test_an_evaluation_continues_where_it_stopped(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part"
    shutil.copytree(folder, part)
    (part / "manifest.json").unlink()
    (part / "completions.parquet").unlink()
    lost = sorted((part / "cells").glob("*.json"))[0]
    lost.unlink()
    table = evaluate(ASKED, CONDITIONS, part)
    assert table.equals(score_table(open_run(folder)))
    for name in ("manifest.json", "completions.parquet", f"cells/{lost.name}"):
        assert (part / name).read_bytes() == (folder / name).read_bytes()
    with raises(InputError, "other-experiment", folder=str(part), keys=["prompts"]):
        evaluate(Evaluation(model=MODEL, problems=7, level=1), CONDITIONS, part)


def test_changed_completions_are_damage(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    file = tmp_path / "run" / "completions.parquet"
    run = open_run(tmp_path / "run")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(InputError) as error:
        _ = run.completions
    assert error.value.code == "damaged-run"
    with pytest.raises(InputError) as error:
        open_run(tmp_path / "run")
    assert error.value.code == "damaged-run"


def test_samples_of_a_problem_differ_and_are_scored_together() -> None:
    asked = Evaluation(model=MODEL, problems=2, samples=3, temperature=1.5, level=1)
    assert evaluate(asked, ["baseline"])["problems"].to_list() == [2]
    experiment = asked.experiment_of(["baseline"], asked.find_task())
    assert len(samples_of(experiment)) == 6
    assert experiment.generate is not None
    assert experiment.generate.seed == asked.seed


def test_a_prompt_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(InputError) as error:
        evaluate(ASKED, ["filler:5000:a"])
    assert error.value.code == "too-many-tokens"
    assert error.value.values["condition"] == "filler:5000:a"


def test_problems_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": "2 + 2 =", "answer": 4}\n')
    asked = Evaluation(model=MODEL, task=str(file), problems=10)
    experiment = asked.experiment_of(["baseline"], asked.find_task())
    assert answers_of(experiment) == ["2", "4"]
    file.write_text('{"prompt": "1 + 1 ="}\n')
    with raises(InputError, "missing-field", field="answer", problem=0):
        evaluate(asked, ["baseline"])


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("baseline", Condition()),
        ("filler", Condition(insert=Insert())),
        ("filler:7:/@end", Condition(insert=Insert(count=7, unit="/"), position="end")),
        ("filler@random", Condition(insert=Insert(), position="random")),
        ("arm", Condition(arm=ArmSpec())),
        ("arm:layer=3,c=0.5", Condition(arm=ArmSpec(layers=(3,), c=0.5))),
        ("knockout:hash@maps", Condition(knockout=KnockoutSpec(tokens="hash", region="maps"))),
        ("steer:digit:2", Condition(steer=SteerSpec(tokens="digit", factor=2))),
    ],
)
def test_words_are_conditions_of_an_experiment(text: str, condition: Condition) -> None:
    assert parse(text) == condition


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("filer", "unknown-condition", {"value": "filer"}),
        ("steer:hash", "not-a-number", {"value": ""}),
        ("steer:hash:-2", "bad-value", {"value": -2}),
        ("arm:p2=3", "unknown-key", {"value": "arm.p2"}),
        ("arm:c=x", "not-a-number", {"value": "x"}),
        ("knockout:", "no-keys-chosen", {}),
        ("filler:x", "bad-condition", {"condition": "filler:x"}),
        ("baseline:x", "bad-condition", {"condition": "baseline:x"}),
        ("knockout:hash:2", "bad-condition", {"condition": "knockout:hash:2"}),
    ],
)
def test_bad_conditions_are_refused(text: str, code: str, values: dict[str, Any]) -> None:
    with raises(InputError, code, **values):
        parse(text)


def test_bars_expand_to_every_combination() -> None:
    assert expand("arm:c=0.1|0.2,p1=70|90") == [
        "arm:c=0.1,p1=70",
        "arm:c=0.1,p1=90",
        "arm:c=0.2,p1=70",
        "arm:c=0.2,p1=90",
    ]
    assert expand("baseline") == ["baseline"]
    filler = {"length": "7", "unit": "/", "position": "end"}
    assert settings(parse("filler:7:/@end")) == filler
    assert settings(parse("arm:layer=3,c=0.5")) == {"layer": "3", "c": "0.5"}
    with raises(InputError, "bad-condition", condition="filler:7|"):
        expand("filler:7|")
    with raises(InputError, "unknown-position", value="middle"):
        parse("filler:7@middle")


@pytest.mark.slow
def test_a_sweep_has_a_figure(tmp_path: Path) -> None:
    """Length and position of a filler, a setting and the layer of ARM: one command."""
    asked = Evaluation(model=MODEL, problems=2, level=1)
    words = ["baseline", "filler:3|9@between|end", "arm:c=0.1|0.4", "arm:layer=0|2"]
    found = evaluate(asked, words, tmp_path)
    assert len(found) == 9
    drawn = pl.read_csv(tmp_path / "figures" / "sweep.csv")
    assert drawn["panel"].unique(maintain_order=True).to_list() == [
        "filler: length",
        "filler: position",
        "arm: c",
        "arm: layer",
    ]
    scores = found.rows_by_key("condition", named=True, unique=True)
    row = drawn.row(1, named=True)
    assert (row["setting"], row["series"]) == ("3", "position end")
    assert row["score"] == pytest.approx(scores["filler:3@end"]["score"])
    for ending in ("png", "svg", "md"):
        assert (tmp_path / "figures" / f"sweep.{ending}").stat().st_size > 500


@pytest.mark.slow
def test_mass_and_effect_of_every_head(tmp_path: Path) -> None:
    """Against a knockout of one head, by hand."""
    asked = Evaluation(model=MODEL, problems=2, level=1)
    found = measure_effects(asked, ["digit", "digit@question"], tmp_path, layers=[0, 2])
    assert found.height == 2 * 2 * 2 * 12
    assert (tmp_path / "mass-effect.png").stat().st_size > 500
    model, tokenizer = attnscope.load(MODEL)
    sample = samples_of(asked.experiment_of(["baseline"], asked.find_task()))[0]
    (prompt,) = tokenize_all([apply_chat_template(sample.prompt, tokenizer)], tokenizer)
    answer = tokenizer(sample.answer, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[*prompt.ids.tolist(), *answer]])
    keys = torch.from_numpy(DEFAULT.ids(ids.numpy(), tokenizer) == DEFAULT.index("digit"))
    keys[:, len(prompt) :] = False

    def log_probability() -> float:
        each = model(ids).logits.double().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
        return float(each[len(prompt) - 1 :].sum())

    with torch.no_grad():
        before = log_probability()
        with attnscope.watch(
            model, queries=torch.arange(ids.shape[1])[None] == len(prompt) - 1
        ) as s:
            log_probability()
        with attnscope.knockout(model, keys=keys, layers=2, heads=5):
            after = log_probability()
    row = found.row(
        by_predicate=(pl.col("problem") == 0)
        & (pl.col("class") == "digit")
        & (pl.col("layer") == 2)
        & (pl.col("head") == 5),
        named=True,
    )
    assert row["effect"] == pytest.approx(after - before, abs=1e-4)
    assert row["mass"] == pytest.approx(float(s.received(2)[0, 5][keys[0]].sum()), abs=1e-5)
    with raises(InputError, "no-token-in-classes", classes=("hash",)):
        measure_effects(asked, ["hash"], tmp_path)


def test_bad_settings_are_refused() -> None:
    def refused(**changes: Any) -> InputError:
        asked = Evaluation(model=MODEL, **changes)
        with pytest.raises(InputError) as error:
            evaluate(asked, ["baseline"])
        return error.value

    assert refused(samples=3).code == "repeats-without-randomness"
    for changes in ({"temperature": -1.0}, {"temperature": math.nan}, {"problems": 0}):
        assert refused(**changes).code == "bad-value"
    error = refused(task="gsm8k")
    assert error.code == "unknown-task"
    assert "lm-eval:gsm8k" in error.values["known"]
    assert refused(task="spatial", level=2).values == {"level": 2, "task": "spatial"}
    with raises(InputError, "unknown-class", value="hsh", condition="knockout:hsh"):
        evaluate(ASKED, ["knockout:hsh"])
    assert find_task("math", 3).prompts["count"] == 3


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    from rich.console import Console

    from attnscope.cli.evaluate import score_table

    tested = {"score": 0.81, "difference": -0.04, "low": -0.12, "high": 0.04, "q": 0.5}
    tested |= {"score_low": 0.73, "score_high": 0.87, "entropy": 2.12, "first_token": 0.43}
    names = ["filler:55:/@before-system", "arm:c=0.25,p1=99.5,share=0.25,layer=0,seed=1"]
    console = Console(width=80, file=io.StringIO())
    console.print(score_table([{"condition": n, **tested} for n in names], "a model · math"))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    shown = "0.810 [0.73, 0.87]  -0.040 [-0.120, +0.040]"
    assert sum(shown in line for line in lines) == 2
    assert "2.120" not in "".join(lines)
    of_wide = Console(width=110, file=io.StringIO())
    of_wide.print(score_table([{"condition": "arm", **tested}], "a model · math", wide=True))
    assert "2.120" in of_wide.file.getvalue()  # type: ignore[attr-defined]
    assert "".join(line[1:].split("  ")[0].strip() for line in lines[4:]) == "".join(names)


@pytest.mark.filterwarnings("ignore:.*texts do not start with")
def test_prompts_with_pictures_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "model", "llava", monkeypatch)
    picture(0).save(tmp_path / "a.png")
    record = {"image": "a.png", "prompt": "<image>Is it red?", "answer": "yes"}
    file = write_prompts(tmp_path, [{**record, "choices": ["yes", "no"]}])
    for match in ("contains", "choices"):
        asked = Evaluation(model=str(tmp_path / "model"), task=str(file), problems=1, match=match)
        with pytest.raises(InputError) as error:
            evaluate(asked, ["baseline"], out=tmp_path / "run")
        assert error.value.code == "images-not-supported"
