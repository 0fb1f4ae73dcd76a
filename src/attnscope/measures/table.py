"""Documentation of the measures for the site and for `attnscope run --help`."""

from attnscope.measures.measure import Measure
from attnscope.measures.registry import MEASURES

_HEAD = """\
# Measures
An experiment lists names of the first column under `measures`. The table
`values` of a run has those of the second column (if empty: the first) in its column `measure`.
[What every number means](../concepts.md) defines the terms; [extending](../extending.md) shows
how to add a measure.

There is one number for each combination of `per`: `keys` and `class` are those of the experiment.
Numbers per token and per query (or `bin` of them) are those of the heads of `profiles`, in the
tables `positions` and `by_query`. "needs" names what a forward pass must provide beside the sums
of attention.
"""

_OVER = {
    "keys": "`keys`",
    "classes": "class",
    "class pairs": "pair of classes",
    "steps": "generated token",
}


def lines() -> list[str]:
    """One line per measure: its name and its definition."""
    return [f"{measure.name}: {measure.description}" for measure in MEASURES.values()]


def markdown() -> str:
    """The page of measures."""
    single = [m for m in MEASURES.values() if not m.compares_to_base]
    paired = [m for m in MEASURES.values() if m.compares_to_base]
    return "\n".join(
        [
            _HEAD,
            "## Measures of every condition",
            *_table(single),
            "",
            "## Measures that compare a variant with its base",
            "They are stored in the rows of the variant's condition. `item` is the share of the "
            "aligned tokens that counts as spikes; default: 0.1.",
            "",
            *_table(paired),
            "",
            "Measures that need `values`, `heads`, `outputs` or `activations` do not depend on the "
            "choice of queries; they are stored under `all`.",
            "",
        ]
    )


def _table(measures: list[Measure]) -> list[str]:
    rows = [
        "| `measures:` | numbers | meaning | per |",
        "| --- | --- | --- | --- |",
    ]
    for measure in measures:
        for n, (column, meaning) in enumerate(measure.columns.items()):
            name, per = (f"`{measure.name}`", _per(measure)) if n == 0 else ("", "")
            number = "" if column == measure.name else f"`{column}`"
            rows.append(f"| {name} | {number} | {meaning} | {per} |")
    return rows


def _per(measure: Measure) -> str:
    each: list[str] = [measure.level, *(_OVER[over] for over in _OVER if over in measure.per)]
    if measure.items:
        few = [*measure.items[:2], "…", measure.items[-1]]
        each.append(f"`item` {', '.join(measure.items if len(measure.items) < 9 else few)}")
    if needs := sorted(measure.needs - {"sums"}):
        each.append(f"needs {', '.join(needs)}")
    return "; ".join(each)
