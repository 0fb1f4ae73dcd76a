"""Computes the statistics of a run, with the settings of its experiment as defaults."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.recipes import built_in_claims
from attnscope.run.environment import measured_before
from attnscope.run.store import Run
from attnscope.spec.claims import Claim
from attnscope.spec.experiment import Experiment
from attnscope.stats.paired import compare
from attnscope.stats.sensitivity import sensitivity
from attnscope.stats.verdicts import Verdict, judge


def compare_run(
    run: Run,
    *,
    over: str | None = None,
    pair: tuple[str, str] | str | None = None,
    combine: str | None = None,
    normalise: str | None = None,
    **settings: Any,
) -> pl.DataFrame:
    """`compare` on a run. Default: the two that `pair` names; else the models if there are two, or
    every condition against the base. Heads and masses as in the experiment; `settings` as for
    `compare`. Classes without tokens in any prompt are left out.
    """
    experiment = run.experiment
    over = over or _over(experiment, pair)
    pairs = None
    if over == "model" and (pair == "all" or (pair is None and len(experiment.models) == 2)):
        pairs = list(itertools.combinations(experiment.models, 2))
    elif pair == "all":
        pairs = list(itertools.combinations(experiment.conditions, 2))
    elif pair is None and over == "condition":
        pairs = [(experiment.base, name) for name in experiment.variants]
        if not pairs:
            raise InputError(
                "this run has one model and one condition, so there is nothing to compare; add a "
                "model or a condition to its experiment",
                code="nothing-to-compare",
            )
    return compare(
        _occurring(run.values),
        over=over,
        pair=pair,
        pairs=pairs,
        combine=combine or experiment.combine,
        normalise=normalise or experiment.normalise,
        prompts=run.prompts,
        **settings,
    )


def compare_runs(
    runs: Sequence[Run],
    *,
    over: str | None = None,
    pair: tuple[str, str] | str | None = None,
    combine: str | None = None,
    normalise: str | None = None,
    **settings: Any,
) -> pl.DataFrame:
    """Compare the models of several runs, by default all pairs. Models with the same label get the
    name of their run directory. Paired by prompt if the runs have the same prompts; otherwise
    independent groups."""
    if over not in (None, "model"):
        raise InputError(
            f"over {over!r} is not possible for several runs; they are compared over 'model'",
            code="unsupported-over",
            value=over,
        )
    first = runs[0].experiment
    labels = [label for run in runs for label in run.experiment.models]
    ambiguous = len(set(labels)) < len(labels)
    same = all(_prompts(run) == _prompts(runs[0]) for run in runs)
    names, tables, known, past = [], [], [], 0
    for run in runs:
        # Different prompts get different numbers, so that they are not paired.
        number = pl.col("prompt") + past
        past += 0 if same else max(run.cells["prompt"], default=-1) + 1
        known.append(run.prompts.with_columns(number))
        before = f"{run.path.name}/" if ambiguous else ""
        names += [f"{before}{label}" for label in run.experiment.models]
        renamed = pl.concat_str(pl.lit(before), "model").alias("model")
        tables.append(run.values.with_columns(renamed, number))
    if len(set(names)) < len(names):
        raise InputError(
            f"two models have the same label: {', '.join(names)}; rename a run directory",
            code="duplicate-name",
            names=names,
        )
    shared = set.intersection(*(set(run.experiment.conditions) for run in runs))
    if not shared:
        raise InputError(
            "the runs have no condition of the same name, so there is nothing to compare",
            code="nothing-to-compare",
        )
    values = pl.concat([table.filter(pl.col("condition").is_in(shared)) for table in tables])
    return compare(
        _occurring(values),
        over="model",
        pair=pair,
        pairs=list(itertools.combinations(names, 2)) if pair in (None, "all") else None,
        combine=combine or first.combine,
        normalise=normalise or first.normalise,
        prompts=known[0] if same else pl.concat(known, how="diagonal_relaxed"),
        **settings,
    )


def _prompts(run: Run) -> tuple[object, int]:
    """Identity of a run's prompts; for a file its digest, because every run has its own copy."""
    return run.experiment.identity()["prompts"], run.experiment.repeats


def _over(experiment: Experiment, pair: tuple[str, str] | str | None) -> str:
    """\"model\" or \"condition\": what a pair names; default: models if there are two."""
    models, conditions = list(experiment.models), list(experiment.conditions)
    if pair is None or isinstance(pair, str):
        several = len(models) == 2 or (len(models) > 2 and len(conditions) == 1)
        return "model" if several else "condition"
    for over, known in (("model", models), ("condition", conditions)):
        if set(pair) <= set(known):
            return over
    wrong = [name for name in pair if name not in models and name not in conditions]
    if wrong:
        raise InputError(
            f"unknown model or condition {wrong[0]!r}; models: {', '.join(models)}; conditions: "
            f"{', '.join(conditions)}",
            code="unknown-model-or-condition",
            value=wrong[0],
            known=[*models, *conditions],
        )
    raise InputError(
        f"{pair[0]!r} and {pair[1]!r} are not both models ({', '.join(models)}) nor both "
        f"conditions ({', '.join(conditions)}); give two models or two conditions",
        code="bad-pair",
        value=pair,
    )


def _occurring(values: pl.LazyFrame) -> pl.LazyFrame:
    """Leave out classes without tokens in any prompt, because their values are always 0."""
    by = ["classes", "item"]
    counted = values.filter(pl.col("measure") == "mass").group_by(by)
    never = counted.agg(pl.col("tokens").sum().alias("all")).filter(pl.col("all") == 0)
    never = never.collect().lazy()  # collected once, because it is joined twice
    absent = values.join(never, on=by, how="anti", nulls_equal=True)
    targets = never.rename({"item": "target"})
    return absent.join(targets, on=["classes", "target"], how="anti", nulls_equal=True)


def claims_of_run(run: Run) -> tuple[Claim, ...]:
    """The run's own claims, then the built-in ones with other names."""
    names = {claim.name for claim in run.claims}
    return (*run.claims, *(claim for claim in built_in_claims() if claim.name not in names))


def judge_run(run: Run, claims: Iterable[Claim] | None = None, **settings: Any) -> list[Verdict]:
    """Verdicts on these claims; default: the run's own claims, and the built-in claims that can be
    judged on it. `settings` as for `judge`."""
    every = claims_of_run(run) if claims is None else tuple(claims)
    verdicts = judge(
        every,
        run.values,
        experiment=run.experiment,
        prompts=run.prompts,
        written=run.environment.get("claims"),
        earlier=measured_before(run.path, run.environment.get("prompts")),
        unfinished=not run.complete,
        **settings,
    )
    if claims is not None:
        return verdicts
    names = {claim.name for claim in run.claims}
    return [v for v in verdicts if v.claim in names or v.verdict != "not measured"]


def sensitivity_of_run(run: Run, claim: Claim, **settings: Any) -> pl.DataFrame:
    """`sensitivity` of a claim on a run; `settings` as for it."""
    inputs: dict[str, Any] = {"experiment": run.experiment, "prompts": run.prompts}
    return sensitivity(claim, run.values, **inputs, **settings)
