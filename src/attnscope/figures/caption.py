"""Builds captions: models, layers, heads, queries, keys, normalisation and n."""

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

HOLLOW = "Hollow points have no interval: too few prompts, or all values are equal"


def caption(parts: Sequence[str]) -> str:
    """Joins the parts as sentences; empty parts are skipped."""
    return " ".join(f"{part.rstrip('.')}." for part in parts if part)


def bundled_note(run: Run, models: Sequence[str]) -> str:
    """The note on bundled models, which are tiny and trained by this project; empty if none."""
    known = run.environment.get("models", {})
    small = [m for m in models if known.get(m, {}).get("bundled")]
    if not small:
        return ""
    what = (
        BUNDLED if len(small) == 1 else BUNDLED.replace("model ", "models ").replace("one", "ones")
    )
    return f"{join(small)}: {what}"


def unfinished_note(run: Run) -> str:
    """The note on an unfinished run; empty if the run is complete."""
    if run.complete:
        return ""
    return (
        f"The run is not finished: these results use the {count(run.cells.height, 'cell')} so far"
    )


def layers_text(layers: Sequence[int], total: int | None = None) -> str:
    """`layers 0, 16, 20, 27 (counted from 0)`; adds the number in the run if it is larger."""
    word = "layer" if len(set(layers)) == 1 else "layers"
    some = f", of {total} in the run" if total is not None and len(layers) < total else ""
    return f"{word} {ranges(layers, 3)} (counted from 0){some}"


def scope_text(run: Run, combine: str, selection: ValueRows, total: int | None = None) -> str:
    """Models, layers and how heads are combined."""
    layers = layers_text(selection.layers, total)
    return f"{join(selection.model_names)}, {layers}, {heads_text(run, combine, selection)}"


def hollow(frame: pl.DataFrame) -> str:
    """The note on points without an interval; empty if all or none have one."""
    none = frame["low"].null_count()
    return HOLLOW if 0 < none < frame.height else ""


def heads_text(run: Run, combine: str, selection: ValueRows) -> str:
    """`mean over all heads`, `mean over heads 0, 1, 7 (of 8)` or `head 3`, from the rows."""
    heads = selection.frame["head"].drop_nulls().unique().sort().to_list()
    if not heads:
        return "one value per layer"
    if len(heads) == 1:
        return f"head {heads[0]} (counted from 0)"
    known = run.environment.get("models", {})
    sizes = {known.get(m, {}).get("heads") for m in selection.model_names} - {None}
    every = not sizes or len(heads) >= max(sizes)
    of = f" (of {join([str(s) for s in sorted(sizes)], 'or')})" if sizes else ""
    which = "all heads" if every else f"heads {ranges(heads, 3)}{of}"
    text = {"mean": "mean", "sum": "sum", "max": "maximum"}[combine] + f" over {which}"
    if run.experiment.combine == "each" and combine == "mean":
        text += " (`head-map` and `effect-heads` show each head)"
    return text


def keys_text(keys: str) -> str:
    """`keys: all`; for `not-first` a note that the other masses stay as they are."""
    note = (
        " (the first token is excluded; the other weights are not rescaled)"
        if keys == "not-first"
        else ""
    )
    return f"keys: {keys}{note}"


def settings_text(selection: ValueRows) -> str:
    """`queries: all; keys: all; class set: default; condition: base`."""
    parts = [f"queries: {selection.queries}", keys_text(selection.keys)]
    if selection.classes is not None:
        parts.append(f"class set: {selection.classes}")
    return "; ".join([*parts, f"condition: {', '.join(selection.conditions)}"])


def omissions(selection: ValueRows, why: str = "") -> list[str]:
    """Sentences on classes without tokens and on undefined values."""
    undefined = selection.undefined
    return [
        f"No prompt contains a token of the class {join(selection.absent, 'or')}"
        if selection.absent
        else "",
        f"{undefined} undefined values{why} are excluded" if undefined else "",
    ]


def prompts_text(
    request: Request, frame: pl.DataFrame, *, interval: bool = False, drawn: str = ""
) -> str:
    """`n = 64 prompts`, and what the intervals are, or why there are none."""
    least, most = min(frame["n"]), max(frame["n"])
    n = f"n = {count(most, 'prompt')}" if least == most else f"n = {least} to {most} prompts"
    shown = list(request.choice.prompts or request.run.cells["prompt"].unique())
    n = f"{n} {request.units.describe(shown)}".rstrip()
    if min(most, request.units.count(shown)) < MINIMUM:
        return f"{n}; no confidence intervals (they need at least {MINIMUM} {request.unit_name})"
    if not interval:
        return n
    how = f"95 % confidence intervals over {request.unit_name}{drawn}"
    return f"{n}; {how} (Student's t, corrected for skewness){unreliable_text(frame)}"


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
    """The caption of a chart of values with intervals.

    `what` is shown: the first sentence opens the caption. `how` heads are combined; `drawn` is how
    intervals are drawn; `late` is a note on late positions, `why` on undefined values.
    """
    prompts = prompts_text(request, data, interval=intervals(data), drawn=drawn)
    return [
        *what[:1],
        f"{join(selection.model_names)}, {layers_text(selection.layers, total)}, {how}",
        *what[1:],
        f"{prompts}{late}",
        hollow(data),
        *omissions(selection, why),
    ]


def unreliable_text(frame: pl.DataFrame) -> str:
    """The number of unreliable intervals; empty if there are none."""
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
