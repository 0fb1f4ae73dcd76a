"""The registry of all measures: to add one, declare it in a file and list the file in `FILES`."""

from importlib import import_module

from attnscope.measures.measure import ANY, Measure, Range

FILES = (
    *("mass", "flow", "entropy", "effective_tokens", "first_token", "self_mass", "distance"),
    "self_attention",
    *(
        "max_logit",
        "learned_sink_mass",
        "top_share",
        "chosen_keys",
        "query_means",
        "slope",
        "spikes",
    ),
    *("reshaping", "uniformity", "values", "affine", "activations"),
    "residual",
    "next_token",
    "rerank",
    *("completion", "received", "by_query", "alignment", "grounding"),
    "receivers",
)
"""The files that declare measures, in the order of the documentation."""

MEASURES: dict[str, Measure] = {
    declared.name: declared
    for file in FILES
    for declared in vars(import_module(f"attnscope.measures.{file}")).values()
    if isinstance(declared, Measure)
}
"""Measures by name."""

BY_HEAD: tuple[str, ...] = tuple(
    name
    for name, m in MEASURES.items()
    if m.level == "head"
    and not (m.compares_to_base or m.per or m.about_generation or m.needs & {"sound", "box"})
)
"""Measures with one number per head that need one watched text only."""

COLUMNS: dict[str, Measure] = {
    column: measure for measure in MEASURES.values() for column in measure.columns
}
"""Measures by the names of their numbers in a run."""


def range_of(column: str) -> Range:
    """The possible values of a column; any, if not declared."""
    declared = COLUMNS[column].range if column in COLUMNS else ANY
    return declared if isinstance(declared, tuple) else declared.get(column, ANY)
