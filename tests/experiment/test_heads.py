"""`attnscope heads`: scores against dense attention, and kinds against stated thresholds."""

import re
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
from attnscope.experiment import head_scores as measuring
from attnscope.experiment.head_scores import head_scores
from attnscope.figures.head_types import save_heads
from attnscope.stats.head_types import HEAD_TYPES, NONE, classify_heads, summary
from support_errors import raises

PROMPTS = 6


@pytest.fixture(scope="module")
def measured() -> tuple[Any, Any, pl.DataFrame]:
    model, tokenizer = attnscope.load("zoo:math-qwen2")
    return model, tokenizer, head_scores(model, tokenizer, prompts=PROMPTS)


@torch.no_grad()
def dense(model: Any, ids: list[int]) -> list[np.ndarray[Any, Any]]:
    model.set_attn_implementation("eager")
    found = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return [A[0].double().numpy() for A in found]


def values(scores: pl.DataFrame, score: str, prompt: int) -> np.ndarray[Any, Any]:
    """[layers, heads]"""
    of = scores.filter((pl.col("score") == score) & (pl.col("prompt") == prompt))
    of = of.filter(pl.col("item").is_null()).sort("layer", "head")
    return of["value"].to_numpy().reshape(of["layer"].n_unique(), -1)


def test_scores_of_texts_are_those_of_dense_attention(measured: tuple[Any, Any, Any]) -> None:
    model, tokenizer, scores = measured
    ids = measuring._text(tokenizer, 0, 2)
    assert len(ids) == measuring.LENGTH
    A = np.stack(dense(model, ids))
    T = len(ids)
    near = [A[..., i, max(1, i - 7) : i + 1].sum(-1) for i in range(T)]
    wanted = {
        "sink": A[..., 0].mean(-1),
        "previous": np.stack([A[..., i, i - 1] for i in range(1, T)], -1).mean(-1),
        "local": np.stack(near, -1).mean(-1),
    }
    for score, want in wanted.items():
        np.testing.assert_allclose(values(scores, score, 2), want, atol=1e-5, err_msg=score)


