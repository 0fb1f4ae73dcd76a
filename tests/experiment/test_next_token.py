"""The effect of a condition on the next token, beside the plain model."""

from pathlib import Path

import polars as pl
import pytest
import torch

import attnscope
from attnscope.errors import InputError
from attnscope.experiment.execute import run
from attnscope.spec.claims import make_claims, parse_line
from attnscope.spec.experiment import Experiment, make_experiment
from attnscope.stats.run_stats import compare_run
from attnscope.stats.verdicts import judge, verdict_table
from attnscope.tokens import DEFAULT
from support_errors import raises

TEXTS = [
    *("Tom has 3 red apples.", "Ann 7", "A long text with 12 words, so that others are padded."),
    *("He pays 4 and 5.", "It costs 80", "Give me 6 pens and 9 books."),
]


def experiment(**keys: object) -> Experiment:
    default = {
        "name": "next",
        "models": ["zoo:math-qwen2"],
        "prompts": {"source": "inline", "records": TEXTS},
        "chat": False,
        "conditions": {"base": {}, "cut": {"knockout": {"tokens": "digit"}}},
        "measures": ["entropy", "next_token"],
    }
    return make_experiment(**{**default, **keys})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("next") / "run"
    run(experiment(), path)
    return path


def test_the_numbers_are_those_of_a_knockout_of_each_text_alone(folder: Path) -> None:
    values = attnscope.open_run(folder).values.collect()
    found = values.filter(pl.col("measure").str.starts_with("next_token"))
    assert found.select("layer", "head").null_count().row(0) == (18, 18)
    assert found["condition"].unique().to_list() == ["cut"]
    model, tokenizer = attnscope.load("zoo:math-qwen2")
    for prompt, text in enumerate(TEXTS):
        inputs = tokenizer(text, return_tensors="pt")
        digits = DEFAULT.ids(inputs["input_ids"], tokenizer) == DEFAULT.names.index("digit")
        with torch.no_grad():
            base = model(**inputs).logits[0, -1].double().log_softmax(-1)
            with attnscope.knockout(model, keys=torch.as_tensor(digits)):
                cut = model(**inputs).logits[0, -1].double().log_softmax(-1)
        kl = float((base.exp() * (base - cut)).sum())
        likely = int(base.argmax())
        here = dict(found.filter(prompt=prompt).select("measure", "value").rows())
        assert here["next_token_kl"] == pytest.approx(kl, rel=1e-3, abs=1e-6)
        change = float(cut[likely] - base[likely])
        assert here["next_token_logprob"] == pytest.approx(change, rel=1e-3, abs=1e-5)
        assert here["next_token_changed"] == float(cut.argmax() != likely)
    assert found.filter(measure="next_token_kl")["value"].min() > 1e-6  # every text has digits


def test_other_measures_of_the_run_stay_the_same(folder: Path, tmp_path: Path) -> None:
    run(experiment(measures=["entropy"]), tmp_path / "run")
    alone = attnscope.open_run(tmp_path / "run").values.collect()
    both = attnscope.open_run(folder).values.filter(pl.col("measure") == "entropy").collect()
    assert both.drop("value").equals(alone.drop("value"))
    assert (both["value"] - alone["value"]).abs().max() < 1e-5


def test_claims_and_comparisons_read_it(folder: Path) -> None:
    opened = attnscope.open_run(folder)
    claims = make_claims({"moves": ["next_token_logprob < 5"]}, "test")
    table = verdict_table(judge(claims, opened.values, experiment=opened.experiment))
    assert table["verdict"].to_list() == ["holds"]
    assert "entropy" in compare_run(opened)["measure"].to_list()


def test_a_scope_of_layers_is_refused() -> None:
    for line in ("next_token_kl > 0.1 in each layer", "next_token_kl[layer=1] > 0.1"):
        with raises(InputError, "bad-claim"):
            parse_line(line)


def test_it_is_refused_with_generate() -> None:
    with raises(InputError, "measure-with-generate", measure="next_token"):
        experiment(generate={"max_new_tokens": 2}, queries=["generated"])


def test_a_class_with_the_first_token_names_the_prompt_and_what_to_change(tmp_path: Path) -> None:
    texts = ["Tom has 3 apples.", "7 pens are 2 more than Ann has."]
    prompts = {"source": "inline", "records": texts}
    outcome = run(experiment(prompts=prompts, measures=["entropy"]), tmp_path / "run")
    (why,) = set(outcome.failed.values())
    assert texts[1] in why
    assert "token 0 " in why
    assert "bos: true" in why
    assert len(outcome.failed) == 2
