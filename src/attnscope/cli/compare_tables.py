"""The text of `attnscope compare`: one line per claim, a table of each claim, and comparisons."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import polars as pl

from attnscope.report.published import PublishedStatistic
from attnscope.run.tables import ranges
from attnscope.spec.claims import Line
from attnscope.stats.outcome import COUNTS
from attnscope.stats.sensitivity import not_judged_note, robustness
from attnscope.stats.sentences import cells_of, decimals, heads_text, outwards
from attnscope.stats.verdicts import Verdict, verdict_dict

LINES = 40
"""The most lines without --full."""
ROWS = 10
"""The most rows of a table without --full."""
FEWER = (6, 4, 2, 1)
"""The same, if there would be more than `LINES` lines."""
WIDEST = 60
"""Characters of a line of a claim in the first column."""
FOOTER = (
    "* p against the needed value, corrected as the intervals are: those of a claim hold together "
    "at 95 %. Changes in % are of the ratio of means."
)
CORRELATION = r" \(intraclass correlation [\d.]+\)"
"""Differs between claims; --json has it, and the notes stand once for all claims."""
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
    """At most `LINES` lines unless `full`: if there are more, the tables get fewer rows, and then
    the last line counts those that are left out. The comparison stands before the claims if the
    user asked for certain rows."""
    lines: list[str] = []
    for most in (None,) if full else (ROWS, *FEWER):
        claims = (_claims(verdicts), _tables(verdicts, most), _statistics(statistics))
        comparison = _comparison(compared, most)
        parts = (comparison, *claims) if comparison_first else (*claims, comparison)
        lines = [title]
        for part in filter(None, (*parts, _robustness(choices))):
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
            some[0].summary if len(group) == 1 else f"{word} in {_places(some, group)}"
            for word, some in counts.items()
        )
        written = next((f" ({v.written})" for v in group if v.written), "")
        lines.append(f"{name}: {text}{written}")
    absent = [v for v in verdicts if not v.results]
    return [*lines, *dict.fromkeys(f"{v.claim}: {v.verdict}: {v.reason}" for v in absent)]


def _words(verdicts: Sequence[Verdict]) -> list[str]:
    return list(dict.fromkeys(v.verdict for v in verdicts))


def _places(verdicts: Sequence[Verdict], group: Sequence[Verdict]) -> str:
    """Where these verdicts are: layers of models and conditions, where these differ."""
    layers: dict[str, list[int]] = {}
    for verdict in verdicts:
        some = layers.setdefault(_setting(verdict, group), [])
        some += [] if verdict.layer is None else [verdict.layer]
    texts = []
    for where, some in layers.items():
        numbers = f"layer{'s' if len(some) > 1 else ''} {ranges(some, 3)}" if some else ""
        texts.append(f"{where} {numbers}".strip())
    return ", ".join(texts)


def _setting(verdict: Verdict, group: Sequence[Verdict]) -> str:
    """Model and condition, where they differ within the claim."""
    names = [n for n in ("model", "condition") if len({getattr(v, n) for v in group}) > 1]
    return " ".join(str(getattr(verdict, name)) for name in names)


def _tables(verdicts: Sequence[Verdict], most: int | None) -> list[str]:
    """A table for each claim: a row per line, layer, model and condition; then the notes once."""
    lines: list[str] = []
    notes: dict[str, list[str]] = {}
    tested = False
    for name in dict.fromkeys(v.claim for v in verdicts if v.results):
        group = [v for v in verdicts if v.claim == name and v.results]
        change = _change(group)
        rows = [["", "left", "right", change, "95 % interval", "needed", "verdict", "p*"]]
        for verdict in group:
            for line, result in zip(verdict.lines, verdict.results, strict=True):
                cells = cells_of(line, result)
                cells["after"] = "–" if change == "value" else cells["after"]
                text = _short(line) if len(verdict.lines) > 1 else ""
                label = " ".join(filter(None, (_places([verdict], group), text)))
                numbers = [cells[c] for c in ("after", "before", "change", "interval", "needed")]
                rows.append([label, *numbers, result.word, cells["p"]])
                tested = tested or result.p is not None
        for note, of_claim in _notes(group):
            notes.setdefault(note, []).append(of_claim)
        what = _statement(group) if len(group[0].lines) == 1 else f"{len(group[0].lines)} parts"
        lines += [f"{name}: {what.split(', ', 1)[-1] if group[0].layer is not None else what}"]
        shown = len(rows) if most is None or len(rows) <= most + 2 else most + 1
        lines += [f"  {row}" for row in _aligned(rows)[:shown]]
        left = len(rows) - shown
        lines += [f"  … {left} more rows; --full shows them"] if left else []
    lines += [FOOTER] if tested else []
    return lines + [f"! {', '.join(places)}: {note}" for note, places in notes.items()]


def _notes(group: Sequence[Verdict]) -> Iterator[tuple[str, str]]:
    """Supporting heads, and what limits the verdicts on a claim; each with the claim. A limit has
    its models and layers unless it is that of all."""
    noted: dict[str, list[Verdict]] = {}
    for verdict in group:
        where = _places([verdict], group)
        for heads in filter(None, map(heads_text, verdict.results)):
            yield heads, f"{verdict.claim} ({where})" if where else verdict.claim
        limits = filter(None, (*(result.note for result in verdict.results), *verdict.notes))
        for note in dict.fromkeys(re.sub(CORRELATION, "", limit) for limit in limits):
            noted.setdefault(note, []).append(verdict)
    for note, some in noted.items():
        where = "" if len(some) == len(group) else f" ({_places(some, group)})"
        yield note, f"{group[0].claim}{where}"


def _change(group: Sequence[Verdict]) -> str:
    """The heading of the estimates: changes, values, or numbers of heads or layers."""
    first, *others = {result.kind for verdict in group for result in verdict.results}
    if others or first in ("ratio", "difference"):
        return "change"
    return f"{first} beyond" if first in COUNTS else first


def _statement(group: Sequence[Verdict]) -> str:
    """The statement; with the model if it is the only one."""
    models = {verdict.model for verdict in group}
    return group[0].sentence if len(models) == 1 else group[0].statement


def _short(line: Line) -> str:
    """The line without the options that both sides have; of one side, without any."""
    options = [re.split(r",\s*", one) for one in re.findall(r"\[([^\]]*)\]", line.text)]
    same = set(options[0]).intersection(*options[1:]) if options else set()

    def differing(match: re.Match[str]) -> str:
        some = [one for one in re.split(r",\s*", match[1]) if one not in same]
        return f"[{', '.join(some)}]" if some else ""

    alone = line.right is None or (len(options) == 1 and line.right.measure == line.left.measure)
    text = line.text if alone and line.right else re.sub(r"\[([^\]]*)\]", differing, line.text)
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


def _comparison(compared: pl.DataFrame | None, most: int | None) -> list[str]:
    """The rows with the smallest p first; what all rows share stands once."""
    if compared is None:
        return []
    if compared.is_empty():
        return ["comparison: no row is decided; without --holds all are shown"]
    labels = [name for name in _LABELS if name in compared.columns]
    same = [n for n in labels if compared[n].n_unique() == 1]
    shown = [n for n in labels if n not in same]
    rows = compared.sort("p", pl.col("effect").abs(), descending=[False, True], nulls_last=True)
    rows = rows if most is None else rows.head(most)
    p = "p_fwer" if "p_fwer" in compared.columns else "p"
    numbers = ["mean_a", "mean_b", "difference", "interval", p, "q", "outcome"]
    table = [[*map(_heading, shown), *numbers]]
    for row in rows.iter_rows(named=True):
        tests = [_p(row[p]), _p(row["q"]), row["outcome"]]
        table.append([*(_number(row[n]) for n in shown), *_to_its_interval(row), *tests])
    fixed = ", ".join(f"{_heading(n)} {compared[n][0]}" for n in same if compared[n][0] is not None)
    number = max(rows["n"].to_list())
    many = f"{rows.height} of {compared.height:,} rows, smallest p first (largest effects)"
    notes = dict.fromkeys(note for note in rows["note"].to_list() if note)
    family = "p_fwer: over all layers and heads (Romano and Wolf)"
    corrected = family if p == "p_fwer" else "p of one row"
    return [
        f"comparison, b minus a: {fixed}; {many}",
        *_aligned(table),
        f"{corrected}; q: false discovery rate, which decides the outcome; n = {number} prompts",
        *(f"! {note}" for note in notes),
    ]


def _heading(column: str) -> str:
    return "class" if column == "item" else column


def _to_its_interval(row: Mapping[str, Any]) -> list[str]:
    """Both means, the difference and its interval, to the precision of the interval."""
    low, high = row["low"], row["high"]
    numbers = [row[name] for name in ("mean_a", "mean_b", "difference")]
    if low is None or high is None:
        return [*map(_number, numbers), "–"]
    digits = decimals(high - low)
    while 0.0 in (ends := outwards(low, high, digits)) and 0.0 not in (low, high) and digits < 9:
        digits += 1  # an end beyond 0 is not printed as 0
    shown = [f"{number + 0.0:.{digits}f}" for number in (*numbers, *ends)]
    return [*shown[:3], " … ".join(shown[3:])]


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
