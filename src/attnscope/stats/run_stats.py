"""Computes the statistics of a run, with the settings of its experiment as defaults."""

from collections.abc import Iterable, Sequence
from typing import Any

import polars as pl

from attnscope.errors import InputError, unknown
from attnscope.recipes import built_in_claims
from attnscope.run.environment import measured_before
from attnscope.run.store import Run
from attnscope.spec.claims import Claim
from attnscope.spec.experiment import Experiment
from attnscope.stats.paired import Pairs, compare, pairs_of
from attnscope.stats.sensitivity import sensitivity
from attnscope.stats.verdicts import Verdict, judge


def compare_run(
    run: Run, *, over: str | None = None, pair: Pairs = None, **settings: Any
) -> pl.DataFrame:
    """`compare` on a run. Default: the two that `pair` names; else the models if there are two, or
    every condition against the base, or every pair of models. Heads and masses as in the
    experiment, unless `settings` say otherwise. Classes without tokens in any prompt are left out.
    """
    experiment = run.experiment
    if over is None:
        over = _over(experiment, pair)
        pair = "all" if over == "model" and pair is None else pair
    if over == "condition" and pair is None:
        pair = [(experiment.base, name) for name in experiment.variants]
        if not pair:
            raise InputError(
                "this run has one model and one condition, so there is nothing to compare; add a "
                "model or a condition to its experiment",
                code="nothing-to-compare",
            )
    elif over in ("model", "condition"):
        names = experiment.models if over == "model" else experiment.conditions
        pair = pairs_of(list(names), over, pair)
    return _compare(run.values, run.prompts, experiment, over=over, pair=pair, **settings)


def compare_runs(
    runs: Sequence[Run], *, over: str | None = None, pair: Pairs = None, **settings: Any
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
    prompts = known[0] if same else pl.concat(known, how="diagonal_relaxed")
    pair = pairs_of(names, "model", pair or "all")
    return _compare(values, prompts, runs[0].experiment, over="model", pair=pair, **settings)


def _compare(
    values: pl.LazyFrame, prompts: pl.DataFrame, experiment: Experiment, **settings: Any
) -> pl.DataFrame:
    """`compare`; heads and masses as in the experiment where the settings are None."""
    for name in ("combine", "normalise"):
        settings[name] = settings.get(name) or getattr(experiment, name)
    return compare(_occurring(values), prompts=prompts, **settings)


def _prompts(run: Run) -> tuple[object, int]:
    """Identity of a run's prompts; for a file its digest, because every run has its own copy."""
    return run.experiment.identity()["prompts"], run.experiment.repeats


def _over(experiment: Experiment, pair: Pairs) -> str:
    """\"model\" or \"condition\": what a pair names; default: models if there are two."""
    models, conditions = list(experiment.models), list(experiment.conditions)
    if pair is None or isinstance(pair, str):
        several = len(models) == 2 or (len(models) > 2 and len(conditions) == 1)
        return "model" if several else "condition"
    for over, known in (("model", models), ("condition", conditions)):
        if set(pair) <= set(known):
            return over
    for name in pair:
        if name not in (*models, *conditions):
            raise unknown("model or condition", name, (*models, *conditions))
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
    known: dict[str, Any] = {"experiment": run.experiment, "prompts": run.prompts}
    return sensitivity(claim, run.values, **known, **settings)