def test_induction_is_the_weight_on_the_token_after_the_first_time(
    measured: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, scores = measured
    seen: list[torch.Tensor] = []
    plain = measuring._watched
    monkeypatch.setattr(
        measuring,
        "_watched",
        lambda model, ids, **more: (seen.append(ids), plain(model, ids, **more))[1],
    )
    list(measuring._of_repeats(model, tokenizer, PROMPTS, 0))
    ids, n = seen[0][3].tolist(), measuring.REPEATED
    begin = len(ids) - 2 * n
    assert ids[begin : begin + n] == ids[begin + n :]
    assert len(set(ids[begin : begin + n])) == n
    A = np.stack(dense(model, ids))
    rows = range(begin + n, begin + 2 * n)
    want = np.stack([A[..., i, i - n + 1] for i in rows], -1).mean(-1)
    np.testing.assert_allclose(values(scores, "induction", 3), want, atol=1e-5)


class _Looks:
    """A scope of one head that looks at given keys."""

    def __init__(self, at: list[int], keys: list[int]):
        self.at, self.keys = torch.tensor([at]), torch.tensor(keys)[None, None, :, None]

    def query_positions(self, layer: int) -> torch.Tensor:
        return self.at

    def largest(self, layer: int) -> Any:
        return type("Largest", (), {"key": self.keys})


def test_retrieval_counts_needle_tokens_that_were_generated_while_looked_at() -> None:
    #      0  1  2  3 | 4  5  6  7: the needle is 1 to 3, and 21, 22, 9 were generated after 4
    output = torch.tensor([5, 21, 22, 23, 6, 21, 22, 9])
    where = torch.tensor([1, 2, 3])
    right = _Looks([4, 5, 6], [1, 2, 3])  # the last looks at 23, and 9 was generated
    assert float(measuring._copied(right, 0, output, where)) == pytest.approx(2 / 3)  # type: ignore
    other = _Looks([4, 5, 6], [2, 0, 3])  # on the needle, but not on the generated token
    assert float(measuring._copied(other, 0, output, where)) == 0.0  # type: ignore[arg-type]


def scored(**of: list[float]) -> pl.DataFrame:
    rows = [
        {"score": score, "item": None, "prompt": n, "layer": 0, "head": 0, "value": value}
        for score, found in of.items()
        for n, value in enumerate(found)
    ]
    return pl.DataFrame(rows, schema_overrides={"item": pl.String})


def test_a_head_is_of_a_kind_where_the_whole_interval_is_above() -> None:
    sure, unsure = [0.5, 0.52, 0.48, 0.51, 0.49, 0.5], [0.9, 0.0, 0.9, 0.1, 0.8, 0.0]
    table = classify_heads(scored(sink=sure, induction=unsure, retrieval=[0.5] * 6))
    row = table.row(0, named=True)
    assert row["kind"] == "retrieval"
    assert row["kinds"] == "retrieval, sink"
    assert row["retrieval_low"] == row["retrieval_high"] == 0.5  # all prompts alike
    assert row["induction"] > 0.3 > row["induction_low"]
    found = {one["kind"]: one for one in summary(table).to_dicts()}
    assert (found["induction"]["above"], found["induction"]["certain"]) == (1, 0)
    assert found["local"]["heads"] == 0
    few = classify_heads(scored(sink=sure[:5])).row(0, named=True)
    assert few["kind"] == NONE
    assert few["sink_low"] is None


def test_a_class_counts_where_it_is_preferred() -> None:
    rows = []
    for n in range(6):
        for name, mass, lift in (("word", 0.6, 1.1), ("digit", 0.4 + n / 100, 5.0)):
            for score, value in (("class_mass", mass), ("class_lift", lift)):
                rows.append(
                    {
                        "score": score,
                        "item": name,
                        "prompt": n,
                        "layer": 1,
                        "head": 2,
                        "value": value,
                    }
                )
    row = classify_heads(pl.DataFrame(rows)).row(0, named=True)
    assert (row["kind"], row["class"]) == ("class-specific", "digit")
    assert row["class_mass"] == pytest.approx(0.425)


def test_the_command_writes_a_table_and_a_picture(tmp_path: Path) -> None:
    asked = ["heads", "zoo:math-qwen2", "--prompts", "6", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, asked, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert all(kind.name in done.output for kind in HEAD_TYPES)
    assert "needles" in done.output
    assert "A[i, i - 1]" in done.output
    table = pl.read_csv(tmp_path / "out" / "heads.csv")
    model, _ = attnscope.load("zoo:math-qwen2")
    heads = model.config.num_hidden_layers * model.config.num_attention_heads
    assert table.height == heads
    assert set(table["kind"]) <= {NONE, *(kind.name for kind in HEAD_TYPES)}
    assert (tmp_path / "out" / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert "Head types of math-qwen2" in (tmp_path / "out" / "heads.svg").read_text()


def test_every_layer_has_its_number_in_the_picture(tmp_path: Path) -> None:
    places = [{"layer": layer, "head": head} for layer in range(24) for head in range(14)]
    table = pl.DataFrame(places).with_columns(pl.lit("sink").alias("kind"))
    save_heads(tmp_path, table, table, model="m", prompts=8)
    drawn = (tmp_path / "heads.svg").read_text()
    labels = re.findall(r'<text text-anchor="end"[^>]*>(\d+)</text>', drawn)
    assert sorted(map(int, labels)) == list(range(24))


def test_what_cannot_be_judged_is_refused() -> None:
    model, tokenizer = attnscope.load("zoo:math-qwen2")
    with raises(InputError, "bad-count", value=0):
        head_scores(model, tokenizer, prompts=0)
    with raises(InputError, "cannot-generate"):
        head_scores(model.model, tokenizer)
