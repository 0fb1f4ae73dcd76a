"""`attnscope compare`: the statistics of a run."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.cli.options import Cluster, Json, Strata, listed, numbers, opened, units_of
from attnscope.cli.output import print_json
from attnscope.errors import InputError, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from attnscope.report.published import PublishedStatistic
    from attnscope.run.store import Run
    from attnscope.spec.claims import Claim
    from attnscope.stats.verdicts import Verdict


Over = Annotated[
    str | None,
    typer.Option(
        help="Compare model, condition, class, queries or keys. Default: model if there are two."
    ),
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
Margin = Annotated[
    str | None,
    typer.Option(help="Smallest difference that counts: a number, or a percentage (5%)."),
]
Holds = Annotated[bool, typer.Option("--holds", help="Show only rows that are decided.")]
Full = Annotated[bool, typer.Option("--full", help="Show everything, not only the first 40 lines.")]
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
    margin: Margin = None,
    level: Annotated[float, typer.Option(help="Confidence level of the intervals.")] = 0.95,
    measure: Annotated[str | None, typer.Option(help="Show these measures only.")] = None,
    layer: Annotated[str | None, typer.Option(help="Show these layers only: 0,1,7.")] = None,
    head: Annotated[str | None, typer.Option(help="Show these heads only: 0,1,7.")] = None,
    classes: Annotated[str | None, typer.Option("--class", help="Show these classes only.")] = None,
    keys: Annotated[str | None, typer.Option(help="Show these keys only.")] = None,
    queries: Annotated[str | None, typer.Option(help="Show these queries only.")] = None,
    holds: Holds = False,
    full: Full = False,
    claims: Claims = None,
    sensitivity: Sensitivity = None,
    json: Json = False,
) -> None:
    """Is the difference real? Paired statistics of a run, and verdicts on claims about it.

    Several runs of the same prompts are compared like the models of one run.
    """
    from attnscope.cli import compare_tables

    units = units_of(cluster, strata)
    settings = {**units, "margin": margin, "level": level}
    over = "item" if over == "class" else over
    if head is not None and combine is None:
        combine = "each"
    shown = {"combine": combine, "normalise": normalise}
    how = {**shown, "over": over, "pair": _pair(pair), **settings}
    opened_runs = [opened(run) for run in runs]
    judged, varied = _claims(opened_runs[0], claims, sensitivity)
    chosen = {
        "measure": listed(measure),
        "layer": numbers("layer", layer),
        "head": numbers("head", head),
        "item": listed(classes),
        "keys": listed(keys),
        "queries": listed(queries),
    }
    explicit = holds or any(one is not None for one in (over, pair, *chosen.values()))
    compared, verdicts, choices = _results(
        opened_runs, judged, varied, how, units, explicit=explicit
    )
    results = (_selected(compared, chosen, holds), verdicts, choices)
    statistics = _statistics(opened_runs[0]) if len(opened_runs) == 1 else []
    if json:
        print_json(compare_tables.as_data(*results, statistics=statistics, settings=settings))
    else:
        text = partial(compare_tables.as_text, _title(opened_runs), *results, statistics)
        _print_scores(opened_runs)
        print(text(full=full, comparison_first=explicit))  # first if the user asked for it


def _pair(text: str | None) -> Any:
    """The two names, "all", or None."""
    two = text if text in (None, "all") else tuple(text.split(","))
    if isinstance(two, tuple) and len(two) != 2:
        raise InputError(
            f"--pair {text} is no pair; give FIRST,SECOND or all", code="bad-pair", value=text
        )
    return two


def _print_scores(runs: Sequence[Run]) -> None:
    """The scores of the runs that are evaluations."""
    from attnscope.cli.evaluate import print_scores
    from attnscope.report.scores import score_table

    for run in runs:
        print_scores(score_table(run))


def _statistics(run: Run) -> list[PublishedStatistic]:
    """The statistics of the recipe of the run; none if the run has other keys than the recipe."""
    from attnscope.report.published import published_statistics

    try:
        return published_statistics(run)
    except InputError:
        return []


def _title(runs: Sequence[Run]) -> str:
    return " · ".join(f"{run.path.name}: {_described(run)}" for run in runs)


def _described(run: Run) -> str:
    models = ", ".join(run.experiment.models)
    unfinished = "" if run.complete else ", unfinished"
    interim = run.experiment.interim
    numbers = ", ".join(map(str, interim))
    look = f" (look {len(interim) + 1}; earlier {numbers})" if interim else ""
    return f"{models}, {run.cells['prompt'].n_unique()} prompts{look}{unfinished}"


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
    *,
    explicit: bool,
) -> tuple[pl.DataFrame | None, list[Verdict], pl.DataFrame | None]:
    """The comparison, the verdicts, and one claim under every choice."""
    from attnscope.stats import run_stats

    if len(runs) > 1:
        if varied is not None:
            raise InputError("--sensitivity takes one run; give a single RUN", code="several-runs")
        return run_stats.compare_runs(runs, **how, family_wise=True), [], None
    (run,) = runs
    several = len(run.experiment.models) > 1 or len(run.experiment.conditions) > 1
    several = several or how["over"] is not None
    compared = None
    try:
        compared = run_stats.compare_run(run, **how, family_wise=True) if several else None
    except InputError as error:
        if explicit or not (judged or run.claims):
            raise
        print(f"no comparison: {error}", file=sys.stderr)  # the claims of the run are judged
    two = how["pair"]
    models = two if isinstance(two, tuple) and two[0] in run.experiment.models else None
    verdicts = run_stats.judge_run(run, judged, pair=models, **units)
    choices = None
    if varied is not None:
        choices = run_stats.sensitivity_of_run(run, varied, pair=models, **units)
    return compared, verdicts, choices


def _selected(
    compared: pl.DataFrame | None, chosen: dict[str, list[Any] | None], holds: bool
) -> pl.DataFrame | None:
    """The selected rows; a name that no row has is an error."""
    import polars as pl

    from attnscope.stats.paired import OUTCOMES

    if compared is None:
        if any(chosen.values()):
            raise InputError(
                "this run has one model and one condition, so there are no rows to choose from; "
                "add --over class, queries or keys",
                code="nothing-to-compare",
            )
        return None
    for column, names in chosen.items():
        if names is None:
            continue
        word = "class" if column == "item" else column
        if column not in compared.columns:
            raise InputError(
                f"--{word} chooses rows, but the {word} is what is compared; leave it out",
                code="conflicting-options",
                option=word,
            )
        known = compared[column].drop_nulls().unique(maintain_order=True).to_list()
        for name in names:
            if name not in known:
                raise unknown(word, name, sorted(known))
        compared = compared.filter(pl.col(column).is_in(names))
    return compared.filter(pl.col("outcome").is_in(OUTCOMES[:2])) if holds else compared
