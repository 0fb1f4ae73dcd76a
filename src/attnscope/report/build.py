"""Writes the report of a run: results, figures, methods, tables, and how to repeat it.

The report is one self-contained HTML file that makes no network request. This module selects its
numbers; `templates/report.html` is its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import polars as pl

from attnscope.errors import AttnscopeError
from attnscope.figures import Drawing, Theme, drawable
from attnscope.figures.caption import bundled_note, unfinished_note
from attnscope.figures.numbers import in_order
from attnscope.figures.page import templates
from attnscope.figures.select import conditions_in_order, models_in_order
from attnscope.figures.text_format import BUNDLED, count, join, model_name
from attnscope.figures.verdict_cache import VerdictCache
from attnscope.recipes import RECIPES
from attnscope.report.published import published_statistics
from attnscope.report.scores import score_table
from attnscope.spec.conditions import Condition
from attnscope.spec.experiment_yaml import experiment_to_yaml
from attnscope.stats.paired import TESTED
from attnscope.stats.run_stats import compare_run
from attnscope.stats.sensitivity import not_judged_note
from attnscope.stats.verdicts import verdict_table

if TYPE_CHECKING:
    from jinja2 import Template

    from attnscope.run.store import Run
    from attnscope.spec.experiment import Experiment

ROWS = 3_000
"""Largest number of rows of the comparison; beyond, the longest measures are omitted."""
SHOWN = 3
"""Number of prompts of the base that are printed."""
LONGEST = 4_000
"""Largest number of characters of a prompt that are printed."""
COMMANDS = """attnscope run experiment.yaml --out RUN
attnscope figure RUN
attnscope report RUN
attnscope compare RUN"""


@cache
def _template() -> Template:
    return templates(Path(__file__).parent / "templates").get_template("report.html")


def build(
    run: Run,
    *,
    theme: str | Theme = "published",
    verdict_cache: VerdictCache | None = None,
    drawn: Mapping[str, Drawing] | None = None,
    **units: Any,
) -> str:
    """The report of a run as HTML; `units` may have `cluster` and `strata` for resampling. Verdicts
    and figures (by name) that exist already are not computed again."""
    run.verify()  # a damaged run is an error, not a report with gaps
    verdict_cache = verdict_cache or VerdictCache(run, **units)
    try:
        figures, missing = drawable(
            run, theme=theme, verdict_cache=verdict_cache, drawn=drawn, **units
        )
    except AttnscopeError as error:
        figures, missing = [], {"any": str(error)}
    first = _first(figures, verdict_cache.of_run)
    experiment = _with_relative_path(run.experiment)
    return _template().render(
        title=f"{experiment.name}: where attention goes",
        recipe=RECIPES.get(experiment.name),
        notes=[note for note in (bundled_note(run, _labels(run)), unfinished_note(run)) if note],
        drawings=[*figures[first : first + 1], *(f for i, f in enumerate(figures) if i != first)],
        missing=[f"{name}: {why}" for name, why in missing.items()],
        **_results(verdict_cache),
        statistics=_statistics(run),
        scores=_scores(run),
        base=experiment.base,
        test=TESTED,
        **_settings(run, experiment),
        models=_models(run),
        **_prompts(run),
        environment=_environment(run),
        **_robustness(verdict_cache),
        comparison=_comparison(run, **units),
        prompts_file=getattr(experiment.prompts, "path", None),
        commands=COMMANDS,
        experiment=experiment_to_yaml(experiment),
        sortable=True,
    )


def _labels(run: Run) -> list[str]:
    return models_in_order(run, run.cells["model"].unique())


def _first(figures: Sequence[Drawing], claims: set[str]) -> int:
    """Index of the figure that shows the claims of the run; else the first."""
    return next((i for i, figure in enumerate(figures) if claims & set(figure.claims)), 0)


def _results(verdict_cache: VerdictCache) -> dict[str, Any]:
    """The verdicts on the claims of the run and on the built-in ones that apply, as tables; those
    that were not measured as lines."""
    try:
        table = verdict_table(verdict_cache.verdicts())
    except AttnscopeError as error:
        return {"error": str(error), "of_run": None, "built_in": None, "unmeasured": []}
    of_run, measured = (
        pl.col("claim").is_in(verdict_cache.of_run),
        pl.col("verdict") != "not measured",
    )
    others = table.filter(~measured)
    return {
        "error": "",
        "of_run": _verdicts(table.filter(measured, of_run)),
        "built_in": _verdicts(table.filter(measured, ~of_run)),
        "unmeasured": [f"{row['statement']} — {row['reason']}" for row in others.to_dicts()],
    }


def _verdicts(table: pl.DataFrame) -> pl.DataFrame | None:
    """The columns of verdicts that differ between rows; None if there are no verdicts."""
    columns = ["verdict", "statement", "reason", "notes", "model", "condition", "layer", "written"]
    always = (*columns[:4], "written")
    varied = [c for c in columns if c in always or table[c].n_unique() > 1]
    shown = _without_empty_columns(table.select(varied), columns[:3])
    return None if table.is_empty() else shown


def _statistics(run: Run) -> pl.DataFrame | None:
    """The statistics of a recipe's paper, beside the published numbers; None for other runs."""
    try:
        statistics = published_statistics(run)
    except AttnscopeError:  # an experiment with the name of a recipe, and other keys
        return None
    rows = [(s.what, s.shown, s.n, s.published or None) for s in statistics]
    columns = ["statistic", "this run", "prompts", "published"]
    table = pl.DataFrame(rows, schema=columns, orient="row", infer_schema_length=None)
    return _without_empty_columns(table, columns[:3]) if statistics else None


