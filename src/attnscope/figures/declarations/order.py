"""Mass over the turns of a conversation, or over documents, in their order."""

import re
from dataclasses import replace
from typing import Any

import polars as pl

from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.reading import SHOWS_VALUES, read, summarise
from attnscope.figures.select import AbsentError
from attnscope.figures.shapes.lines import Lines
from attnscope.spec.experiment import Experiment

NUMBERED = re.compile(r"(?!sample:)(?:(?:region|after|predicts):)?\w+:(\d+)(?::\w+)?", re.ASCII)
"""A numbered region: `document:3`, `turn:2:user`, `region:turn:2:assistant`."""


def _places(experiment: Experiment) -> tuple[str, list[str]]:
    """Numbered queries or keys of one kind (`document:1`, `document:2` …) in numeric order: the
    longest list."""
    lists: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for axis in ("queries", "keys"):
        for name in getattr(experiment, axis):
            if match := NUMBERED.fullmatch(name):
                kind = name[: match.start(1)] + name[match.end(1) :]
                lists.setdefault((axis, kind), []).append((int(match[1]), name))
    (axis, _), longest = max(lists.items(), key=lambda one: len(one[1]), default=(("", ""), []))
    if len(longest) < 2:
        raise AbsentError(
            "this run has no two numbered queries or keys such as document:1 and document:2",
            code="nothing-in-order",
        )
    return axis, [name for _, name in sorted(longest)]


def _numbers(request: Request, figure: Figure) -> Numbers:
    axis, places = _places(request.run.experiment)
    rows = read(request, replace(figure, all_of=axis))
    of = ["model", "prompt", "layer", "head", axis]
    values = rows.values.filter(pl.col(axis).is_in(places))
    values = values.group_by(of, maintain_order=True).agg(pl.col("value", "uniform").sum())
    values = values.rename({"value": "measured", axis: "name"})
    values = values.unpivot(
        ["measured", "uniform"], index=[*of[:-1], "name"], variable_name="series"
    )
    number = pl.col("name").replace_strict(places, range(1, len(places) + 1), return_dtype=pl.Int32)
    # `document` for `document:3`, `assistant turn` for `region:turn:2:assistant`.
    words = re.sub(r"^(?:region|after|predicts):", "", places[0]).split(":")
    kind = " ".join([*words[2:], words[0]])
    # The caption names the first and the last region; the table names all.
    ends: dict[str, Any] = {axis: [f"{places[0]} to {places[-1]}"]}
    rows = replace(
        rows,
        values=values.with_columns(place=number),
        selection=replace(rows.selection, **ends),
        settings={"x_title": f"{kind.capitalize()} (1 to {len(places)})"},
        words={"kind": kind, "to": "to" if axis == "keys" else "from", "last": len(places)},
        text={"places": {"panel": "{}", "series": "{}", "name": "{}"}},
    )
    return summarise(rows, figure)


FIGURE = Figure(
    name="order",
    shows="mass over turns or documents in order, beside uniform attention",
    measures=["mass"],
    pooled=True,
    derived={"panel": "model"},
    by=["panel", "series", "place", "name"],
    shape=Lines(x="place", y="Attention (mass)"),
    sentences=["Mass of all token classes together"],
    numbers=_numbers,
    differences=SHOWS_VALUES,
    title="Attention {to} each {kind}, in order",
    what="Lines are the attention {to} {kind} 1 to {kind} {last}, as measured and if attention "
    "were uniform",
    quantity="mass",
    needs="an experiment with `mass` and queries or keys that are numbered turns or documents "
    "(`document:1`, `document:2` …) has the numbers",
)
