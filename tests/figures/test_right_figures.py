"""Figures show what they name: ordered places, the text of the base, bins, existing measures."""

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.figures import draw
from attnscope.figures.binning import PRINT
from attnscope.recipes.injection import important_heads
from attnscope.run.schemas import BY_QUERY
from made_runs import made_run
from support_errors import raises


def with_keys(*keys: str) -> Any:
    return made_run(models=("m",), prompts=6, layers=(0,), heads=2, measures=("mass",), keys=keys)


@pytest.mark.parametrize("keys", [("all", "not-first"), ("all", "question", "system")])
def test_order_is_not_drawn_of_sets_that_have_no_order(keys: tuple[str, ...]) -> None:
    with raises(InputError, "nothing-in-order"):
        draw(with_keys(*keys), "order")


def test_order_goes_by_the_numbers_of_the_places() -> None:
    run = with_keys("all", "document:10", "document:2", "document:1")
    data = draw(run, "order").data.filter(pl.col("series") == "measured").sort("place")
    assert data["name"].to_list() == ["document:1", "document:2", "document:10"]


@pytest.mark.parametrize(
    ("classes", "keys", "shown"),
    [(("all",), None, "question"), (("digit", "word"), None, "all"), (("all",), "all", "all")],
)
def test_one_class_is_not_drawn_on_all_keys_unless_asked(
    classes: tuple[str, ...], keys: str | None, shown: str
) -> None:
    run = made_run(models=("m",), measures=("mass",), keys=("all", "question"), classes=classes)
    given = {} if keys is None else {"keys": keys}
    assert f"keys: {shown};" in draw(run, "classes", **given).caption


def test_text_shows_the_base_whatever_the_names_of_the_conditions() -> None:
    conditions = {"plain": 0, "filler": 9}  # the variant comes first in the alphabet
    run = made_run(
        models=("m",),
        prompts=2,
        layers=(0,),
        heads=1,
        conditions=conditions,
        profile_heads=(0,),
        length=24,
    )
    assert run.experiment.base == "plain"
    drawn = draw(run, "text")
    assert drawn.data.height == 24
    assert "condition: plain" in drawn.caption
    assert draw(run, "text", conditions=["filler"]).data.height > 24


def long_run(positions: int) -> Any:
    run = made_run(models=("m",), prompts=6, layers=(0,), heads=1, measures=("entropy",))
    rows = [
        {"model": "m", "prompt": prompt, "condition": "base", "queries": "all", "keys": "all"}
        | {"layer": 0, "head": 0, "measure": "query_entropy", "position": position, "count": 1}
        | {"value": float(position + prompt)}
        for prompt in range(6)
        for position in range(positions)
    ]
    return replace(run, by_query=pl.DataFrame(rows, schema=BY_QUERY).lazy())


@pytest.mark.parametrize(("positions", "width"), [(PRINT, 1), (PRINT + 1, 2), (1346, 3)])
def test_many_query_positions_are_binned(positions: int, width: int) -> None:
    drawn = draw(long_run(positions), "by-query")
    data = drawn.data
    assert data.height == -(-positions // width) <= PRINT
    assert data["position"].to_list() == list(range(0, positions, width))
    # A point is the mean over its positions, then over the 6 prompts (2.5 more than the first).
    assert data["value"][0] == pytest.approx((width - 1) / 2 + 2.5)
    assert (f"{width} positions" in drawn.caption) == (width > 1)


@pytest.mark.parametrize(
    ("measures", "absent"),
    [(("entropy",), "first"), (("first_token",), "ntropy")],
)
def test_depth_names_only_the_measures_that_the_run_has(measures: Any, absent: str) -> None:
    run = made_run(models=("m",), prompts=6, layers=(0, 1), heads=2, measures=measures)
    drawn = draw(run, "depth")
    assert absent not in drawn.title
    assert absent not in drawn.caption


@pytest.mark.parametrize("heads", [1, 3, 10, 12])
def test_all_heads_are_important_if_there_are_fewer_than_required(heads: int) -> None:
    calm = np.zeros((4, heads))
    attacked = np.arange(heads) + np.ones((4, heads))
    chosen = important_heads(calm, attacked, fewest=10)
    assert chosen.sum() == min(heads, 10)
