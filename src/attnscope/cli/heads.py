"""`attnscope heads`: what every head of a model does, in one table and one picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli.options import Bos, Json, Model, Quiet
from attnscope.cli.tables import plain_table, print_json

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table


def heads(
    model: Model = "zoo:smollm2",
    out: Annotated[
        Path | None,
        typer.Option(help="Write heads.csv, scores.csv, heads.png and heads.svg there."),
    ] = None,
    prompts: Annotated[int, typer.Option(help="Prompts for each score; from 6 on: intervals.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    bos: Bos = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """What does every head do? Sinks, previous tokens, induction, retrieval, classes, nearness."""
    import sys

    from rich.console import Console

    import attnscope
    from attnscope.experiment.head_scores import head_scores
    from attnscope.stats.head_types import head_kinds, summary
    from attnscope.stats.intervals import MINIMUM

    loaded, tokenizer = attnscope.load(model, bos=bos)

    def tell(what: str) -> None:
        if not quiet and not json:
            print(what, file=sys.stderr)

    scores = head_scores(loaded, tokenizer, prompts=prompts, seed=seed, progress=tell)
    table = head_kinds(scores)
    found = summary(table)
    if out is not None:
        from attnscope.figures.head_types import save_heads
        from attnscope.recipes.recipe_models import label_of

        save_heads(out, table, scores, model=label_of(model), prompts=prompts)
    if json:
        print_json({"kinds": found.to_dicts(), "heads": table.to_dicts()})
        return
    console = Console()
    console.print(_summary(found, model, table))
    retrieved = int(found.filter(found["kind"] == "retrieval")["prompts"][0])
    tried = scores.filter(scores["score"] == "retrieval")["prompt"].n_unique()
    few = "" if retrieved >= MINIMUM else f": fewer than {MINIMUM}, so no head is certain"
    console.print(f"The model found {retrieved} of {tried} needles{few}.")
    if out is not None:
        console.print(f"Every head, its scores and intervals: {out / 'heads.csv'}, heads.png")


def _summary(found: pl.DataFrame, model: str, table: pl.DataFrame) -> Table:
    from rich.markup import escape

    shown = plain_table(
        f"Heads of {model}: {table['layer'].n_unique()} layers, {table.height} heads",
        caption="above: the mean over prompts is above the threshold; certain: its whole 95 % "
        "interval is. A head may be of several kinds. largest: layer.head score.",
    )
    for column in ("kind", "threshold", "above", "certain", "largest", "what"):
        right = column in ("above", "certain")
        whole = column in ("kind", "threshold")  # a name that is cut short says nothing
        shown.add_column(column, justify="right" if right else "left", no_wrap=whole)
    for row in found.iter_rows(named=True):
        share = f" ({100 * row['above'] / row['heads']:.0f} %)" if row["heads"] else ""
        shown.add_row(
            row["kind"],
            f"> {row['threshold']:g}",
            f"{row['above']}{share}",
            str(row["certain"]),
            row["largest"],
            escape(row["what"]),
        )
    return shown
