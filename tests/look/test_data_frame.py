"""A scope's numbers with labels: one frame, and a page for a notebook."""

import pickle
import re
from typing import Any

import numpy as np
import pandas
import polars as pl
import pytest
import torch

import attnscope
from attnscope.errors import InputError, ScopeError
from attnscope.look import html_page
from attnscope.tokens import DEFAULT
from support_errors import raises

TEXTS = ["Tom has 12 apples.", "Ann <b>&amp;</b> 3"]


@pytest.fixture(scope="module")
def watched() -> tuple[Any, Any, Any]:
    model, tokenizer = attnscope.load("zoo:math-qwen2")
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(**inputs)
    return scope, tokenizer, inputs


def test_every_number_stands_in_its_row(watched: tuple[Any, Any, Any]) -> None:
    scope, tokenizer, inputs = watched
    measures = ["received", "average", "mass", "lift", "entropy", "by_distance", "rows"]
    frame = scope.to_frame(tokenizer, measures=[*measures, "query_entropy", "induction"])
    assert isinstance(frame, pl.DataFrame)
    ids = DEFAULT.ids(inputs["input_ids"], tokenizer, inputs["attention_mask"])
    n, wrong = len(DEFAULT), []
    read = {
        "received": lambda row, b, h: scope.received(row["layer"])[b, h, row["position"]],
        "average": lambda row, b, h: scope.average(row["layer"])[b, h, row["position"]],
        "entropy": lambda row, b, h: scope.entropy(row["layer"])[b, h],
        "induction": lambda row, b, h: scope.measure("induction", row["layer"])[b, h],
        "on_first": lambda row, b, h: scope.measure("by_distance", row["layer"])[b, h, 0],
        "on_recent": lambda row, b, h: scope.measure("by_distance", row["layer"])[b, h, 1],
        "on_rest": lambda row, b, h: scope.measure("by_distance", row["layer"])[b, h, 2],
        "mass": lambda row, b, h: scope.mass(row["layer"], ids, n)[b, h, at(row)],
        "lift": lambda row, b, h: scope.lift(row["layer"], ids, n)[b, h, at(row)],
        "rows": lambda row, b, h: scope.rows(row["layer"], ids, n)[b, h, row["position"], at(row)],
        "query_entropy": lambda row, b, h: scope.query_entropy(row["layer"])[b, h, row["position"]],
    }
    for row in frame.sample(150, seed=1).iter_rows(named=True):
        want = float(read[row["measure"]](row, row["sequence"], row["head"]))
        got = np.nan if row["value"] is None else row["value"]
        if not np.isclose(got, want, atol=1e-6, equal_nan=True):
            wrong.append((row, want))
    assert not wrong
    real = int(inputs["attention_mask"].sum())
    heads = sum(scope.received(layer).shape[1] for layer in scope.layers)
    assert frame.filter(pl.col("measure") == "received").height == real * heads
    assert frame.filter(pl.col("measure") == "rows").height == real * heads * n
    text = frame.filter(
        (pl.col("measure") == "received") & (pl.col("layer") == 0) & (pl.col("head") == 0)
    )
    first = text.filter(pl.col("sequence") == 0)
    assert "".join(first["token"]).endswith(TEXTS[0])
    assert first.filter(pl.col("token").str.contains("1"))["class"].to_list() == ["digit"]


def at(row: dict[str, Any]) -> int:
    return DEFAULT.index(row["item"])


def test_without_a_tokenizer(watched: tuple[Any, Any, Any]) -> None:
    scope, tokenizer, inputs = watched
    bare = pickle.loads(pickle.dumps(scope))  # a copy does not know the tokenizer
    frame = bare.to_frame()
    assert "token" not in frame.columns
    assert frame.height == 2 * 12 * 6 * int(inputs["attention_mask"].sum())  # no padding
    assert scope.to_frame().equals(scope.to_frame(tokenizer))
    assert scope.to_frame().select(frame.columns).equals(frame)
    assert set(frame["measure"]) == {"received", "average"}
    with raises(InputError, "needs-tokenizer", measure="mass"):
        bare.to_frame(measures=["mass"])
    with raises(InputError, "needs-tokenizer"):
        bare.show()
    with raises(InputError, "unknown-measure", value="nope"):
        scope.to_frame(tokenizer, measures=["nope"])
    with raises(InputError, "wrong-shape", argument="input_ids"):
        scope.to_frame(tokenizer, input_ids=[[1, 2]])


