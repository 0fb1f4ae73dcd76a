"""Evaluation: scores are right, completions do not depend on their batch, runs continue."""

import io
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import attnscope
from attnscope.errors import InputError
from attnscope.evaluate import evaluation as running
from attnscope.evaluate.completions import generate_completions
from attnscope.evaluate.condition_parser import expand, parse
from attnscope.evaluate.evaluation import Evaluation, evaluate, measure_effects
from attnscope.evaluate.scores import pass_at, table
from attnscope.evaluate.tasks import load_task
from attnscope.tokens import DEFAULT, Prompt, Region, apply_chat_template, tokenize, tokenize_all
from support_errors import raises

MODEL = "zoo:math-qwen2"


@pytest.fixture(scope="module")
def loaded() -> Any:
    return attnscope.load(MODEL)


def test_pass_at_k_is_what_all_choices_give() -> None:
    for n in (1, 4, 6):
        for right in range(n + 1):
            for k in range(1, n + 1):
                marks = [True] * right + [False] * (n - right)
                every = [any(some) for some in combinations(marks, k)]
                assert pass_at(k, n, right) == pytest.approx(np.mean(every))
    with raises(InputError, "too-few-samples", k=3, samples=2):
        pass_at(3, 2, 1)


def test_table_is_paired_by_problem() -> None:
    """Equal accuracy gives a difference of 0; more solved problems give their share."""
    right = {"baseline": [1, 0] * 10, "filler": [0, 1] * 10, "arm": [1] * 20}
    rows = [
        {"condition": name, "problem": n, "sample": 0, "right": bool(hit)}
        for name, hits in right.items()
        for n, hit in enumerate(hits)
    ]
    found = table(pl.DataFrame(rows)).rows_by_key("condition", named=True, unique=True)
    assert found["baseline"]["score"] == 0.5
    assert found["baseline"]["difference"] is None
    assert found["filler"]["difference"] == pytest.approx(0)
    assert found["filler"]["p"] > 0.9
    assert found["arm"]["difference"] == pytest.approx(0.5)
    assert 0.2 < found["arm"]["low"] < 0.5 < found["arm"]["high"] < 0.8
    assert found["arm"]["p"] < 0.01


def test_completions_are_judged_exactly() -> None:
    math = load_task("math", 3, level=1)
    answer = math.samples[0].answer
    assert math.right(math.samples[0], f"2 + 2 = 4. The answer is {answer}.")
    assert math.right(math.samples[0], f"so it is {answer}")
    assert not math.right(math.samples[0], f"The answer is {answer}0, or {answer}")
    assert not math.right(math.samples[0], "I do not know")
    spatial = load_task("spatial", 2)
    assert spatial.right(spatial.samples[0], f" {spatial.samples[0].answer}\n")
    assert not spatial.right(spatial.samples[0], f"{spatial.samples[0].answer} or not")


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
    math = load_task("math", 1)
    sample = replace(math.samples[0], answer=answer)
    assert math.right(sample, f"It had 7. The answer is {number}") is right
    assert math.right(sample, f"First 7, so he has {number}") is right


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
    math = load_task("math", 1)
    assert math.right(replace(math.samples[0], answer="12"), completion) is right