def _scores(run: Run) -> dict[str, Any] | None:
    """The scores of an evaluation; what is the same in all rows is stated once."""
    table = score_table(run)
    if table.is_empty():
        return None
    same = [name for name in table.columns[:3] if table[name].n_unique() == 1]
    return {
        "same": "; ".join(f"{name}: {table[name][0]}" for name in same),
        "rows": _without_empty_columns(table.drop(same)),
    }


def _without_empty_columns(table: pl.DataFrame, always: Sequence[str] = ()) -> pl.DataFrame:
    """The table without columns that are empty in every row; `always` are kept."""
    return table.select(
        c for c in table.columns if c in always or table[c].null_count() < table.height
    )


def _environment(run: Run) -> dict[str, str]:
    shown_elsewhere = ("models", "claims", "classes")
    about = {k: v for k, v in run.environment.items() if k not in shown_elsewhere}
    if run.elsewhere:
        about["environments of other batches"] = join([str(one) for one in run.elsewhere])
    revisions = [
        f"{label}: {model_name(entry.get('name'))} at {entry.get('revision')}"
        for label, entry in run.environment.get("models", {}).items()
    ]
    return {name: _text(value) for name, value in (about | {"models": join(revisions)}).items()}


def _settings(run: Run, experiment: Experiment) -> dict[str, Any]:
    cells = run.cells
    models, conditions = _labels(run), conditions_in_order(run, cells["condition"].unique())
    sums = cells.group_by("model", "condition").agg(
        pl.len().alias("prompts"),
        pl.col("tokens").mean().alias("mean tokens"),
        pl.col("filler_tokens").mean().alias("mean filler tokens"),
        pl.col("boundary_tokens").mean().alias("mean boundary tokens"),
        pl.col("base_boundary_tokens").mean().alias("mean base tokens changed"),
    )
    keys = ("prompts", "conditions", "layers", "heads", "queries", "keys", "classes", "measures")
    changes = {name: _changes(one) or "unchanged" for name, one in experiment.conditions.items()}
    complete = experiment.to_dict()
    names = {
        label: [rule["name"] for rule in rules] for label, rules in complete["classes"].items()
    }
    shown = {"classes": names, "conditions": changes, "prompts": _source(experiment)}
    complete |= shown
    return {
        "size": f"{count(cells.height, 'cell')}: {count(len(models), 'model')} × "
        f"{count(cells['prompt'].n_unique(), 'prompt')} × {count(len(conditions), 'condition')}",
        "settings": {k: _text(complete[k]) for k in (*keys, "combine", "normalise")},
        "rules": _rules(experiment),
        "cells": in_order(sums, model=models, condition=conditions),
    }


def _source(experiment: Experiment) -> dict[str, Any]:
    """The source of the prompts, with its count and seed, and its settings that are no defaults.
    The section "Prompts" shows the first records."""
    prompts = experiment.prompts.model_dump(mode="json")
    changed = experiment.prompts.model_dump(mode="json", exclude_defaults=True)
    shown = {key: prompts.get(key) for key in ("source", "count", "seed")} | changed
    records = shown.pop("records", None)
    known = {key: value for key, value in shown.items() if value is not None}
    return known if records is None else known | {"records": len(records)}


def _rules(experiment: Experiment) -> pl.DataFrame:
    """The rule of every token class of every class set."""
    rows = [
        (label, rule["name"], _text({k: v for k, v in rule.items() if k != "name"}))
        for label, rules in experiment.to_dict()["classes"].items()
        for rule in rules
    ]
    return pl.DataFrame(rows, schema=["class set", "class", "rule"], orient="row")


def _changes(condition: Condition) -> dict[str, Any]:
    """The keys of a condition that change something."""
    keys = condition.model_dump(mode="json", exclude_none=True)
    default = Condition()
    return {key: value for key, value in keys.items() if getattr(default, key) != value}


