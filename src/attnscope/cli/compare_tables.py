"""The text of `attnscope compare`: one line per claim, a table of each claim, and comparisons."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import polars as pl

from attnscope.report.published import PublishedStatistic
from attnscope.spec.claims import Line
from attnscope.stats.outcome import COUNTS
from attnscope.stats.sensitivity import not_judged_note, robustness
from attnscope.stats.sentences import cells_of, heads_text
from attnscope.stats.verdicts import Verdict, verdict_dict

LINES = 40
"""The most lines without --full."""
ROWS = 10
"""Rows of the comparison without --full."""
WIDEST = 60
"""Characters of a line of a claim in the first column."""
FOOTER = (
    "* p against the needed value, corrected as the intervals are: those of a claim hold together "
    "at 95 %. Changes in % are of the ratio of means."
)
_LABELS = (
    *("a", "b", "model", "condition", "queries", "keys", "measure", "normalise", "item", "target"),
    *("layer", "head"),
)


def as_data(
    compared: pl.DataFrame | None,
    verdicts: Sequence[Verdict],
    choices: pl.DataFrame | None = None,
    *,
    statistics: Sequence[PublishedStatistic] = (),
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The results as plain data: `settings`, `comparison` (rows), `verdicts` (with their lines),
    `statistics` of the recipe, `sensitivity`."""
    return {
        "settings": dict(settings or {}),
        "comparison": [] if compared is None else compared.to_dicts(),
        "verdicts": [verdict_dict(verdict) for verdict in verdicts],
        "statistics": [asdict(statistic) for statistic in statistics],
        "sensitivity": [] if choices is None else choices.to_dicts(),
    }


def as_text(
    title: str,
    compared: pl.DataFrame | None,
    verdicts: Sequence[Verdict],
    choices: pl.DataFrame | None,
    statistics: Sequence[PublishedStatistic],
    *,
    full: bool = False,
    comparison_first: bool = False,
) -> str:
    """At most `LINES` lines unless `full`. The last line counts the others. The comparison stands
    before the claims if the user asked for certain rows."""
    claims = (_claims(verdicts), _tables(verdicts), _statistics(statistics), _robustness(choices))
    comparison = _comparison(compared, full)
    lines = [title]
    for part in (comparison, *claims) if comparison_first else (*claims, comparison):
        if part:
            lines += part if lines == [title] else ["", *part]
    if full or len(lines) <= LINES:
        return "\n".join(lines)
    left = len(lines) - LINES + 1
    return "\n".join([*lines[: LINES - 1], f"… {left} more lines; --full shows them"])


def _claims(verdicts: Sequence[Verdict]) -> list[str]:
    """One line per claim: its verdicts; of claims without numbers, the reason."""
    lines = []
    for name in dict.fromkeys(v.claim for v in verdicts if v.results):
        group = [v for v in verdicts if v.claim == name and v.results]
        counts = {word: [v for v in group if v.verdict == word] for word in _words(group)}
        text = ", ".join(
            word if len(group) == 1 else f"{word} in {_places(some, group)}"
            for word, some in counts.items()
        )
        written = next((f" ({v.written})" for v in group if v.written), "")
        lines.append(f"{name}: {text}{written}")
    absent = [v for v in verdicts if not v.results]
    return [*lines, *dict.fromkeys(f"{v.claim}: {v.verdict}: {v.reason}" for v in absent)]


def _words(verdicts: Sequence[Verdict]) -> list[str]:
    return list(dict.fromkeys(v.verdict for v in verdicts))


def _places(verdicts: Sequence[Verdict], group: Sequence[Verdict]) -> str:
    """Where a verdict holds: layers, or models and conditions."""
    if all(v.layer is not None for v in verdicts) and len({v.model for v in group}) == 1:
        many = "s" if len(verdicts) > 1 else ""
        return f"layer{many} {', '.join(str(v.layer) for v in verdicts)}"
    return ", ".join(dict.fromkeys(_location(v, group) for v in verdicts))


def _location(verdict: Verdict, group: Sequence[Verdict]) -> str:
    """Model, condition and layer, where they differ within the claim."""
    layer = None if verdict.layer is None else f"layer {verdict.layer}"
    names = [n for n in ("model", "condition") if len({getattr(v, n) for v in group}) > 1]
    return " ".join([*(str(getattr(verdict, name)) for name in names), *([layer] if layer else [])])


