"""Captions: every one says models, layers, heads, queries, keys, normalisation and n.

This module must not know charts.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from attnscope.figures.choice import bundled
from attnscope.figures.figure import Run
from attnscope.figures.words import BUNDLED, count, join, numbers

__all__ = ["caption", "heads_said", "layers_said", "pairs_said", "prompts_said", "tiny"]


def caption(run: Run, parts: Sequence[str], models: Sequence[str]) -> str:
    """The parts as sentences, and what must be said of the models."""
    said = [part.rstrip(".") for part in parts if part]
    note = tiny(run, models)
    return " ".join(f"{s}." for s in [*said, *([note] if note else [])])


def tiny(run: Run, models: Sequence[str]) -> str:
    """What is said of bundled models, or nothing."""
    small = bundled(run, models)
    if not small:
        return ""
    what = (
        BUNDLED if len(small) == 1 else BUNDLED.replace("model ", "models ").replace("one", "ones")
    )
    return f"{join(small)}: {what}"


def layers_said(layers: Sequence[int], total: int | None = None) -> str:
    """`layers 0, 16, 20, 27`."""
    word = "layer" if len(set(layers)) == 1 else "layers"
    return f"{word} {numbers(layers)}" + (f" of {total}" if total else "") + " (counted from 0)"


def heads_said(run: Run, combine: str, frame: pl.DataFrame, models: Sequence[str]) -> str:
    """`mean over all heads`, `mean over heads 0, 1, 7 (of 8)`, `head 3`: those in the rows."""
    heads = frame["head"].drop_nulls().unique().sort().to_list()
    if not heads:
        return "the whole layer"
    if len(heads) == 1:
        return f"head {heads[0]} (counted from 0)"
    sizes = {run.environment.get("models", {}).get(m, {}).get("heads") for m in models} - {None}
    every = not sizes or len(heads) >= max(sizes)
    of = f" (of {join([str(s) for s in sorted(sizes)], 'or')})" if sizes else ""
    which = "all heads" if every else f"heads {numbers(heads)}{of}"
    return {"mean": "mean", "sum": "sum", "max": "maximum"}[combine] + f" over {which}"


def prompts_said(counts: Sequence[int], *, interval: bool) -> str:
    """`n = 64 prompts`, with what the interval is, or that there is none."""
    least, most = min(counts), max(counts)
    n = f"n = {count(most, 'prompt')}" if least == most else f"n = {least} to {most} prompts"
    if most < 2:
        return f"{n}, so there are no intervals"
    return f"{n}; intervals: 95 %, BCa bootstrap over prompts" if interval else n


def pairs_said(pairs: pl.DataFrame, count_from: int = 0) -> str:
    """`A, layer 0, heads 0–2; B, layer 0, head 26 (counted from 0)`."""
    said = []
    for (model, layer), part in pairs.group_by(["model", "layer"], maintain_order=True):
        heads = [h + count_from for h in part["head"].to_list()]
        word = "head" if len(heads) == 1 else "heads"
        said.append(f"{model}, layer {layer + count_from}, {word} {numbers(heads)}")
    paper = ", as in the paper" if count_from else ""
    return f"{'; '.join(said)} (counted from {count_from}{paper})"
