"""Inputs that are well formed and make no sense: trees of YAML with a branch changed, queries of
SQL put together from its grammar. Imported by fuzz.py, which runs them."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

__all__ = ["branch_changed", "query"]

Draw = random.Random
LEAVES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, -(2**63), 10**30, 0.5, -0.0, 1e308, math.nan, math.inf,
    "", " ", "all", "each", "mean", "base", "last", "0", "1e3", "zoo:math-qwen2", "a" * 300, "\x1b",
    "../x", "{question}", "{", "kind:repeat", "sample:5", [], {}, [[]], [None], {"a": {}}, ["all"],
]  # fmt: skip


def _branches(tree: Any) -> list[tuple[Any, Any]]:
    """Every place that holds something: what it is in, and its key there."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        inside = waiting.pop()
        if isinstance(inside, dict | list):
            keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            found += [(inside, key) for key in keys]
            waiting += [inside[key] for key in keys]
    return found


def branch_changed(seed: Any, draw: Draw) -> Any:
    """A tree with a few branches replaced, removed, renamed, exchanged, added or repeated."""
    tree = copy.deepcopy(seed)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        places = _branches(tree)
        if not places:
            return tree
        inside, key = draw.choice(places)
        other, its = draw.choice(places)
        names = [name for one, name in places if isinstance(one, dict)]
        kind = draw.randrange(6)
        if kind == 0:
            inside[key] = copy.deepcopy(draw.choice(LEAVES))
        elif kind == 1:
            del inside[key]
        elif kind == 2 and isinstance(inside, dict):
            inside[draw.choice(names)] = inside.pop(key)
        elif kind == 3:
            inside[key] = copy.deepcopy(other[its])
        elif kind == 4 and isinstance(inside, dict):
            inside[draw.choice(names)] = copy.deepcopy(draw.choice(LEAVES))
        elif isinstance(inside, list):
            inside += [copy.deepcopy(inside[key])] * draw.choice((1, 3))
        else:
            inside[key] = [inside[key]] * draw.choice((1, 2))
    return tree


TABLES = {
    "values": (["prompt", "layer", "head", "value"], ["model", "condition", "measure", "item"]),
    "cells": (["prompt", "tokens", "filler_tokens"], ["cell", "model", "condition"]),
    "tokens": (["prompt", "position"], ["model", "condition", "text"]),
    "positions": (["layer", "head", "position", "average"], ["model", "condition"]),
}
"""Columns of numbers, and of words."""
OF_NUMBERS = ["avg", "sum", "min", "max", "abs", "stddev", "round", "sqrt", "ln", "count"]
OF_WORDS = ["lower", "upper", "length", "min", "max", "count", "first", "initcap"]
STRANGE = ["NULL", "1e400", "9999999999999999999999", "[1]", "DATE '2026-13-45'", "*", "nosuch",
           "nosuch(1)", "(SELECT 1)", "'\\'", "- - 1", "CAST('x' AS INT)", "1 / 0"]  # fmt: skip


def _number(columns: tuple[list[str], list[str]], draw: Draw, deep: int = 2) -> str:
    """An expression that is, mostly, a number."""
    if draw.random() < 0.02:
        return draw.choice(STRANGE)
    if not deep or draw.random() < 0.4:
        return draw.choice([*columns[0], *columns[0], "0", "1", "-2.5", "1e9"])
    one, two = (_number(columns, draw, deep - 1) for _ in range(2))
    return draw.choice((
        f"({one} {draw.choice('+-*/%')} {two})",
        f"{draw.choice(OF_NUMBERS)}({one})",
        f"CASE WHEN {_truth(columns, draw, deep - 1)} THEN {one} ELSE {two} END",
        f"CAST({one} AS {draw.choice(('INT', 'DOUBLE', 'FLOAT'))})",
        f"COALESCE({one}, {two})",
    ))  # fmt: skip


def _word(columns: tuple[list[str], list[str]], draw: Draw) -> str:
    """An expression that is, mostly, a text."""
    one = draw.choice([*columns[1], *columns[1], "'x'", "''"])
    return draw.choice((one, one, f"{draw.choice(OF_WORDS)}({one})", f"({one} || '%')"))


def _truth(columns: tuple[list[str], list[str]], draw: Draw, deep: int = 2) -> str:
    """A condition."""
    if deep and draw.random() < 0.3:
        one, two = (_truth(columns, draw, deep - 1) for _ in range(2))
        return draw.choice((f"({one} AND {two})", f"({one} OR {two})", f"NOT {one}"))
    number, word = _number(columns, draw, deep), _word(columns, draw)
    return draw.choice((
        f"{number} {draw.choice(('=', '<>', '<', '>='))} {_number(columns, draw, deep)}",
        f"{number} BETWEEN 0 AND 3", f"{number} IN (0, 1)", f"{number} IS NULL",
        f"{word} LIKE '%{draw.choice(('a', '_', '%', '['))}%'", f"{word} = {word}",
    ))  # fmt: skip


def query(draw: Draw, deep: int = 2) -> str:
    """A SELECT with some of its clauses."""
    table = draw.choice(list(TABLES))
    columns = TABLES[table]
    by = draw.choice([*columns[0], *columns[1]])
    shown = ", ".join(
        f"{(_number if draw.random() < 0.7 else _word)(columns, draw)} AS c{n}"
        for n in range(draw.choice((1, 2, 3)))
    )
    source = f"({query(draw, deep - 1)}) AS t" if deep and draw.random() < 0.1 else table
    parts = [f"SELECT {draw.choice(('', '', 'DISTINCT '))}{shown} FROM {source}"]
    if draw.random() < 0.15:
        joined = draw.choice(("JOIN", "LEFT JOIN", "FULL JOIN", "SEMI JOIN"))
        parts.append(f"{joined} cells USING ({draw.choice(('prompt', by))})")
    if draw.random() < 0.4:
        parts.append(f"WHERE {_truth(columns, draw)}")
    if draw.random() < 0.3:
        parts.append(f"GROUP BY {draw.choice((by, by, '1', 'ALL'))}")
        if draw.random() < 0.4:
            parts.append(f"HAVING {_truth(columns, draw)}")
    if draw.random() < 0.4:
        parts.append(f"ORDER BY {draw.choice(('c0', by))} {draw.choice(('', 'DESC'))}")
    if draw.random() < 0.7:
        parts.append(f"LIMIT {draw.choice(('3', '3', '3', '0', '-1', '1e3', '99999999999'))}")
    if deep and draw.random() < 0.05:
        parts.append(f"{draw.choice(('UNION', 'UNION ALL', 'EXCEPT'))} {query(draw, deep - 1)}")
    return " ".join(parts)
