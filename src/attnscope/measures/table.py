"""Documentation of the measures for docs/measures.md and `attnscope run --help`.

python -m attnscope.measures.table > docs/measures.md
"""

from attnscope.measures.measure import Measure
from attnscope.measures.registry import MEASURES

_HEAD = """\
# Measures
Generated from `src/attnscope/measures` by `python -m attnscope.measures.table`. An experiment lists
names of the first column under `measures`. The table `values` of a run has the names of the second
column in its column `measure`. [concepts.md](concepts.md) defines the terms;
[extending.md](extending.md) shows how to add a measure.
"""

_OVER = {
    "keys": "each of the experiment's `keys`",
    "classes": "each class of each of its class sets",
    "class pairs": "each pair of classes of each of its class sets",
    "steps": "each generated token",
}


def lines() -> list[str]:
    """One line per measure: its name and its definition."""
    return [f"{measure.name}: {measure.description}" for measure in MEASURES.values()]


def markdown() -> str:
    """The text of docs/measures.md."""
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
        "| `measures:` | numbers | meaning | one number for | needs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for measure in measures:
        for n, (column, meaning) in enumerate(measure.columns.items()):
            first = [f"`{measure.name}`", _one_for(measure), ", ".join(sorted(measure.needs))]
            name, one_for, needs = first if n == 0 else ("", "", "")
            rows.append(f"| {name} | `{column}` | {meaning} | {one_for} | {needs} |")
    return rows


def _one_for(measure: Measure) -> str:
    each = [f"each {measure.level}"]
    if measure.level == "text":
        each = ["each text"]
    if measure.level == "token":
        each = ["each token of each head of `profiles`, in the table `positions`"]
    if measure.level == "query":
        each = ["each query (or `bin` of them) of each head of `profiles`, in the table `by_query`"]
    each += [_OVER[over] for over in _OVER if over in measure.per]
    if measure.items:
        few = [*measure.items[:2], "…", measure.items[-1]]
        each.append(f"`item` {', '.join(measure.items if len(measure.items) < 9 else few)}")
    return "; ".join(each)


if __name__ == "__main__":
    print(markdown(), end="")
