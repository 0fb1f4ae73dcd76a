"""Every measure there is. The spec's choices, the runner, the evidence for claims and the table in
docs/measures.md are made from this. A new one is a file that declares it, and its name here.
"""

from importlib import import_module

from attnscope.measures.measure import ANY, Measure, Range

FILES = (
    *("mass", "flow", "entropy", "effective_tokens", "first_token", "self_mass", "distance"),
    *("learned_sink_mass", "chosen_keys", "renyi2", "by_distance", "largest", "slope", "spikes"),
    *("reshaping", "uniformity", "values", "affine", "activations", "activation_shape"),
    *("completion", "received", "by_query"),
)
"""Those that declare measures, in the order in which these are listed and measured."""

MEASURES: dict[str, Measure] = {
    declared.name: declared
    for file in FILES
    for declared in vars(import_module(f"attnscope.measures.{file}")).values()
    if isinstance(declared, Measure)
}
"""By the name that an experiment lists under `measures`."""

BY_HEAD: tuple[str, ...] = tuple(
    name
    for name, m in MEASURES.items()
    if m.level == "head" and not (m.pair or m.over or m.answers)
)
"""Those that are numbers of every head and need nothing but one watched text."""

COLUMNS: dict[str, Measure] = {
    column: measure for measure in MEASURES.values() for column in measure.columns
}
"""By the name that its numbers have in a run."""


def range_of(column: str) -> Range:
    """The possible values of a column's numbers; any, where they are not declared."""
    declared = COLUMNS[column].range if column in COLUMNS else ANY
    return declared if isinstance(declared, tuple) else declared.get(column, ANY)
