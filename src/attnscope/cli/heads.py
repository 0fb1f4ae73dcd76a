"""`attnscope heads`: the type of every head of a model, as a table and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.cli.options import Bos, Device, Dtype, Json, Model, Quiet, on_disk
from attnscope.cli.output import plain_table, print_json

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table


def heads(
    model: Model = "zoo:smollm2",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the runs, scores.csv and the figure (heads.png, heads.csv …). "
            "Default: none."
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option(help="Prompts per score; confidence intervals need at least 6.")
    ] = 8,
    seed: Annotated[int, typer.Option(help="Random seed of the prompts.")] = 0,
    bos: Bos = False,
    device: Device = None,
    dtype: Dtype = "auto",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Classify every head: sink, previous-token, induction, retrieval, class-specific, local.

    Runs the recipes sinks, induction and needle on the model and joins their scores.
    """
    from tempfile import TemporaryDirectory

    options = {"prompts": prompts, "seed": seed, "bos": bos, "device": device, "dtype": dtype}
    if out is None:
        with TemporaryDirectory(prefix="attnscope-") as folder:
            scores = _scores(model, Path(folder), options, quiet=quiet or json)
    else:
        scores = _scores(model, on_disk(out), options, quiet=quiet or json)
    _print_types(model, scores, prompts, out, json=json)


def _scores(model: str, folder: Path, options: dict[str, Any], *, quiet: bool) -> pl.DataFrame:
    """Run the recipes into directories of `folder`."""
    from functools import partial

    import attnscope
    from attnscope.cli.run_in_terminal import carry_out, no_bars
    from attnscope.experiment.local import local
    from attnscope.experiment.plan import make_plan
    from attnscope.loading import load_text_model
    from attnscope.recipes.heads import head_experiments, head_scores

    no_bars()
    experiments = head_experiments(model, **options)
    plans = {name: make_plan(experiment) for name, experiment in experiments.items()}
    loaded, _ = load_text_model(
        model, **{name: options[name] for name in ("device", "dtype", "bos")}
    )
    executor = partial(local, model=loaded)
    for name, plan in plans.items():
        carry_out(plan, folder / name, quiet=quiet, executor=executor)
    return head_scores({name: attnscope.open_run(folder / name) for name in plans})


def _print_types(
    model: str, scores: pl.DataFrame, prompts: int, out: Path | None, *, json: bool
) -> None:
    from rich.console import Console

    from attnscope.figures.head_types import classify_heads, summary
    from attnscope.stats.means import MINIMUM

    table = classify_heads(scores)
    types = summary(table)
    if out is not None:
        from attnscope.figures.export import as_csv, save, write
        from attnscope.figures.registry import draw_table
        from attnscope.recipes.recipe_models import label_of

        save(draw_table("heads", table, model=label_of(model), prompts=prompts), out)
        write(out / "scores.csv", as_csv(scores).encode())
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

    rules = "\n".join(f"{kind}: {what}" for kind, what in types.select("kind", "what").rows())
    printed = plain_table(
        f"Heads of {model}: {table['layer'].n_unique()} layers, {table.height} heads",
        caption="above: heads whose mean over prompts is above the threshold; certain: heads whose "
        "whole 95 % confidence interval is above it. A head may have several types. largest: "
        f"layer.head score.\n{escape(rules)}",
    )
    printed.collapse_padding = True
    for column in ("type", "threshold", "above", "certain", "largest"):
        right = column in ("above", "certain")
        printed.add_column(
            column, justify="right" if right else "left", no_wrap=column != "largest"
        )
    for row in types.iter_rows(named=True):
        share = f" ({100 * row['above'] / row['heads']:.0f} %)" if row["heads"] else ""
        printed.add_row(
            row["kind"],
            f"> {row['threshold']:g}",
            f"{row['above']}{share}",
            str(row["certain"]),
            row["largest"],
        )
    return printed
