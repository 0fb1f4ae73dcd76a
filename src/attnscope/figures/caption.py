"""Captions: every one says models, layers, heads, queries, keys, normalisation and n.

This module must not know charts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from attnscope.figures.numbers import intervals
from attnscope.figures.select import ValueRows
from attnscope.figures.text_format import BUNDLED, count, join
from attnscope.stats.intervals import MINIMUM
from attnscope.stats.tables import ranges

if TYPE_CHECKING:
    from attnscope.figures.figure import Request
    from attnscope.run.store import Run

HOLLOW = "Hollow points have no interval: too few prompts, or all alike"


def caption(parts: Sequence[str]) -> str:
    """The parts as sentences; what is empty is left out."""
    return " ".join(f"{part.rstrip('.')}." for part in parts if part)


def bundled_note(run: Run, models: Sequence[str]) -> str:
    """What is said of bundled models, which are tiny and trained by this project; or nothing."""
    known = run.environment.get("models", {})
    small = [m for m in models if known.get(m, {}).get("bundled")]
    if not small:
        return ""
    what = (
        BUNDLED if len(small) == 1 else BUNDLED.replace("model ", "models ").replace("one", "ones")
    )
    return f"{join(small)}: {what}"


def unfinished_note(run: Run) -> str:
    """What is said of a run that was stopped, or nothing."""
    if run.complete:
        return ""
    return (
        f"The run is not finished: all this rests on the {count(run.cells.height, 'cell')} so far"
    )


def layers_text(layers: Sequence[int], total: int | None = None) -> str:
    """`layers 0, 16, 20, 27 (counted from 0)`, and of how many in the run where that is more."""
    word = "layer" if len(set(layers)) == 1 else "layers"
    some = f", of {total} in the run" if total is not None and len(layers) < total else ""
    return f"{word} {ranges(layers, 3)} (counted from 0){some}"


def scope_text(run: Run, combine: str, selection: ValueRows, total: int | None = None) -> str:
    """Models, layers (of how many) and how heads are combined."""
    layers = layers_text(selection.layers, total)
    return f"{join(selection.model_names)}, {layers}, {heads_text(run, combine, selection)}"


def hollow(frame: pl.DataFrame) -> str:
    """What is said of points without an interval that others have, or nothing."""
    none = frame["low"].null_count()
    return HOLLOW if 0 < none < frame.height else ""


def heads_text(run: Run, combine: str, selection: ValueRows) -> str:
    """`mean over all heads`, `mean over heads 0, 1, 7 (of 8)`, `head 3`: those in the rows."""
    heads = selection.frame["head"].drop_nulls().unique().sort().to_list()
    if not heads:
        return "the whole layer"
    if len(heads) == 1:
        return f"head {heads[0]} (counted from 0)"
    known = run.environment.get("models", {})
    sizes = {known.get(m, {}).get("heads") for m in selection.model_names} - {None}
    every = not sizes or len(heads) >= max(sizes)
    of = f" (of {join([str(s) for s in sorted(sizes)], 'or')})" if sizes else ""
    which = "all heads" if every else f"heads {ranges(heads, 3)}{of}"
    text = {"mean": "mean", "sum": "sum", "max": "maximum"}[combine] + f" over {which}"
    if run.experiment.combine == "each" and combine == "mean":
        text += " (the experiment says each: `head-map` and `effect-heads` show every head)"
    return text


def keys_text(keys: str) -> str:
    """`keys: all`, and of what is left out that nothing takes its place."""
    note = " (the first left out, the others not scaled up)" if keys == "not-first" else ""
    return f"keys: {keys}{note}"


def settings_text(selection: ValueRows) -> str:
    """`queries: all; keys: all; class set: default; condition: base`."""
    parts = [f"queries: {selection.queries}", keys_text(selection.keys)]
    if selection.classes is not None:
        parts.append(f"class set: {selection.classes}")
    return "; ".join([*parts, f"condition: {', '.join(selection.conditions)}"])


def omissions(selection: ValueRows, why: str = "") -> list[str]:
    """Classes without a token, and values that are not defined."""
    undefined = selection.undefined
    return [
        f"No text has a token of {join(selection.absent, 'or')}" if selection.absent else "",
        f"{undefined} undefined values{why} are left out" if undefined else "",
    ]


def prompts_text(
    request: Request, frame: pl.DataFrame, *, interval: bool = False, drawn: str = ""
) -> str:
    """`n = 64 prompts`, with what the interval is and how it is drawn, or that there is none."""
    least, most = min(frame["n"]), max(frame["n"])
    n = f"n = {count(most, 'prompt')}" if least == most else f"n = {least} to {most} prompts"
    shown = list(request.choice.prompts or request.run.cells["prompt"].unique())
    n = f"{n} {request.units.describe(shown)}".rstrip()
    if min(most, request.units.count(shown)) < MINIMUM:
        return f"{n}, so there are no intervals (they need {MINIMUM})"
    how = f"95 %, Student's t widened for skewness, over {request.unit_name}"
    return f"{n}; intervals: {how}{drawn}{unreliable_text(frame)}" if interval else n


def line_caption(
    request: Request,
    data: pl.DataFrame,
    selection: ValueRows,
    how: str,
    *what: str,
    drawn: str = ", drawn as bands",
    late: str = "",
    why: str = "",
    total: int | None = None,
) -> list[str]:
    """Of a chart of values with their intervals: models, layers (of how many) and `how` heads are
    combined; `what` is shown; prompts and intervals; what has none, and what is left out."""
    prompts = prompts_text(request, data, interval=intervals(data), drawn=drawn)
    return [
        f"{join(selection.model_names)}, {layers_text(selection.layers, total)}, {how}",
        *what,
        f"{prompts}{late}",
        hollow(data),
        *omissions(selection, why),
    ]


def unreliable_text(frame: pl.DataFrame) -> str:
    """How many intervals are unreliable, or nothing."""
    if "unreliable" not in frame.columns or not (some := int(frame["unreliable"].sum())):
        return ""
    known = frame.height - frame["low"].null_count()
    return f"; {some} of {known} are unreliable, because a few prompts dominate"


def head_list_text(pairs: pl.DataFrame, count_from: int = 0) -> str:
    """`A, layer 0, heads 0–2; B, layer 0, head 26 (counted from 0)`."""
    parts = []
    for (model, layer), part in pairs.group_by(["model", "layer"], maintain_order=True):
        heads = [h + count_from for h in part["head"].to_list()]
        word = "head" if len(heads) == 1 else "heads"
        parts.append(f"{model}, layer {layer + count_from}, {word} {ranges(heads, 3)}")
    paper = ", as in the paper" if count_from else ""
    return f"{'; '.join(parts)} (counted from {count_from}{paper})"
