"""Tables of cards: the numbers of one or two models, with differences paired by text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from attnscope.card.numbers import OTHERS, Card
from attnscope.figures.numbers import LEVEL
from attnscope.stats.families import false_discovery
from attnscope.stats.means import paired

Row = dict[str, Any]


def numbers_table(cards: Sequence[Card]) -> list[Row]:
    """One row per number: `group`, `name`, `digits`, `cells` (one for each card, or None), and of
    two cards `difference`, `low`, `high`, `p` and `q` (second minus first)."""
    rows: dict[tuple[str, str], Row] = {}
    for at, card in enumerate(cards):
        for number in card["numbers"]:
            key = number["group"], number["name"]
            empty: Row = {"group": key[0], "name": key[1], "cells": [None] * len(cards)}
            row = rows.setdefault(key, empty)
            row["digits"] = number["digits"]
            row["cells"][at] = number
    table = _in_groups(list(rows.values()))
    if len(cards) == 2:
        _add_differences(table)
    return table


def _in_groups(rows: list[Row]) -> list[Row]:
    """Rows of one group together, in the order in which groups appear."""
    order = list(dict.fromkeys(row["group"] for row in rows))
    return sorted(rows, key=lambda row: order.index(row["group"]))


def _add_differences(table: list[Row]) -> None:
    p = []
    for row in table:
        a, b = row["cells"]
        row |= dict.fromkeys(("difference", "low", "high", "p", "q"))
        if a is None or b is None or row["name"] == OTHERS:
            p.append(np.nan)
            continue
        first, second = (np.array(one["values"], dtype=float)[:, None] for one in (a, b))
        smallest, largest = a["range"]
        within = (
            -np.inf if smallest is None else smallest,
            np.inf if largest is None else largest,
        )
        tested = paired(first, second, ranges=(within, within)).at(1.0)
        low, high = tested.interval()
        p.append(float(tested.two_sided()[0]))
        row["difference"] = float(tested.estimate[0])
        row["low"], row["high"], row["p"] = (_known(x) for x in (low[0], high[0], p[-1]))
    q = false_discovery(np.array(p), np.zeros(len(p)))
    for row, value in zip(table, q, strict=True):
        row["q"] = _known(value)


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def differs(row: Row) -> bool:
    """Whether the difference is significant: q below 0.05."""
    return row.get("q") is not None and row["q"] < LEVEL


def layers_of(cards: Sequence[Card], table: str, series: str) -> pl.DataFrame:
    """The rows of a figure over layers, of all cards; `series` names the column of its lines."""
    parts = [
        pl.DataFrame(card["layers"], infer_schema_length=None)
        .filter(pl.col("table") == table)
        .select(
            pl.lit(card["label"]).alias("model"),
            pl.col("series").alias(series),
            pl.col("layer", "n"),
            pl.col("value", "low", "high").cast(pl.Float64),
        )
        for card in cards
    ]
    return pl.concat(parts)


def heads_of(card: Card) -> pl.DataFrame:
    """The heads of a card."""
    return pl.DataFrame(card["heads"], infer_schema_length=None)


def distances_of(cards: Sequence[Card]) -> pl.DataFrame:
    """The distance of every head of every card."""
    parts = [
        heads_of(card).select(
            pl.lit(card["label"]).alias("model"),
            "layer",
            "head",
            *(
                pl.col(name).cast(pl.Float64).alias(new)
                for name, new in (
                    ("distance", "value"),
                    ("distance_low", "low"),
                    ("distance_high", "high"),
                )
            ),
            pl.lit(len(card["settings"]["names"])).alias("n"),
        )
        for card in cards
    ]
    return pl.concat(parts)