@pytest.mark.parametrize("condition", ["filler:5000:a", "baseline"])
def test_a_prompt_longer_than_the_positions_is_refused(
    loaded: Any, condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    if condition == "baseline":  # the prompt fits, its answer does not
        monkeypatch.setattr(model.config, "max_position_embeddings", 60)
    prompts = [tokenize(Prompt("one " * 40, (Region(0, 160, "question"),)), tokenizer)]
    some = generate_completions(
        *(model, tokenizer, parse(condition), prompts, [(0, 0)]),
        max_new_tokens=64,
        batch=1,
        temperature=0.0,
        seed=0,
    )
    with pytest.raises(InputError) as error:
        next(some)
    assert error.value.code == "too-many-tokens"
    assert error.value.values["positions"] == model.config.max_position_embeddings


@pytest.mark.parametrize("condition", ["arm:share=0.3", "knockout:digit"])
def test_a_completion_does_not_depend_on_its_batch(loaded: Any, condition: str) -> None:
    model, tokenizer = loaded
    given = load_task("math", 3)
    asking = [apply_chat_template(sample.prompt, tokenizer) for sample in given.samples]
    prompts = list(tokenize_all(asking, tokenizer))
    asked = [(n, sample) for n in range(3) for sample in range(2)]
    completions = []
    for batch in (1, 6):
        found = generate_completions(
            *(model, tokenizer, parse(condition), prompts, asked),
            max_new_tokens=6,
            batch=batch,
            temperature=0.7,
            seed=3,
        )
        completions.append({one: text for some in found for one, text in some})
    assert completions[0] == completions[1]
    first = completions[0]
    assert len({first[0, sample] for sample in range(2)}) + len(set(first.values())) > 2


def test_the_generation_config_of_a_model_changes_no_completion(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers fills what a generation config leaves open from the config of the model."""
    model, tokenizer = loaded
    asking = [apply_chat_template(load_task("math", 1).samples[0].prompt, tokenizer)]
    prompts = list(tokenize_all(asking, tokenizer))
    completions = []
    for penalty in (1.0, 5.0):
        monkeypatch.setattr(model.generation_config, "repetition_penalty", penalty)
        (found,) = generate_completions(
            *(model, tokenizer, parse("baseline"), prompts, [(0, 0)]),
            max_new_tokens=24,
            batch=1,
            temperature=0.0,
            seed=0,
        )
        completions.append(found)
    assert completions[0] == completions[1]


def test_a_completion_ends_at_the_end_token_of_the_tokenizer(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation config of a fine-tune may name another end token."""
    model, tokenizer = loaded
    for end in (None, 1, [1, 2]):
        monkeypatch.setattr(model.generation_config, "eos_token_id", end)
        given = load_task("math", 1, level=1)
        asking = [apply_chat_template(given.samples[0].prompt, tokenizer)]
        prompts = list(tokenize_all(asking, tokenizer))
        (found,) = generate_completions(
            *(model, tokenizer, parse("baseline"), prompts, [(0, 0)]),
            max_new_tokens=64,
            batch=1,
            temperature=0.0,
            seed=0,
        )
        assert given.right(given.samples[0], found[0][1])
        assert found[0][1].count("The answer is") == 1


def test_an_evaluation_continues_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the middle of a line: the same table, and no completion is generated twice."""
    asked = Evaluation(model=MODEL, problems=3, level=1)
    conditions = ["baseline", "filler:9", "arm"]
    whole = evaluate(asked, conditions, tmp_path / "whole", batch=2)
    assert whole["condition"].to_list() == conditions
    assert whole["problems"].to_list() == [3, 3, 3]
    lines = (tmp_path / "whole" / "completions.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 9
    part = tmp_path / "part"
    part.mkdir()
    (part / "evaluation.json").write_text((tmp_path / "whole" / "evaluation.json").read_text())
    (part / "completions.jsonl").write_text("".join(lines[:4]) + lines[4][:20])
    reports: list[tuple[str, int, int]] = []
    again = evaluate(asked, conditions, part, batch=2, progress=lambda *some: reports.append(some))
    assert again.equals(whole)
    assert sum(of for _, done, of in reports if done == of) == 5
    monkeypatch.setattr(running, "load", None)  # nothing is missing: no model is loaded
    assert evaluate(asked, conditions, part).equals(whole)
    stored = [json.loads(line) for line in (part / "completions.jsonl").read_text().splitlines()]
    assert {"condition", "problem", "sample", "right", "answer", "completion"} == set(stored[0])
    with raises(InputError, "other-evaluation", path=str(part)):
        evaluate(Evaluation(model=MODEL, problems=7), conditions, part)


def test_problems_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": "2 + 2 =", "answer": 4}\n')
    own = load_task(str(file), 10)
    assert [sample.answer for sample in own.samples] == ["2", "4"]
    assert own.right(own.samples[1], " 4 ")
    file.write_text('{"prompt": "1 + 1 ="}\n')
    with raises(InputError, "missing-field", field="answer", problem=0):
        load_task(str(file), 10)


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("filer", "unknown-condition", {"value": "filer"}),
        ("knockout:hsh", "unknown-class", {"value": "hsh"}),
        ("steer:hash", "not-a-number", {"name": "factor", "value": ""}),
        ("arm:p2=3", "unknown-setting-of-arm", {"value": "p2"}),
        ("arm:c=x", "not-a-number", {"name": "c", "value": "x"}),
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
    assert parse("filler:7:/@end").settings == {"length": "7", "unit": "/", "position": "end"}
    assert parse("arm:layer=3,c=0.5").settings == {"layer": "3", "c": "0.5"}
    with raises(InputError, "bad-condition", condition="filler:7|"):
        expand("filler:7|")
    with raises(InputError, "unknown-position", value="middle"):
        parse("filler:7@middle")


def test_a_sweep_has_a_figure(tmp_path: Path) -> None:
    """Length and position of a filler, a setting and the layer of ARM: one command."""
    asked = Evaluation(model=MODEL, problems=2, level=1)
    words = ["baseline", "filler:3|9@between|end", "arm:c=0.1|0.4", "arm:layer=0|2"]
    found = evaluate(asked, words, tmp_path, batch=8)
    assert len(found) == 9
    drawn = pl.read_csv(tmp_path / "sweep.csv")
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
        assert (tmp_path / f"sweep.{ending}").stat().st_size > 500


def test_mass_and_effect_of_every_head(tmp_path: Path) -> None:
    """Against a knockout of one head, by hand."""
    asked = Evaluation(model=MODEL, problems=2, level=1)
    found = measure_effects(asked, ["digit", "digit@question"], tmp_path, layers=[0, 2])
    assert found.height == 2 * 2 * 2 * 12
    assert (tmp_path / "mass-effect.png").stat().st_size > 500
    model, tokenizer = attnscope.load(MODEL)
    sample = load_task("math", 1, level=1).samples[0]
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
    with raises(InputError, "bad-temperature", samples=3):
        Evaluation(model=MODEL, samples=3)
    with raises(InputError, "no-baseline", conditions=["arm"]):
        evaluate(Evaluation(model=MODEL), ["arm"])
    with pytest.raises(InputError) as error:
        load_task("gsm8k", 3)
    assert error.value.code == "unknown-task"
    assert "lm-eval:gsm8k" in error.value.values["known"]
    with raises(InputError, "unsupported-argument", level=2, task="spatial"):
        load_task("spatial", 3, level=2)


@pytest.mark.parametrize("beside", [{}, {"entropy": 2.12, "first_token": 0.43}])
def test_the_table_fits_a_terminal_of_80_columns(beside: dict[str, float]) -> None:
    from rich.console import Console

    from attnscope.cli.evaluate import _table

    tested = {"score": 0.81, "difference": -0.04, "low": -0.12, "high": 0.04, "p": 0.3, "q": 0.5}
    names = ["filler:55:/@before-system", "arm:c=0.25,p1=99.5,share=0.25,layer=0,seed=1"]
    console = Console(width=80, file=io.StringIO())
    console.print(_table([{"condition": n, **tested, **beside} for n in names], "a model · math"))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    assert sum("0.810  -0.040 [-0.120, +0.040]" in line for line in lines) == 2
    assert "".join(line[1:].split("  ")[0].strip() for line in lines[4:]) == "".join(names)
