"""Statistics of a whole run, with what it was asked as the defaults: what `attnscope compare`
prints and a report shows.
"""

from collections.abc import Iterable
from typing import Any

import polars as pl

from attnscope.errors import AttnscopeError, InputError
from attnscope.run.store import Run
from attnscope.stats.claims import Claim, built_in
from attnscope.stats.paired import compare
from attnscope.stats.sensitivity import CHOICES, in_a_line, sensitivity
from attnscope.stats.verdicts import Verdict, judge

__all__ = ["compare_run", "judge_run", "sensitivity_of_run", "survival_of_run"]


def compare_run(
    run: Run,
    *,
    over: str | None = None,
    pair: tuple[str, str] | None = None,
    combine: str | None = None,
    normalise: str | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> pl.DataFrame:
    """`compare` on a run. By default over what the pair names; else over its models, if they are
    two, or every condition against the base. Heads and masses as the experiment says.
    """
    asked = run.experiment
    if over is None:
        models, conditions = len(asked.models), len(asked.conditions)
        over = "model" if models == 2 or (models > 2 and conditions == 1) else "condition"
        if pair is not None:
            over = "condition" if set(pair) <= set(asked.conditions) else "model"
    settings: dict[str, Any] = {
        "over": over,
        "combine": combine or asked.combine,
        "normalise": normalise or asked.normalise,
        "resamples": resamples,
        "seed": seed,
    }
    values = run.values
    pairs: list[tuple[str, str] | None] = [pair]
    if pair is None and over == "model" and len(asked.models) == 2:
        first, second = asked.models
        pairs = [(first, second)]
    if pair is None and over == "condition":
        pairs = [(asked.base, name) for name in asked.variants]
        if not pairs:
            raise InputError(
                "this run has one model and one condition, so there is nothing to compare; add a "
                "model or a condition to its experiment"
            )
    return pl.concat([compare(values, pair=one, **settings) for one in pairs])


def judge_run(
    run: Run,
    claims: Iterable[Claim] | None = None,
    *,
    pair: tuple[str, str] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> list[Verdict]:
    """Verdicts on a run; on the built-in claims by default."""
    chosen = built_in() if claims is None else tuple(claims)
    return judge(
        chosen,
        run.values,
        experiment=run.experiment,
        pair=pair,
        resamples=resamples,
        seed=seed,
    )


def sensitivity_of_run(
    run: Run,
    claim: Claim,
    *,
    pair: tuple[str, str] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> pl.DataFrame:
    """`sensitivity` of a claim on a run."""
    return sensitivity(
        claim,
        run.values,
        experiment=run.experiment,
        pair=pair,
        resamples=resamples,
        seed=seed,
    )


def survival_of_run(
    run: Run,
    claims: Iterable[Claim] | None = None,
    *,
    pair: tuple[str, str] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> pl.DataFrame:
    """A line for every claim that a run can judge under more than one choice: see `in_a_line`."""
    lines = []
    for claim in built_in() if claims is None else claims:
        try:
            table = sensitivity_of_run(run, claim, pair=pair, resamples=resamples, seed=seed)
        except AttnscopeError:
            continue
        if table.select(*CHOICES).n_unique() > 1:
            lines.append(in_a_line(table))
    names = ("choices", "verdicts", "same_verdict", "places", "survives")
    return pl.DataFrame(
        lines,
        schema={
            "claim": pl.String(),
            "verdict": pl.String(),
            **{name: pl.Int64() for name in names},
            "overturned_by": pl.List(pl.String()),
        },
    )
