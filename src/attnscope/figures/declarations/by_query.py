"""Per-query values over the positions of the text or over the tokens of the completion."""

from dataclasses import replace

import polars as pl

from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.options import Option
from attnscope.figures.reading import SHOWS_VALUES, Rows, label, read, summarise, without_zeros
from attnscope.figures.select import AbsentError
from attnscope.figures.shapes.lines import Lines

MEASURES = ("query_mass", "query_weight", "query_entropy")
ALONG = {
    "text": ("Position of the query", "position in the text", "texts"),
    "answer": ("Generated token", "generated token", "completions"),
}


def _along(rows: Rows) -> Rows:
    """The rows by position, or by the generated tokens (from 1) that the queries predicted."""
    along, bin_size = rows.request.options["along"], rows.request.run.experiment.bin
    x_title, unit, longer = ALONG[along]
    values = rows.values
    if along == "answer":
        cell = ["model", "prompt", "condition"]
        cells = rows.request.run.cells.select(*cell, "tokens", "generated_tokens")
        step = pl.col("position") - pl.col("tokens") + pl.col("generated_tokens") + 1
        values = values.join(cells, on=cell, maintain_order="left").filter(
            pl.col("generated_tokens") > 0, step >= 1
        )
        values = values.with_columns(position=step)
        if bin_size > 1 or values.is_empty():
            reason = "bins of queries" if bin_size > 1 else "no completions"
            raise AbsentError(
                f"this run has {reason}, so there is no value per generated token",
                missing=list(rows.measures),
            )
    rows = replace(
        rows,
        values=values,
        settings={**rows.settings, "x_title": x_title},
        words={**rows.words, "place": unit},
        sentences=[f"Late positions exist only in the longer {longer}"],
    )
    return without_zeros(rows, "item", "line")


def _numbers(request: Request, figure: Figure) -> Numbers:
    """The means; 0 has no interval, because no query at this position has a key of the class."""
    numbers = summarise(_along(read(request, figure)), figure)
    zero = pl.col("value") == 0
    ends = (pl.when(~zero).then(pl.col(end)).alias(end) for end in ("low", "high"))
    return replace(numbers, data=numbers.data.with_columns(*ends))


FIGURE = Figure(
    name="by-query",
    shows="per-query mass, weight or entropy over the text or over the completion",
    table="by_query",
    measures=MEASURES,
    all_of="keys",
    pooled=True,
    derived={"panel": "model", "series": label("keys?", "thing?")},
    by=["panel", "series", "position"],
    shape=Lines(x="position"),
    numbers=_numbers,
    differences=SHOWS_VALUES,
    title="{measure} of each query, by {place}",
    what="Lines are the {measure} of the attention row of each query, by {place}",
    quantity="{measure}",
    options={
        "measure": Option(
            help=f"{', '.join(MEASURES[:-1])} or {MEASURES[-1]}; default: the first in the run",
            known=(None, *MEASURES),
        ),
        "along": Option(help="text (default) or answer (the completion)", known=tuple(ALONG)),
    },
)
