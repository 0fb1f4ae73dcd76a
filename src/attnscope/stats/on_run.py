"""Statistics of a whole run, with what it was asked as the defaults: what `attnscope compare`
prints and a report shows.
"""

from collections.abc import Iterable
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.experiment.store import Run
from attnscope.stats.claims import Claim, built_in
from attnscope.stats.one_factor import one_factor
from attnscope.stats.paired import compare
from attnscope.stats.sensitivity import sensitivity
from attnscope.stats.verdicts import Verdict, judge

__all__ = ["base_of", "compare_run", "judge_run", "sensitivity_of_run"]


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
        models, conditions = len(asked["models"]), len(asked["conditions"])
        over = "model" if models == 2 or (models > 2 and conditions == 1) else "condition"
        if pair is not None:
            over = "condition" if set(pair) <= set(asked["conditions"]) else "model"
    settings: dict[str, Any] = {
        "over": over,
        "combine": combine or asked.get("combine", "mean"),
        "normalise": normalise or asked.get("normalise", "mass"),
        "resamples": resamples,
        "seed": seed,
    }
    values = run.values
    pairs: list[tuple[str, str] | None] = [pair]
    if pair is None and over == "model" and len(asked["models"]) == 2:
        first, second = asked["models"]
        pairs = [(first, second)]
    if pair is None and over == "condition":
        base = base_of(asked)
        pairs = [(base, name) for name in asked["conditions"] if name != base]
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
        _values(run, chosen),
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
        _values(run, (claim,)),
        experiment=run.experiment,
        pair=pair,
        resamples=resamples,
        seed=seed,
    )


def _values(run: Run, claims: tuple[Claim, ...]) -> pl.LazyFrame:
    """The run's values, and λ's fit where claims ask for it and the run kept profiles."""
    asked = run.experiment
    parts = [p for claim in claims for p in claim.parts if p.quantity.measure == "lambda_r2"]
    there = "profile" in asked.get("measures", ()) and len(asked["conditions"]) > 1
    if not parts or not there:
        return run.values
    positions = run.positions
    scopes = [part.scope.layers for part in parts]
    if not any(isinstance(layers, str) for layers in scopes):  # profiles are long: only these
        wanted = sorted({int(layer) for layers in scopes for layer in layers})
        positions = positions.filter(pl.col("layer").is_in(wanted))
    fits = one_factor(positions, run.tokens, base_of(asked))
    return pl.concat([run.values, fits.lazy()])


def base_of(experiment: dict[str, Any]) -> str:
    """The condition without an insertion."""
    conditions = experiment.get("conditions", {})
    found = [name for name, what in conditions.items() if not (what or {}).get("insert")]
    if len(found) != 1:
        raise InputError(f"a run has one condition without an insertion; this has {found}")
    return str(found[0])
