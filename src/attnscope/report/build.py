"""The report: what was found, the figures, how it was measured, the tables, how to repeat it.

One HTML file, everything inside, no address asked. This module must not know any single figure.
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
"""How many rows of the comparison are printed; beyond, measures with many rows are left out."""
SHOWN = 3
"""How many prompts of the base are printed."""
LONGEST = 4_000
"""How many characters of a prompt are printed."""


def write_report(
    run: Run, path: str | Path, *, theme: str | Theme = "published", **units: Any
) -> Path:
    """Write the report of a run, whole or not at all."""
    path = Path(path)
    write(path, build(run, theme=theme, **units).encode())
    return path


def build(run: Run, *, theme: str | Theme = "published", **units: Any) -> str:
    """The report of a run as HTML; of `units`, `cluster` and `strata` say what is resampled."""
    run.verify()  # a page with gaps is no answer to damage
    verdict_cache = VerdictCache(run, **units)
    try:
        figures, missing = drawable(run, theme=theme, verdict_cache=verdict_cache, **units)
    except AttnscopeError as error:
        figures, missing = [], {"any": str(error)}
    first = _first(figures, verdict_cache)
    sections = {
        "found": ("What was found", _results(verdict_cache, figures[first] if figures else None)),
        "figures": ("Figures", _figures(figures, first, missing)),
        "measured": ("How it was measured", _measured(run)),
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
    """The figure that shows what was found: of a claim that was decided, else judged, else any."""
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
    """The verdicts, and the one figure that shows them."""
    shown = "" if figure is None else figure_html(figure, 0)
    try:
        table = verdict_table(verdict_cache.verdicts())
    except AttnscopeError as error:
        return f"<p>No claims were judged: {escape(str(error))}</p>{shown}"
    measured = table.filter(pl.col("verdict") != "not measured")
    others = table.filter(pl.col("verdict") == "not measured")
    columns = ["verdict", "statement", "reason", "model", "condition", "layer"]
    parts = ["<p>No claim could be judged on this run.</p>"]
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
    """Without the columns that have nothing in any row."""
    return table.select(
        c for c in table.columns if c in always or table[c].null_count() < table.height
    )


def _details(title: str, items: Sequence[str]) -> str:
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<details><summary>{escape(title)}</summary><ul>{lines}</ul></details>"


def _figures(figures: Sequence[Drawing], first: int, missing: Mapping[str, str]) -> str:
    """The figures but for the one that was shown already, which has number 0."""
    others = [figure for i, figure in enumerate(figures) if i != first]
    parts = [figure_html(figure, i) for i, figure in enumerate(others, start=1)]
    if missing:
        title = f"Figures that this run has no numbers for ({len(missing)})"
        parts.append(_details(title, [f"{name}: {why}" for name, why in missing.items()]))
    return "\n".join(parts)


def _measured(run: Run) -> str:
    about = {k: v for k, v in run.environment.items() if k != "models"}
    revisions = [
        f"{label}: {entry.get('name')} at {entry.get('revision')}"
        for label, entry in run.environment.get("models", {}).items()
    ]
    if run.elsewhere:
        about |= {"some batches were measured elsewhere": join([str(one) for one in run.elsewhere])}
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
    # The revision is long, and stands in full under "Environment".
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
    """The first prompts as the first model read them; of every variant the first."""
    labels = _labels(run)
    if not labels:
        return "<p>No prompt has been measured yet.</p>"
    label, base = labels[0], run.experiment.base
    tokens = run.tokens.filter(pl.col("model") == label)
    numbers = run.cells.filter(pl.col("model") == label)["prompt"].unique().sort().to_list()
    parts = [
        f"<p>{count(len(numbers), 'prompt')}. Shown as {escape(label)} read them: its tokens "
        f"joined, {'chat template included' if run.experiment.chat is True else 'plain text'}.</p>"
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
    """A line for every claim that the run has several choices for."""
    lines = verdict_cache.robustness()
    if lines.is_empty():
        return ""
    of = pl.format("{} of {}", "same_verdict", "verdicts")
    shown = lines.select(
        "claim",
        pl.col("verdict").alias("reference"),
        "choices",
        of.alias("verdicts as the reference"),
        pl.format("{} of {}", "survives", "places").alias("survives in"),
        pl.col("overturned_by").list.join(". ").replace("", None).alias("overturned by"),
    )
    omitted = sum(lines["not_judged"])
    note = f" {not_judged_note(omitted)}." if omitted else ""
    return (
        "<h3>Do the claims survive the choices?</h3><p>Each claim again under every choice of "
        "queries, keys, classes, normalisation and condition that this run has. The reference is "
        "the claim’s own choice, and of what it leaves open the run’s first; it survives in a "
        "place (a model or pair, a layer) where every choice has the reference’s verdict. The "
        "choices are the same data seen again, not further evidence."
        f"{note}</p>"
        f"{html_table(shown, css_class=SORTABLE)}"
    )


def _comparison(run: Run, **units: Any) -> str:
    """Every row of the comparison, with all columns that tell one from another."""
    try:
        table = compare_run(run, **units)
    except AttnscopeError as error:
        return f"<h3>Comparison</h3><p>Nothing is compared: {escape(str(error))}</p>"
    omitted: list[str] = []
    sizes = table["measure"].value_counts(sort=True, name="n")
    for measure in sizes["measure"][: sizes.height - 1]:
        if table.height > ROWS:
            omitted.append(measure)
            table = table.filter(pl.col("measure") != measure)
    longer = (
        f"<p>Left out for its length: {escape(join(omitted))}; <code>attnscope compare RUN "
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
        "<h3>Comparison</h3><p>Second (b) less first (a), paired by prompt unless the note says "
        f"otherwise; low and high: 95 % interval over prompts; p: {TESTED}; "
        f"q: Benjamini–Hochberg over layers × heads. Throughout: {escape(throughout)}.</p>{longer}"
        f"{html_table(shown, css_class=SORTABLE)}"
    )


def _with_relative_path(experiment: Experiment) -> Experiment:
    """The experiment as the run’s directory has it: its prompts are a file beside it."""
    prompts = experiment.prompts
    path = getattr(prompts, "path", None)
    if path is None:
        return experiment
    return experiment.with_keys(prompts=prompts.model_dump() | {"path": PurePath(path).name})


def _repeat(run: Run) -> str:
    path = getattr(_with_relative_path(run.experiment).prompts, "path", None)
    beside = f", beside <code>{escape(path)}</code> of the run’s directory" if path else ""
    return (
        f"<p>Save this as <code>experiment.yaml</code>{beside} (it is in the run’s directory too), "
        "then</p>"
        "<pre>attnscope run experiment.yaml --out RUN\nattnscope figure RUN\n"
        "attnscope report RUN\nattnscope compare RUN</pre>"
        f"<pre>{escape(experiment_to_yaml(_with_relative_path(run.experiment)))}</pre>"
    )
