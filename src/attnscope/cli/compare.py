"""`attnscope compare`: the statistics of a run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.cli.options import Cluster, Json, Strata, listed, numbers, opened, units_of
from attnscope.errors import InputError, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from attnscope.run.store import Run
    from attnscope.spec.claims import Claim
    from attnscope.stats.verdicts import Verdict


Over = Annotated[
    str | None,
    typer.Option(help="Compare model or condition. Default: model if the run has two models."),
]
Pair = Annotated[
    str | None,
    typer.Option(help="FIRST,SECOND: compare SECOND with FIRST. all: compare every pair."),
]
Combine = Annotated[
    str | None, typer.Option(help="Heads: mean, sum, max or each; default: as in the experiment.")
]
Normalise = Annotated[
    str | None,
    typer.Option(
        "--normalize",
        "--normalise",
        help="How to show mass: mass, per-token, share or lift. Default: as in the experiment.",
    ),
]
Families = Annotated[
    str, typer.Option(help="Multiple-testing family: each measure, pooled, or two-level.")
]
Margin = Annotated[
    str | None,
    typer.Option(help="Smallest difference that counts: a number, or a percentage (5%)."),
]
Holds = Annotated[
    bool, typer.Option("--holds", help="Show only rows whose outcome is not undetermined.")
]
All = Annotated[
    bool,
    typer.Option(
        "--all", help="Show every row, not only the 10 with the smallest p of each table."
    ),
]
Claims = Annotated[
    str | None,
    typer.Option(help="YAML file of claims; default: the run's own and the built-in claims."),
]
Sensitivity = Annotated[
    str | None, typer.Option(help="Name of a claim to judge under every choice that the run has.")
]


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="A run directory, or several.")
    ],
    over: Over = None,
    pair: Pair = None,
    combine: Combine = None,
    normalise: Normalise = None,
    cluster: Cluster = None,
    strata: Strata = None,
    families: Families = "each",
    margin: Margin = None,
    level: Annotated[float, typer.Option(help="Confidence level of the intervals.")] = 0.95,
    resamples: Annotated[int, typer.Option(help="Minimum number of resamples.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the resamples.")] = 0,
    measure: Annotated[str | None, typer.Option(help="Show these measures only.")] = None,
    layer: Annotated[str | None, typer.Option(help="Show these layers only: 0,1,7.")] = None,
    classes: Annotated[str | None, typer.Option("--class", help="Show these classes only.")] = None,
    holds: Holds = False,
    all_rows: All = False,
    claims: Claims = None,
    sensitivity: Sensitivity = None,
    json: Json = False,
) -> None:
    """Is the difference real? Paired statistics of a run, and verdicts on claims about it.

    Several runs of the same prompts are compared like the models of one run.
    """
    from attnscope.stats import formatting

    two: Any = pair if pair in (None, "all") else tuple(pair.split(","))
    if isinstance(two, tuple) and len(two) != 2:
        raise InputError(
            f"--pair {pair} is no pair; give FIRST,SECOND or all", code="bad-pair", value=pair
        )
    units = units_of(cluster, strata)
    drawn = {"resamples": resamples, "seed": seed}
    settings = {**units, "families": families, "margin": margin, "level": level, **drawn}
    how = {"combine": combine, "normalise": normalise, "over": over, "pair": two, **settings}
    opened_runs = [opened(run) for run in runs]
    judged, varied = _claims(opened_runs[0], claims, sensitivity)
    compared, verdicts, choices = _results(opened_runs, judged, varied, how, {**units, **drawn})
    if compared is not None:
        compared = _selected(
            compared, listed(measure), numbers("layer", layer), listed(classes), holds
        )
    results = (compared, verdicts, choices)
    if json:
        print(formatting.as_json(*results, settings=settings))
    else:
        _print(formatting.as_tables(*results, all_rows=all_rows, settings=settings))


def _claims(
    run: Run, file: str | None, sensitivity: str | None
) -> tuple[Sequence[Claim] | None, Claim | None]:
    """The claims to judge, None for the run's own and the built-in ones; and the claim to judge
    under several choices."""
    from attnscope.spec.claims import load_claims
    from attnscope.stats.run_stats import claims_of_run

    judged = None if file is None else load_claims(file)
    if sensitivity is None:
        return judged, None
    known = claims_of_run(run) if judged is None else judged
    for claim in known:
        if claim.name == sensitivity:
            return judged, claim
    raise unknown("claim", sensitivity, [claim.name for claim in known])


def _results(
    runs: Sequence[Run],
    judged: Sequence[Claim] | None,
    varied: Claim | None,
    how: dict[str, Any],
    units: dict[str, Any],
) -> tuple[pl.DataFrame | None, list[Verdict], pl.DataFrame | None]:
    """The comparison, the verdicts, and one claim under every choice."""
    from attnscope.stats import run_stats

    if len(runs) > 1:
        if varied is not None:
            raise InputError("--sensitivity takes one run; give a single RUN", code="several-runs")
        return run_stats.compare_runs(runs, **how), [], None
    (run,) = runs
    several = len(run.experiment.models) > 1 or len(run.experiment.conditions) > 1
    compared = run_stats.compare_run(run, **how) if several else None
    two = how["pair"]
    models = two if isinstance(two, tuple) and two[0] in run.experiment.models else None
    verdicts = run_stats.judge_run(run, judged, pair=models, **units)
    choices = None
    if varied is not None:
        choices = run_stats.sensitivity_of_run(run, varied, pair=models, **units)
    return compared, verdicts, choices


def _selected(
    compared: pl.DataFrame,
    measures: list[str] | None,
    layers: list[int] | None,
    classes: list[str] | None,
    holds: bool,
) -> pl.DataFrame:
    """The selected rows; a name that no row has is an error."""
    import polars as pl

    from attnscope.stats.paired import OUTCOMES

    for what, column, names in (
        ("measure", "measure", measures),
        ("layer", "layer", layers),
        ("class", "item", classes),
    ):
        if names is None:
            continue
        known = compared[column].drop_nulls().unique(maintain_order=True).to_list()
        for name in names:
            if name not in known:
                raise unknown(what, name, sorted(known))
        compared = compared.filter(pl.col(column).is_in(names))
    return compared.filter(pl.col("outcome") != OUTCOMES[-1]) if holds else compared


def _print(tables: Any) -> None:
    from rich.console import Console

    from attnscope.stats.formatting import WIDTH

    console = Console()
    # A file or a pipe has no width of its own.
    piped = not console.is_terminal and "COLUMNS" not in os.environ
    console.width = WIDTH if piped else min(console.width, WIDTH)
    console.print(tables)
