"""Tables of values as a run would have them, made of random numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl

from attnscope.run.schemas import VALUES

Cell = tuple[str, int, str, int, int | None]
"""Model, prompt, condition, layer, head."""


def masses(
    value: Callable[..., float | None] | None = None,
    *,
    models: Sequence[str] = ("base", "tuned"),
    conditions: Sequence[str] = ("none",),
    prompts: Sequence[int] = range(12),
    layers: int = 2,
    heads: int = 3,
    items: Sequence[str] = ("hash", "star"),
    seed: int = 0,
    **columns: Any,
) -> pl.DataFrame:
    """Masses per head and class; `value(model, prompt, condition, layer, head, item)`."""
    rng = np.random.default_rng(seed)
    rows = [
        _row(
            (model, prompt, condition, layer, head),
            classes="default",
            measure="mass",
            item=item,
            value=(
                float(rng.uniform(0.05, 0.5))
                if value is None
                else value(model, prompt, condition, layer, head, item)
            ),
            uniform=0.1 + 0.01 * prompt,
            tokens=3.0 + prompt,
            **columns,
        )
        for model in models
        for condition in conditions
        for prompt in prompts
        for layer in range(layers)
        for head in range(heads)
        for item in items
    ]
    return pl.DataFrame(rows, schema=VALUES)


def measured(
    measure: str,
    value: Callable[..., float | None],
    *,
    models: Sequence[str] = ("base",),
    conditions: Sequence[str] = ("filler",),
    prompts: Sequence[int] = range(12),
    layers: int = 3,
    heads: int | None = 2,
    **columns: Any,
) -> pl.DataFrame:
    """Another measure; `value(model, prompt, condition, layer, head)`. No heads: whole layers."""
    rows = [
        _row(
            (model, prompt, condition, layer, head),
            measure=measure,
            value=value(model, prompt, condition, layer, head),
            tokens=40.0,
            **columns,
        )
        for model in models
        for condition in conditions
        for prompt in prompts
        for layer in range(layers)
        for head in ([None] if heads is None else range(heads))
    ]
    return pl.DataFrame(rows, schema=VALUES)


def _row(cell: Cell, **columns: Any) -> dict[str, Any]:
    blank = dict.fromkeys(VALUES.names())
    which = dict(zip(("model", "prompt", "condition", "layer", "head"), cell, strict=True))
    return {**blank, "queries": "all", "keys": "all", **which, **columns}