def test_what_was_fed_while_generating_is_known() -> None:
    model, tokenizer = attnscope.load("zoo:math-qwen2")
    inputs = tokenizer(TEXTS[:1], return_tensors="pt")
    with torch.no_grad(), attnscope.watch(model, queries="generated", keep=True) as scope:
        generated = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(scope.tokens, generated[:, :-1])
    frame = scope.to_frame(tokenizer, measures="query_entropy")
    assert set(frame["position"]) == set(
        range(inputs["input_ids"].shape[1], generated.shape[1] - 1)
    )
    with torch.no_grad(), attnscope.watch(model) as scope:
        model(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]))
    with raises(ScopeError, "no-token-ids"):
        scope.to_frame(tokenizer)
    again = scope.to_frame(tokenizer, input_ids=inputs["input_ids"])
    assert "".join(again["token"][: inputs["input_ids"].shape[1]]).endswith(TEXTS[0])


def test_pandas_without_pyarrow(watched: tuple[Any, Any, Any]) -> None:
    """As the documentation shows it; polars' own `to_pandas` needs pyarrow."""
    scope, tokenizer, _ = watched
    frame = scope.to_frame(tokenizer, measures=["received", "entropy"])
    table = pandas.DataFrame(frame.to_dict(as_series=False))
    assert list(table.columns) == frame.columns
    assert table["value"].tolist() == frame["value"].to_list()
    assert len(table[table["token"].notna()]) == frame["token"].drop_nulls().len()


def test_a_page_for_a_notebook(watched: tuple[Any, Any, Any], tmp_path: Any) -> None:
    scope, tokenizer, _ = watched
    page = scope.show(tokenizer, 1)
    html = page._repr_html_()
    assert "&lt;b&gt;" in re.sub("</span><span[^>]*>", "", html)
    assert "<b>&amp;" not in html
    assert "http" not in html
    assert html.count("<option") == 1 + len(scope.layers) + 1 + scope.received(0).shape[1]
    page.save(tmp_path / "page.html")
    assert html in (tmp_path / "page.html").read_text(encoding="utf-8")
    with raises(InputError, "unknown-sequence", value=2, known=[0, 1]):
        scope.show(tokenizer, 2)


def test_a_page_stays_small(watched: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scope, tokenizer, _ = watched
    whole = scope.show(tokenizer, 1).html
    whole = scope.show(tokenizer, 1).html
    monkeypatch.setattr(html_page, "MAX_CHARS", 1500)
    html = scope.show(tokenizer, 1).html
    assert len(html) < len(whole)
    assert html.count("<span style=") < whole.count("<span style=")
    assert html.count("<option") < whole.count("<option")


def test_a_token_can_be_clicked_where_queries_were_kept(watched: tuple[Any, Any, Any]) -> None:
    scope, tokenizer, inputs = watched
    assert '"row": ""' not in scope.show(tokenizer, 1).html
    model, _ = attnscope.load("zoo:math-qwen2")
    with torch.no_grad(), attnscope.watch(model) as plain:
        model(**inputs)
    assert '"row": ""' in plain.show(tokenizer, 1).html


def test_top_keys_have_the_largest_weights_of_each_row() -> None:
    rows = {
        (layer, n): np.arange(10.0)[::-1] / 45 * (n + 1) / 10 for layer in (0, 1) for n in range(10)
    }
    found = html_page._top_rows(lambda layer, n: rows[layer, n], [0, 1], 10)
    assert found is not None
    assert found.shape == (3, 10, html_page.TOP_KEYS, 3)
    where = found[1, 9, :, 0].astype(int) * 256 + found[1, 9, :, 1]
    assert where.tolist() == list(range(html_page.TOP_KEYS))
    assert found[0, 9, 0, 2] == round(9 / 45 * 255)
    assert (found[0] == found[1]).all()
