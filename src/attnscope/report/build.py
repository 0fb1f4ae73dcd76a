"""Writes the report of a run: results, figures, methods, tables, and how to repeat it.

The report is one self-contained HTML file that makes no network request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import polars as pl

from attnscope.errors import AttnscopeError
from attnscope.figures import Drawing, Theme, drawable
from attnscope.figures.blocks import html_properties, html_table
from attnscope.figures.caption import bundled_note, unfinished_note
from attnscope.figures.export import write
from attnscope.figures.numbers import in_order
from attnscope.figures.page import SORTABLE, figure_html, whole_page
from attnscope.figures.select import conditions_in_order, models_in_order
from attnscope.figures.text_format import BUNDLED, count, join
from attnscope.figures.verdict_cache import VerdictCache
from attnscope.spec.experiment_yaml import experiment_to_yaml
from attnscope.stats.contrast import TESTED
from attnscope.stats.robustness import not_judged_note
from attnscope.stats.run_stats import compare_run
from attnscope.stats.verdicts import verdict_table

if TYPE_CHECKING:
    from attnscope.run.store import Run
    from attnscope.spec.experiment import Experiment

ROWS = 3_000
"""Largest number of rows of the comparison; beyond, the longest measures are omitted."""
SHOWN = 3
"""Number of prompts of the base that are printed."""
LONGEST = 4_000
"""Largest number of characters of a prompt that are printed."""


def write_report(
    run: Run, path: str | Path, *, theme: str | Theme = "published", **units: Any
) -> Path:
    """Write the report of a run atomically."""
    path = Path(path)
    write(path, build(run, theme=theme, **units).encode())
    return path


def build(run: Run, *, theme: str | Theme = "published", **units: Any) -> str:
    """The report of a run as HTML; `units` may have `cluster` and `strata` for resampling."""
    run.verify()  # a damaged run is an error, not a report with gaps
    verdict_cache = VerdictCache(run, **units)
    try:
        figures, missing = drawable(run, theme=theme, verdict_cache=verdict_cache, **units)
    except AttnscopeError as error:
        figures, missing = [], {"any": str(error)}
    first = _first(figures, verdict_cache)
    sections = {
        "found": ("Results", _results(verdict_cache, figures[first] if figures else None)),
        "figures": ("Figures", _figures(figures, first, missing)),
        "measured": ("Methods", _measured(run)),
        "tables": ("Tables", _robustness(verdict_cache) + _comparison(run, **units)),
        "repeat": ("How to repeat it", _repeat(run)),
    }
    contents = "".join(f'<li><a href="#{k}">{title}</a></li>' for k, (title, _) in sections.items())
    parts = "\n".join(
        f'<section id="{k}"><h2>{title}</h2>{content}</section>'
        for k, (title, content) in sections.items()
    )
    title = f"{run.experiment.name}: where attention goes"
    notes = [note for note in (bundled_note(run, _labels(run)), unfinished_note(run)) if note]
    note_lines = "".join(f"<p><strong>{escape(note)}.</strong></p>" for note in notes)
    order = [*figures[first : first + 1], *(f for i, f in enumerate(figures) if i != first)]
    return whole_page(
        title,
        f"<header><h1>{escape(title)}</h1>{note_lines}"
        f'<nav class="screen"><ul class="contents">{contents}</ul></nav></header>\n'
        f"<main>{parts}</main>",
        order,
    )


def _labels(run: Run) -> list[str]:
    return models_in_order(run, run.cells["model"].unique())


def _first(figures: Sequence[Drawing], verdict_cache: VerdictCache) -> int:
    """Index of the first figure: of a decided claim, else of a judged claim, else 0."""
    try:
        verdicts = verdict_cache.verdicts()
    except AttnscopeError:
        return 0
    for decided in (("supported", "contradicted"), ("undetermined",)):
        claims = {v.claim for v in verdicts if v.verdict in decided}
        for i, figure in enumerate(figures):
            if claims & set(figure.claims):
                return i
    return 0


def _results(verdict_cache: VerdictCache, figure: Drawing | None) -> str:
    """The verdicts and the first figure."""
    shown = "" if figure is None else figure_html(figure, 0)
    try:
        table = verdict_table(verdict_cache.verdicts())
    except AttnscopeError as error:
        return f"<p>No claims were judged: {escape(str(error))}</p>{shown}"
    measured = table.filter(pl.col("verdict") != "not measured")
    others = table.filter(pl.col("verdict") == "not measured")
    columns = ["verdict", "statement", "reason", "model", "condition", "layer"]
    parts = ["<p>No claim can be judged on this run.</p>"]
    if not measured.is_empty():
        parts = [
            html_table(
                _without_empty_columns(measured.select(columns), columns[:3]), css_class=SORTABLE
            )
        ]
    if not others.is_empty():
        items = [f"{row['statement']} — {row['reason']}" for row in others.iter_rows(named=True)]
        parts.append(_details(f"Not measured in this run ({others.height})", items))
    return "\n".join([*parts, shown])


def _without_empty_columns(table: pl.DataFrame, always: Sequence[str]) -> pl.DataFrame:
    """The table without columns that are empty in every row; `always` are kept."""
    return table.select(
        c for c in table.columns if c in always or table[c].null_count() < table.height
    )


def _details(title: str, items: Sequence[str]) -> str:
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<details><summary>{escape(title)}</summary><ul>{lines}</ul></details>"


def _figures(figures: Sequence[Drawing], first: int, missing: Mapping[str, str]) -> str:
    """All figures except the first, which the results show."""
    others = [figure for i, figure in enumerate(figures) if i != first]
    parts = [figure_html(figure, i) for i, figure in enumerate(others, start=1)]
    if missing:
        title = f"Figures without numbers in this run ({len(missing)})"
        parts.append(_details(title, [f"{name}: {why}" for name, why in missing.items()]))
    return "\n".join(parts)


def _measured(run: Run) -> str:
    about = {k: v for k, v in run.environment.items() if k != "models"}
    revisions = [
        f"{label}: {entry.get('name')} at {entry.get('revision')}"
        for label, entry in run.environment.get("models", {}).items()
    ]
    if run.elsewhere:
        about |= {"environments of other batches": join([str(one) for one in run.elsewhere])}
    return (
        f"{_settings(run)}<h3>Models</h3>{_models(run)}<h3>Prompts</h3>{_prompts(run)}"
        f"<h3>Environment</h3>{html_properties(about | {'models': join(revisions)})}"
    )


def _settings(run: Run) -> str:
    cells = run.cells
    models, conditions = _labels(run), conditions_in_order(run, cells["condition"].unique())
    sums = cells.group_by("model", "condition").agg(
        pl.len().alias("prompts"),
        pl.col("tokens").mean().alias("mean tokens"),
        pl.col("filler_tokens").mean().alias("mean filler tokens"),
        pl.col("boundary_tokens").mean().alias("mean boundary tokens"),
        pl.col("base_boundary_tokens").mean().alias("mean base tokens changed"),
    )
    sums = in_order(sums, model=models, condition=conditions)
    keys = ("prompts", "conditions", "layers", "heads", "queries", "keys", "classes", "measures")
    complete = _with_relative_path(run.experiment).to_dict() | {
        "classes": list(run.experiment.classes)
    }
    settings = {k: complete[k] for k in (*keys, "combine", "normalise")}
    return (
        f"<p>{count(cells.height, 'cell')}: {count(len(models), 'model')} × "
        f"{count(cells['prompt'].n_unique(), 'prompt')} × "
        f"{count(len(conditions), 'condition')}.</p>{html_properties(settings)}"
        f"<h3>Cells</h3>{html_table(sums)}"
    )


def _models(run: Run) -> str:
    known = run.environment.get("models", {})
    # The revision is long; "Environment" shows it.
    columns = ["name", "architecture", "layers", "heads", "kv_heads", "parameters"]
    columns += ["dtype", "device", "backend"]
    rows = [
        {"label": label}
        | {c: _text(known.get(label, {}).get(c)) for c in columns}
        | {"note": BUNDLED if known.get(label, {}).get("bundled") else ""}
        for label in _labels(run)
    ]
    schema = dict.fromkeys(["label", *columns, "note"], pl.String)
    return html_table(pl.DataFrame(rows, schema=schema))


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _prompts(run: Run) -> str:
    """The first prompts as tokenized by the first model; one prompt of each variant."""
    labels = _labels(run)
    if not labels:
        return "<p>No prompt is measured yet.</p>"
    label, base = labels[0], run.experiment.base
    tokens = run.tokens.filter(pl.col("model") == label)
    numbers = run.cells.filter(pl.col("model") == label)["prompt"].unique().sort().to_list()
    parts = [
        f"<p>{count(len(numbers), 'prompt')}. The texts are the joined tokens of {escape(label)}, "
        f"{'chat template included' if run.experiment.chat is True else 'plain text'}.</p>"
    ]
    for condition in conditions_in_order(run, run.cells["condition"].unique()):
        for number in numbers[: SHOWN if condition == base else 1]:
            of_cell = (pl.col("condition") == condition) & (pl.col("prompt") == number)
            read = tokens.filter(of_cell).sort("position").select("text").collect()["text"]
            if read.is_empty():
                continue
            text = "".join(read.drop_nulls())
            cut = text[:LONGEST] + ("…" if len(text) > LONGEST else "")
            parts.append(
                f"<h4>Prompt {number}, {escape(condition)} ({count(len(read), 'token')})</h4>"
                f'<pre class="prompt">{escape(cut)}</pre>'
            )
    return "\n".join(parts)


def _robustness(verdict_cache: VerdictCache) -> str:
    """A table with a row per claim that the run can judge under several choices."""
    lines = verdict_cache.robustness()
    if lines.is_empty():
        return ""
    of = pl.format("{} of {}", "same_verdict", "verdicts")
    shown = lines.select(
        "claim",
        pl.col("verdict").alias("reference"),
        "choices",
        of.alias("same verdict"),
        pl.format("{} of {}", "survives", "places").alias("robust in"),
        pl.col("overturned_by").list.join(". ").replace("", None).alias("changed by"),
    )
    omitted = sum(lines["not_judged"])
    note = f" {not_judged_note(omitted)}." if omitted else ""
    return (
        "<h3>Robustness of the verdicts</h3><p>Each claim is judged under every choice of queries, "
        "keys, classes, normalisation and condition in this run. The reference is the choice of "
        "the claim; what the claim leaves open is the first choice of the run. A verdict is robust "
        "in a model (or pair) and layer if every choice gives the verdict of the reference. All "
        "choices use the same data: they are not independent evidence."
        f"{note}</p>"
        f"{html_table(shown, css_class=SORTABLE)}"
    )


def _comparison(run: Run, **units: Any) -> str:
    """Every row of the comparison, with all columns that distinguish rows."""
    try:
        table = compare_run(run, **units)
    except AttnscopeError as error:
        return f"<h3>Comparison</h3><p>There is no comparison: {escape(str(error))}</p>"
    omitted: list[str] = []
    sizes = table["measure"].value_counts(sort=True, name="n")
    for measure in sizes["measure"][: sizes.height - 1]:
        if table.height > ROWS:
            omitted.append(measure)
            table = table.filter(pl.col("measure") != measure)
    longer = (
        f"<p>Omitted, because there are too many rows: {escape(join(omitted))}; <code>attnscope "
        "compare RUN "
        "--json</code> has every row.</p>"
        if omitted
        else ""
    )
    labels = ["a", "b", "model", "condition", "queries", "keys", "classes", "measure", "normalise"]
    labels = [c for c in (*labels, "item", "target", "combine", "layer", "head") if c in table]
    same = [c for c in labels if table[c].n_unique() == 1]
    throughout = "; ".join(f"{c}: {table[c][0]}" for c in same if table[c][0] is not None)
    columns = [c for c in labels if c not in same]
    columns += [
        "n",
        *([] if table["n"].equals(table["units"]) else ["units"]),
        "mean_a",
        "mean_b",
        "difference",
        "ratio",
        "effect",
        "low",
        "high",
        "p",
        "q",
    ]
    shown = _without_empty_columns(
        table.select(c for c in (*columns, "outcome", "note") if c in table), ()
    )
    return (
        "<h3>Comparison</h3><p>Differences are b minus a, paired by prompt unless the note "
        "differs; "
        f"low and high: 95 % confidence interval over prompts; p: {TESTED}; "
        "q: Benjamini–Hochberg over layers × heads. The same in all rows: "
        f"{escape(throughout)}.</p>{longer}"
        f"{html_table(shown, css_class=SORTABLE)}"
    )


def _with_relative_path(experiment: Experiment) -> Experiment:
    """The experiment with the path of its prompts relative to the directory of the run."""
    prompts = experiment.prompts
    path = getattr(prompts, "path", None)
    if path is None:
        return experiment
    return experiment.with_keys(prompts=prompts.model_dump() | {"path": PurePath(path).name})


def _repeat(run: Run) -> str:
    path = getattr(_with_relative_path(run.experiment).prompts, "path", None)
    beside = f", next to <code>{escape(path)}</code> from the run directory" if path else ""
    return (
        f"<p>Save this as <code>experiment.yaml</code>{beside} (a copy is in the run "
        "directory), then "
        "run:</p>"
        "<pre>attnscope run experiment.yaml --out RUN\nattnscope figure RUN\n"
        "attnscope report RUN\nattnscope compare RUN</pre>"
        f"<pre>{escape(experiment_to_yaml(_with_relative_path(run.experiment)))}</pre>"
    )
