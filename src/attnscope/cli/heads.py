"""`attnscope heads`: the type of every head of a model, as a table and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli.options import Bos, Json, Model, Quiet
from attnscope.cli.output import plain_table, print_json

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table


def heads(
    model: Model = "zoo:smollm2",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for heads.csv, scores.csv, heads.png and heads.svg. Default: none."
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option(help="Prompts per score; confidence intervals need at least 6.")
    ] = 8,
    seed: Annotated[int, typer.Option(help="Random seed of the prompts.")] = 0,
    bos: Bos = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Classify every head: sink, previous-token, induction, retrieval, class-specific, local."""
    import sys

    from rich.console import Console

    import attnscope
    from attnscope.experiment.head_scores import head_scores
    from attnscope.stats.head_types import classify_heads, summary
    from attnscope.stats.intervals import MINIMUM

    loaded, tokenizer = attnscope.load(model, bos=bos)

    def report(message: str) -> None:
        if not quiet and not json:
            print(message, file=sys.stderr)

    scores = head_scores(loaded, tokenizer, prompts=prompts, seed=seed, progress=report)
    table = classify_heads(scores)
    types = summary(table)
    if out is not None:
        from attnscope.figures.head_types import save_heads
        from attnscope.recipes.recipe_models import label_of

        save_heads(out, table, scores, model=label_of(model), prompts=prompts)
    if json:
        print_json({"types": types.to_dicts(), "heads": table.to_dicts()})
        return
    console = Console()
    console.print(_summary(types, model, table))
    retrieved = int(types.filter(types["kind"] == "retrieval")["prompts"][0])
    tried = scores.filter(scores["score"] == "retrieval")["prompt"].n_unique()
    few = (
        ""
        if retrieved >= MINIMUM
        else f"; with fewer than {MINIMUM}, no head is classified as retrieval"
    )
    console.print(f"The model found {retrieved} of {tried} needles{few}.")
    if out is not None:
        console.print(f"All heads with scores and intervals: {out / 'heads.csv'}, heads.png")


def _summary(types: pl.DataFrame, model: str, table: pl.DataFrame) -> Table:
    from rich.markup import escape

    printed = plain_table(
        f"Heads of {model}: {table['layer'].n_unique()} layers, {table.height} heads",
        caption="above: heads whose mean over prompts is above the threshold; certain: heads whose "
        "whole 95 % confidence interval is above it. A head may have several types. largest: "
        "layer.head score.",
    )
    for column in ("kind", "threshold", "above", "certain", "largest", "what"):
        right = column in ("above", "certain")
        no_wrap = column in ("kind", "threshold")
        title = "type" if column == "kind" else column
        printed.add_column(title, justify="right" if right else "left", no_wrap=no_wrap)
    for row in types.iter_rows(named=True):
        share = f" ({100 * row['above'] / row['heads']:.0f} %)" if row["heads"] else ""
        printed.add_row(
            row["kind"],
            f"> {row['threshold']:g}",
            f"{row['above']}{share}",
            str(row["certain"]),
            row["largest"],
            escape(row["what"]),
        )
    return printed
