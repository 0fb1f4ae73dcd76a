"""The mass of pictures, system prompt, question and completion over layers."""

from dataclasses import replace

import polars as pl

from attnscope.figures.figure import Figure
from attnscope.figures.options import COMBINE
from attnscope.figures.reading import Rows
from attnscope.figures.select import AbsentError
from attnscope.figures.shapes.lines import Lines

MODALITIES = {"image", "video", "audio"}


def _parts(rows: Rows) -> Rows:
    """The rows with a part of the prompt in place of the class: a region, a class, or both."""
    values = rows.values
    keys, classes = (values[column].n_unique() for column in ("keys", "item"))
    regions = keys > 1 and set(values["keys"]) - {"all", "not-first"}
    if not regions and not MODALITIES & set(values["item"].drop_nulls()):
        raise AbsentError(
            "this run has no region beside other keys, and no class of pictures or sound",
            missing=["mass"],
        )
    columns = [name for name, number in (("keys", keys), ("item", classes)) if number > 1]
    part = pl.concat_str(columns or ["item"], separator=", ")
    return replace(rows, values=values.with_columns(item=part))


FIGURE = Figure(
    name="modality-depth",
    shows="mass of pictures, system prompt, question and completion over layers",
    measures=["mass"],
    all_of="keys",
    by=["model", "layer", "class"],
    shape=Lines(panel="model", series="class", y="Attention mass"),
    change=_parts,
    title="Attention to each part of the prompt, by layer",
    what="Each line is one part of the prompt: its share of a query's attention, mean over queries",
    quantity="mass",
    needs="an experiment with `mass` among its measures and several regions among its keys, or the "
    "class set `modality`, has the numbers",
    height=260,
    options=COMBINE,
)