def _tables(verdicts: Sequence[Verdict]) -> list[str]:
    """A table for each claim: a row per line, layer, model and condition; then the notes once."""
    lines: list[str] = []
    notes: dict[str, None] = {}
    for name in dict.fromkeys(v.claim for v in verdicts if v.results):
        group = [v for v in verdicts if v.claim == name and v.results]
        rows = [["", "before", "after", _change(group), "95 % interval", "needed", "verdict", "p*"]]
        for verdict in group:
            for line, result in zip(verdict.lines, verdict.results, strict=True):
                cells = cells_of(line, result)
                text = _short(line) if len(verdict.lines) > 1 else ""
                label = " ".join(part for part in (_location(verdict, group), text) if part)
                numbers = [cells[c] for c in ("before", "after", "change", "interval", "needed")]
                rows.append([label, *numbers, result.word, cells["p"]])
                if result.heads:
                    where = _location(verdict, group)
                    where = f"{name} ({where})" if where else name
                    notes[f"{where}: {heads_text(result)}"] = None
                if result.note:
                    notes[f"{name}: {result.note}"] = None
            notes |= dict.fromkeys(f"{name}: {note}" for note in verdict.notes)
        what = _statement(group) if len(group[0].lines) == 1 else f"{len(group[0].lines)} parts"
        lines += [f"{name}: {what.split(', ', 1)[-1] if group[0].layer is not None else what}"]
        lines += [f"  {row}" for row in _aligned(rows)]
    return [*lines, FOOTER, *(f"! {note}" for note in notes)] if lines else []


def _change(group: Sequence[Verdict]) -> str:
    """The heading of the estimates: changes, or numbers of heads or layers."""
    results = [result for verdict in group for result in verdict.results]
    same = len({result.kind for result in results}) == 1 and results[0].kind in COUNTS
    return f"{results[0].kind} beyond" if same else "change"


def _statement(group: Sequence[Verdict]) -> str:
    """The statement; with the model if it is the only one."""
    models = {verdict.model for verdict in group}
    return group[0].sentence if len(models) == 1 else group[0].statement


def _short(line: Line) -> str:
    """The line without its options, unless they are what is compared."""
    same = line.right is not None and line.right.measure == line.left.measure
    text = line.text if same else re.sub(r"\[[^\]]*\]", "", line.text)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with columns of equal width; the first column is left-aligned."""
    used = [at for at in range(len(rows[0])) if any(row[at] not in ("", "–") for row in rows[1:])]
    widths = {at: max(len(row[at]) for row in rows) for at in used}
    return [
        "  ".join(
            row[at].ljust(widths[at]) if at == used[0] else row[at].rjust(widths[at]) for at in used
        ).rstrip()
        for row in rows
    ]


def _comparison(compared: pl.DataFrame | None, full: bool) -> list[str]:
    """The rows with the smallest p first; what all rows share stands once."""
    if compared is None or compared.is_empty():
        return []
    labels = [name for name in _LABELS if name in compared.columns]
    same = [n for n in labels if compared[n].n_unique() == 1]
    shown = [n for n in labels if n not in same]
    rows = compared.sort("p", pl.col("effect").abs(), descending=[False, True], nulls_last=True)
    rows = rows if full else rows.head(ROWS)
    numbers = ["mean_a", "mean_b", "difference", "interval", "p", "q", "outcome"]
    p = "p_fwer" if "p_fwer" in compared.columns else "p"
    table = [[*("class" if n == "item" else n for n in shown), *numbers]]
    for row in rows.iter_rows(named=True):
        interval = f"{_number(row['low'])} … {_number(row['high'])}"
        cells = [_number(row[n]) for n in ("mean_a", "mean_b", "difference")]
        tests = [_p(row[p]), _p(row["q"]), row["outcome"]]
        table.append([*(_number(row[n]) for n in shown), *cells, interval, *tests])
    fixed = ", ".join(f"{n} {compared[n][0]}" for n in same if compared[n][0] is not None)
    number = max(rows["n"].to_list())
    many = f"{rows.height} of {compared.height:,} rows, smallest p first (largest effects)"
    notes = dict.fromkeys(note for note in rows["note"].to_list() if note)
    corrected = "p over all layers and heads (Romano and Wolf)" if p == "p_fwer" else "p of one row"
    return [
        f"comparison, b minus a: {fixed}; {many}",
        *_aligned(table),
        f"{corrected}; q: false discovery rate, which decides the outcome; n = {number} prompts",
        *(f"! {note}" for note in notes),
    ]


def _statistics(statistics: Sequence[PublishedStatistic]) -> list[str]:
    """The statistics of the paper that the recipe repeats."""
    rows = [["statistics of the paper", "95 % interval over prompts", "n", "published"]]
    rows += [[one.what, one.shown, str(one.n), one.published or "–"] for one in statistics]
    return _aligned(rows) if statistics else []


def _robustness(choices: pl.DataFrame | None) -> list[str]:
    if choices is None:
        return []
    table = robustness(choices)
    names = ("model", "layer", "verdict", "choices", "same_sign", "same_verdict")
    rows = [[*(name.replace("_", " ") for name in names), "changed by"]]
    rows += [
        [*(_number(row[name]) for name in names), "; ".join(row["overturned_by"])]
        for row in table.iter_rows(named=True)
    ]
    note = not_judged_note(choices["not_judged"][0])
    lines = [f"{table['claim'][0]} under other choices", *_aligned(rows)]
    return [*lines, *([note] if note else [])]


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _p(value: float | None) -> str:
    return "<.001" if value is not None and value < 0.001 else _number(value)
