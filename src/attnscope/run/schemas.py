"""The tables of a run, column by column; `docs/runs.md` explains them.

What measures writes them, what draws and tests reads them; neither knows the other.
"""

import polars as pl

_WHOSE = {"model": pl.String(), "prompt": pl.Int32(), "condition": pl.String()}
"""The cell that a row is of."""
_WHAT = {
    **dict.fromkeys(("keys", "classes"), pl.String()),
    **dict.fromkeys(("layer", "head"), pl.Int16()),
    **dict.fromkeys(("measure", "item"), pl.String()),
}
"""What a number is of, behind its queries."""

CELLS = pl.Schema(
    {
        "cell": pl.String(),
        **_WHOSE,
        "tokens": pl.Int32(),
        "filler_tokens": pl.Int32(),
        "boundary_tokens": pl.Int32(),
        "base_boundary_tokens": pl.Int32(),
        "generated_tokens": pl.Int32(),
        "generated": pl.String(),
    }
)
"""One row per cell: a model, a prompt and a condition; and what the model answered, if it was
let to."""

VALUES = pl.Schema(
    {
        **_WHOSE,
        "queries": pl.String(),
        **_WHAT,
        "target": pl.String(),
        "value": pl.Float64(),
        "uniform": pl.Float64(),
        "tokens": pl.Float64(),
        "error": pl.Float64(),
    }
)
"""One row per number that a cell has for a layer and head."""

POSITIONS = pl.Schema(
    {
        **_WHOSE,
        "queries": pl.String(),
        "layer": pl.Int16(),
        "head": pl.Int16(),
        "position": pl.Int32(),
        "average": pl.Float32(),
        "received": pl.Float32(),
    }
)
"""One row per token that an attention profile was asked for, per layer and head."""

BY_QUERY = pl.Schema(
    {
        **_WHOSE,
        "queries": pl.String(),
        **_WHAT,
        "position": pl.Int32(),
        "count": pl.Int32(),
        "value": pl.Float32(),
    }
)
"""One row per number that a query has, or a bin of them: `position` is the first of the bin,
`count` how many queries of it count, and the value their mean."""

TOKENS = pl.Schema(
    {
        **_WHOSE,
        "position": pl.Int32(),
        "id": pl.Int32(),
        "text": pl.String(),
        "class": pl.String(),
        "regions": pl.List(pl.String()),
        "role": pl.String(),
        "aligned_position": pl.Int32(),
    }
)
"""One row per token of a cell's prompt: what it is, where it is, and which base token it was."""

COMPLETIONS = pl.Schema(
    {
        **_WHOSE,
        "task": pl.String(),
        "metric": pl.String(),
        "answer": pl.String(),
        "completion": pl.String(),
        "value": pl.Float64(),
        "total": pl.Float64(),
    }
)
"""One row per completion and metric of an evaluation: `value` is the score of this completion.
`total` is the score of the condition where a task has one that is not the mean of the values."""

REPEATS = "repeat_of"
"""Of what is known of prompts, the number of the first with the same text; there where some text is
asked again. The author of a file may say it of prompts that are one in other words."""

TABLES = {"values": VALUES, "tokens": TOKENS, "positions": POSITIONS, "by_query": BY_QUERY}
"""What is stored of every cell, by name; `positions` only where profiles were asked for, `by_query`
only where a per-query measure was."""

QUERIED = {**TABLES, "cells": CELLS, "completions": COMPLETIONS}
"""Tables that a query can name; `prompts` is one too, with columns that the prompts decide."""