def _models(run: Run) -> pl.DataFrame:
    known = run.environment.get("models", {})
    # The revision is long; "Environment" shows it.
    columns = ["name", "architecture", "layers", "heads", "kv_heads", "parameters"]
    columns += ["dtype", "device", "backend"]
    rows = [
        {"label": label}
        | {c: _text(known.get(label, {}).get(c)) for c in columns}
        | {"name": model_name(known.get(label, {}).get("name") or "—")}
        | {"note": BUNDLED if known.get(label, {}).get("bundled") else ""}
        for label in _labels(run)
    ]
    return pl.DataFrame(rows, schema=dict.fromkeys(["label", *columns, "note"], pl.String))


def _text(value: Any) -> str:
    """A value in one line; nested values too."""
    if isinstance(value, Mapping) and value:
        return ", ".join(f"{k}: {_text(v)}" for k, v in value.items())
    if isinstance(value, list | tuple) and value:
        return ", ".join(map(_text, value))
    if value is None or value in ([], (), {}):
        return "—"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _prompts(run: Run) -> dict[str, Any]:
    """The first prompts as tokenized by the first model; one prompt of each variant."""
    labels = _labels(run)
    if not labels:
        return {"prompts_note": "No prompt is measured yet.", "prompts": []}
    label, base = labels[0], run.experiment.base
    tokens = run.tokens.filter(pl.col("model") == label)
    numbers = run.cells.filter(pl.col("model") == label)["prompt"].unique().sort().to_list()
    form = "chat template included" if run.experiment.chat is True else "plain text"
    shown = []
    for condition in conditions_in_order(run, run.cells["condition"].unique()):
        for number in numbers[: SHOWN if condition == base else 1]:
            of_cell = (pl.col("condition") == condition) & (pl.col("prompt") == number)
            read = tokens.filter(of_cell).sort("position").select("text").collect()["text"]
            if read.is_empty():
                continue
            text = "".join(read.drop_nulls())
            text = text[:LONGEST] + ("…" if len(text) > LONGEST else "")
            length = count(len(read), "token")
            shown.append({"number": number, "condition": condition, "length": length, "text": text})
    return {
        "prompts_note": f"{count(len(numbers), 'prompt')}. The texts are the joined tokens of "
        f"{label}, {form}.",
        "prompts": shown,
    }


def _robustness(verdict_cache: VerdictCache) -> dict[str, Any]:
    """A table with a row per claim that the run can judge under several choices."""
    lines = verdict_cache.robustness()
    if lines.is_empty():
        return {"robustness": None, "robustness_note": ""}
    shown = lines.select(
        "claim",
        pl.col("verdict").alias("reference"),
        "choices",
        pl.format("{} of {}", "same_verdict", "verdicts").alias("same verdict"),
        pl.format("{} of {}", "survives", "places").alias("robust in"),
        pl.col("overturned_by").list.join(". ").replace("", None).alias("changed by"),
    )
    omitted = sum(lines["not_judged"])
    note = f" {not_judged_note(omitted)}." if omitted else ""
    return {"robustness": shown, "robustness_note": note}


def _comparison(run: Run, **units: Any) -> dict[str, Any]:
    """Every row of the comparison, with all columns that distinguish rows."""
    try:
        table = compare_run(run, **units)
    except AttnscopeError as error:
        return {"error": str(error)}
    omitted: list[str] = []
    sizes = table["measure"].value_counts(sort=True, name="n")
    for measure in sizes["measure"][: sizes.height - 1]:
        if table.height > ROWS:
            omitted.append(measure)
            table = table.filter(pl.col("measure") != measure)
    labels = ["a", "b", "model", "condition", "queries", "keys", "classes", "measure", "normalise"]
    labels = [c for c in (*labels, "item", "target", "combine", "layer", "head") if c in table]
    same = [c for c in labels if table[c].n_unique() == 1]
    columns = [c for c in labels if c not in same]
    columns += ["n", *([] if table["n"].equals(table["units"]) else ["units"])]
    columns += ["mean_a", "mean_b", "difference", "ratio", "effect", "low", "high", "p", "q"]
    columns += ["outcome", "note"]
    return {
        "error": "",
        "same": "; ".join(f"{c}: {table[c][0]}" for c in same if table[c][0] is not None),
        "omitted": join(omitted),
        "rows": _without_empty_columns(table.select(c for c in columns if c in table)),
    }


def _with_relative_path(experiment: Experiment) -> Experiment:
    """The experiment with the path of its prompts relative to the directory of the run, and models
    of absolute paths by their own names."""
    models = {label: model_name(name) for label, name in experiment.models.items()}
    experiment, prompts = experiment.with_keys(models=models), experiment.prompts
    path = getattr(prompts, "path", None)
    if path is None:
        return experiment
    return experiment.with_keys(prompts=prompts.model_dump() | {"path": PurePath(path).name})
