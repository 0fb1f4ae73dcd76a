"""Numbers of single queries in a run: every one against dense attention, binned and not."""

import math
from functools import cache

import numpy as np
import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM

import attnscope
from attnscope.errors import InputError
from attnscope.experiment.execute import run
from attnscope.figures import draw
from attnscope.run.schemas import BY_QUERY
from support_errors import raises


@cache
def _dense(folder: str, ids: tuple[int, ...]) -> np.ndarray:
    """[H, n, n] of layer 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        seen = model(torch.tensor([ids]), output_attentions=True).attentions
    return seen[1][0].double().numpy()


def _wanted(row, A, ids, masks):
    """What each query of the text should say; nan where it says nothing."""
    n = len(ids)
    if row["measure"] == "query_mass":
        return A[:, masks[row["keys"], row["item"]]].sum(1)
    if row["measure"] == "query_entropy":
        return -(A * np.log(np.where(A > 0, A, 1))).sum(1)
    key = [i - 1 for i in range(n)]
    if row["item"] == "induction":
        last = [max((j for j in range(i) if ids[j] == ids[i]), default=-2) for i in range(n)]
        key = [j + 1 for j in last]
    return np.array([A[i, j] if j >= 0 else math.nan for i, j in enumerate(key)])


@pytest.mark.parametrize("size", [1, 4])
def test_every_query_or_bin_against_dense_attention(small, folder, tmp_path, size):
    asked = small(
        prompts={"source": "math", "count": 3, "level": 1},
        queries=["all", "after:question"],
        keys=["all", "question"],
        classes=["whole"],
        measures=["query_mass", "query_weight", "query_entropy"],
        profiles={"layers": [1], "heads": [0, 1]},
        bin=size,
        batch_tokens=4096,
    )
    out = tmp_path / "run"
    run(asked, out)
    opened = attnscope.open_run(out)
    assert opened.complete
    table = opened.by_query.collect()
    assert table.schema == BY_QUERY
    assert table.select("layer", "head").unique().sort("head").rows() == [(1, 0), (1, 1)]
    tokens = opened.tokens.collect()
    by = ["prompt", "condition", "queries", "keys", "head", "measure", "item"]
    groups = 0
    for key, part in table.group_by(by, maintain_order=True):
        row = dict(zip(by, key, strict=True))
        its = tokens.filter(prompt=row["prompt"], condition=row["condition"])
        ids, n = its["id"].to_list(), its.height
        inside = its["regions"].list.contains("question").to_numpy()
        masks = {("all", "all"): np.ones(n, dtype=bool), ("question", "all"): inside}
        each = _wanted(row, _dense(folder, tuple(ids))[row["head"]], ids, masks)
        counts = np.arange(n) > np.flatnonzero(inside)[-1] if row["queries"] != "all" else True
        counts = np.broadcast_to(counts, n)
        for one in part.iter_rows(named=True):
            here = slice(one["position"], one["position"] + size)
            assert one["position"] % size == 0
            assert one["count"] == counts[here].sum() > 0
            found = each[here][counts[here]]
            found = found[~np.isnan(found)]
            if not len(found):
                assert one["value"] is None
            else:
                assert one["value"] == pytest.approx(found.mean(), abs=1e-5), one
        assert part["count"].sum() == counts.sum()
        groups += 1
    assert groups == 3 * 2 * 2 * 2 * (2 + 2 + 1)
    assert opened.sql("SELECT count(*) AS n FROM by_query")["n"][0] == table.height


def test_a_run_of_single_queries_continues_and_is_drawn(small, tmp_path):
    asked = small(
        queries="predicts:generated",
        keys=["question", "generated"],
        classes="whole",
        measures=["query_mass"],
        generate={"max_new_tokens": 5},
        conditions={"base": {}},
    )
    out = tmp_path / "run"
    run(asked, out)
    assert run(asked, out).measured == 0
    opened = attnscope.open_run(out)
    drawn = draw(opened, "by-query", along="answer")
    assert drawn.data["position"].unique().sort().to_list() == [1, 2, 3, 4, 5]
    one = drawn.data.filter(series="question", position=2)
    cells = opened.cells.select("prompt", "tokens", "generated_tokens")
    rows = opened.by_query.collect().join(cells, on="prompt")
    begins = pl.col("tokens") - pl.col("generated_tokens") + 1
    second = rows.filter(pl.col("position") == begins, keys="question")
    assert one["value"][0] == pytest.approx(second["value"].mean(), rel=1e-4)
    over_text = draw(opened, "by-query")
    assert "Position of the query" in str(over_text.spec)
    with pytest.raises(InputError, match="query_entropy"):
        draw(opened, "by-query", measure="query_entropy")


def test_a_bin_is_a_whole_number_from_one(small):
    with raises(InputError, "bad-value", key="bin", value=0):
        small(measures=["query_mass"], bin=0)
