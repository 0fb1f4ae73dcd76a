"""The report: what was asked, of which models and prompts, what came out, and how to repeat it.

One HTML file, everything inside, no address asked. This module must not know any single figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import polars as pl

from attnscope.errors import AttnscopeError
from attnscope.figures import Figure, Theme, drawable
from attnscope.figures.caption import tiny
from attnscope.figures.choice import base_conditions, conditions_in_order, models_in_order
from attnscope.figures.export import write
from attnscope.figures.figure import Run
from attnscope.figures.html import facts, frame_table
from attnscope.figures.page import POLICY, STYLE, charts_script, figure_html
from attnscope.figures.words import BUNDLED, count, join
from attnscope.question.yaml import written
from attnscope.stats.on_run import compare_run, judge_run, survival_of_run
from attnscope.stats.verdicts import verdict_table

if TYPE_CHECKING:
    from attnscope.run.store import Run as StoredRun

__all__ = ["build", "write_report"]

ROWS = 3_000
"""How many rows of the comparison are printed; beyond, measures with many rows are left out."""
SHOWN = 3
"""How many prompts of the base are printed."""
LONGEST = 4_000
"""How many characters of a prompt are printed."""


def write_report(run: Run, path: str | Path, *, theme: str | Theme = "published") -> Path:
    """Write the report of a run, whole or not at all."""
    path = Path(path)
    write(path, build(run, theme=theme).encode())
    return path


def build(run: Run, *, theme: str | Theme = "published") -> str:
    """The report of a run as HTML."""
    try:
        figures, missing = drawable(run, theme=theme)
    except AttnscopeError as error:
        figures, missing = [], {"any": str(error)}
    name = run.experiment.name
    sections = [
        ("asked", "What was asked", _asked(run)),
        ("models", "Models", _models(run)),
        ("prompts", "Prompts", _prompts(run)),
        ("figures", "Figures", _figures(figures, missing)),
        ("claims", "Claims", _claims(run)),
        ("tables", "Comparison", _comparison(run)),
        ("repeat", "How to repeat it", _repeat(run)),
        ("environment", "Environment", _environment(run)),
    ]
    contents = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in sections)
    body = "\n".join(
        f'<section id="{key}"><h2>{title}</h2>{content}</section>'
        for key, title, content in sections
    )
    state = "" if getattr(run, "complete", True) else _unfinished(run)
    note = tiny(run, _labels(run))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'{POLICY}<link rel="icon" href="data:,">'
        f"<title>{escape(name)}: where attention goes</title><style>{STYLE}</style></head>\n"
        f"<body><header><h1>{escape(name)}: where attention goes</h1>"
        f"{f'<p><strong>{escape(note)}.</strong></p>' if note else ''}{state}"
        f'<nav class="screen"><ul class="contents">{contents}</ul></nav></header>\n'
        f"<main>{body}</main>\n{charts_script(figures)}\n</body></html>\n"
    )


def _labels(run: Run) -> list[str]:
    return models_in_order(run, run.cells["model"].unique())


def _unfinished(run: Run) -> str:
    return (
        f"<p><strong>This run is not finished</strong>: it has {count(run.cells.height, 'cell')} "
        "so far, and everything below rests on these.</p>"
    )


def _asked(run: Run) -> str:
    cells = run.cells
    sums = (
        cells.group_by("model", "condition")
        .agg(
            pl.len().alias("prompts"),
            pl.col("tokens").mean().alias("mean tokens"),
            pl.col("filler_tokens").mean().alias("mean filler tokens"),
            pl.col("seam_tokens").mean().alias("mean seam tokens"),
        )
        .sort("model", "condition")
    )
    order = {m: i for i, m in enumerate(_labels(run))}
    conditions = {c: i for i, c in enumerate(conditions_in_order(run, cells["condition"].unique()))}
    sums = sums.sort(
        pl.col("model").replace_strict(order, return_dtype=pl.Int32),
        pl.col("condition").replace_strict(conditions, return_dtype=pl.Int32),
    )
    keys = ("prompts", "conditions", "layers", "heads", "queries", "keys", "classes", "measures")
    complete = run.experiment.complete() | {"classes": list(run.experiment.classes)}
    asked = {k: complete[k] for k in (*keys, "combine", "normalise")}
    return (
        f"<p>{count(cells.height, 'cell')}: {count(len(order), 'model')} × "
        f"{count(cells['prompt'].n_unique(), 'prompt')} × "
        f"{count(len(conditions), 'condition')}.</p>{facts(asked)}"
        f"<h3>Cells</h3>{frame_table(sums)}"
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
    return frame_table(
        pl.DataFrame(rows, schema=dict.fromkeys(["label", *columns, "note"], pl.String))
    )


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _prompts(run: Run) -> str:
    """The first prompts as the first model read them; of every variant the first."""
    label = _labels(run)[0]
    tokens = run.tokens.filter(pl.col("model") == label)
    numbers = run.cells.filter(pl.col("model") == label)["prompt"].unique().sort().to_list()
    base = base_conditions(run)
    parts = [
        f"<p>{count(len(numbers), 'prompt')}. Shown as {escape(label)} read them: its tokens "
        "joined, chat template included.</p>"
    ]
    for condition in conditions_in_order(run, run.cells["condition"].unique()):
        for number in numbers[: SHOWN if condition in base else 1]:
            read = (
                tokens.filter(pl.col("condition") == condition, pl.col("prompt") == number)
                .sort("position")
                .select("text")
                .collect()["text"]
            )
            if read.is_empty():
                continue
            text = "".join(read.drop_nulls())
            cut = text[:LONGEST] + ("…" if len(text) > LONGEST else "")
            parts.append(
                f"<h3>Prompt {number}, {escape(condition)} ({count(len(read), 'token')})</h3>"
                f'<pre class="prompt">{escape(cut)}</pre>'
            )
    return "\n".join(parts)


def _figures(figures: Sequence[Figure], missing: dict[str, str]) -> str:
    parts = [figure_html(figure, i) for i, figure in enumerate(figures)]
    if missing:
        items = "".join(
            f"<li><code>{escape(k)}</code>: {escape(v)}</li>" for k, v in missing.items()
        )
        parts.append(
            f"<details><summary>Figures that this run has no numbers for ({len(missing)})"
            f"</summary><ul>{items}</ul></details>"
        )
    return "\n".join(parts)


def _claims(run: Run) -> str:
    try:
        verdicts = judge_run(cast("StoredRun", run))
    except AttnscopeError as error:
        return f"<p>No claims were judged: {escape(str(error))}</p>"
    table = verdict_table(verdicts)
    measured = table.filter(pl.col("verdict") != "not measured")
    parts = []
    if not measured.is_empty():
        shown = measured.select("verdict", "statement", "reason", "model", "condition", "layer")
        parts.append(frame_table(shown))
    others = table.filter(pl.col("verdict") == "not measured")
    if not others.is_empty():
        items = "".join(
            f"<li>{escape(row['statement'])} — {escape(row['reason'])}</li>"
            for row in others.iter_rows(named=True)
        )
        parts.append(
            f"<details><summary>Not measured in this run ({others.height})</summary>"
            f"<ul>{items}</ul></details>"
        )
    parts.append(_survival(run))
    return "\n".join(parts)


def _survival(run: Run) -> str:
    """A line for every claim that the run has several choices for."""
    lines = survival_of_run(cast("StoredRun", run))
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
    return (
        "<h3>Do they survive the choices?</h3><p>Each claim again under every choice of queries, "
        "keys, classes, normalisation and condition that this run has. The reference is the "
        "claim’s own choice, and of what it leaves open the run’s first; it survives in a place "
        "(a model or pair, a layer) where every choice has the reference’s verdict. The choices "
        f"are the same data seen again, not further evidence.</p>{frame_table(shown)}"
    )


def _comparison(run: Run) -> str:
    try:
        table = compare_run(cast("StoredRun", run))
    except AttnscopeError as error:
        return f"<p>Nothing is compared: {escape(str(error))}</p>"
    sizes = table["measure"].value_counts(sort=True, name="n")
    left_out: list[str] = []
    for measure, _ in sizes.iter_rows():
        if table.height <= ROWS or len(left_out) == sizes.height - 1:
            break
        left_out.append(measure)
        table = table.filter(pl.col("measure") != measure)
    longer = (
        f"<p>Left out for its length: {escape(join(left_out))}; <code>attnscope compare RUN "
        "--json</code> has every row.</p>"
        if left_out
        else ""
    )
    wanted = ["a", "b", "measure", "item", "target", "layer", "head", "n", "mean_a", "mean_b"]
    wanted += ["difference", "ratio", "effect", "low", "high", "p", "q", "note"]
    kept = [c for c in wanted if c in table.columns and table[c].null_count() < table.height]
    return (
        "<p>Second (b) less first (a), paired by prompt unless the note says otherwise; "
        "low and high: 95 % BCa interval over prompts; p: sign-flip permutation test; q: "
        f"Benjamini–Hochberg over layers × heads.</p>{longer}{frame_table(table.select(kept))}"
    )


def _repeat(run: Run) -> str:
    asked = written(run.experiment)
    return (
        "<p>Save this as <code>experiment.yaml</code> (it is in the run’s directory too), then</p>"
        "<pre>attnscope run experiment.yaml --out RUN\nattnscope figure RUN\n"
        "attnscope report RUN\nattnscope compare RUN</pre>"
        f"<pre>{escape(asked)}</pre>"
    )


def _environment(run: Run) -> str:
    about = {k: v for k, v in run.environment.items() if k != "models"}
    revisions = {
        label: f"{entry.get('name')} at {entry.get('revision')}"
        for label, entry in run.environment.get("models", {}).items()
    }
    return facts(about | ({"models": join([f"{k}: {v}" for k, v in revisions.items()])}))
