"""The measures in words, from their declarations: docs/measures.md and the help of `attnscope run`.

python -m attnscope.measures.table > docs/measures.md
"""

from attnscope.measures.measure import Measure
from attnscope.measures.registry import MEASURES

_HEAD = """\
# Measures
Made from the declarations in `src/attnscope/measures` by `python -m attnscope.measures.table`. An
experiment lists names of the first column under `measures`; its numbers stand in the table `values`
of a run under the names of the second, in the column `measure`. [concepts.md](concepts.md) has the
definitions they rest on, [extending.md](extending.md) how to add one.
"""

_OVER = {
    "keys": "each of the experiment's `keys`",
    "classes": "each class of each of its class sets",
    "class pairs": "each pair of classes of each of its class sets",
}


def lines() -> list[str]:
    """A name and its definition each."""
    return [f"{measure.name}: {measure.about}" for measure in MEASURES.values()]


def markdown() -> str:
    """docs/measures.md, whole."""
    of_one = [m for m in MEASURES.values() if not m.pair]
    of_two = [m for m in MEASURES.values() if m.pair]
    return "\n".join(
        [
            _HEAD,
            "## Of every condition",
            *_table(of_one),
            "",
            "## Of a variant, against its base",
            "They stand in the rows of the variant's condition. `item` is the share of the aligned "
            "tokens that counts as spikes; 0.1 is meant where nobody says.",
            "",
            *_table(of_two),
            "",
            "What needs no sums over queries (values, heads, outputs, activations) is the same for "
            "every choice of queries, and stands under `all`.",
            "",
        ]
    )


def _table(measures: list[Measure]) -> list[str]:
    rows = [
        "| `measures:` | numbers | meaning | one for | needs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for measure in measures:
        for n, (column, about) in enumerate(measure.columns.items()):
            first = [f"`{measure.name}`", _one_for(measure), ", ".join(sorted(measure.needs))]
            name, one_for, needs = first if n == 0 else ("", "", "")
            rows.append(f"| {name} | `{column}` | {about} | {one_for} | {needs} |")
    return rows


def _one_for(measure: Measure) -> str:
    each = [f"each {measure.level}"]
    if measure.level == "token":
        each = ["each token of each head of `profiles`, in the table `positions`"]
    if measure.level == "query":
        each = ["each query (or `bin` of them) of each head of `profiles`, in the table `by_query`"]
    each += [_OVER[over] for over in _OVER if over in measure.over]
    if measure.items:
        few = [*measure.items[:2], "…", measure.items[-1]]
        each.append(f"`item` {', '.join(measure.items if len(measure.items) < 9 else few)}")
    return "; ".join(each)


if __name__ == "__main__":
    print(markdown(), end="")
