"""The colours of token classes, the same in the terminal, in a notebook and in figures."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

CLASS_COLOURS = {
    "hash": "#d62728",
    "star": "#1f77b4",
    "whitespace": "#9a9a9a",
    "slash": "#8c564b",
    "newline": "#c7c7c7",
    "digit": "#2ca02c",
    "operator": "#9467bd",
    "conjunction": "#e377c2",
    "punctuation": "#bcbd22",
    "word": "#ff7f0e",
    "special": "#17becf",
    "other": "#6b7683",
}
"""Colours of the classes of the default set, by name."""
OTHER_COLOURS = ("#393b79", "#637939", "#b5812b", "#843c39", "#7b4173", "#3182bd", "#31a354")
"""Colours of classes with other names, used in turn."""


def class_colours(
    names: Iterable[str],
    known: Mapping[str, str] = CLASS_COLOURS,
    others: Sequence[str] = OTHER_COLOURS,
) -> list[str]:
    """A colour for each class: by its name, or the next of `others`."""
    spare = cycle(others)
    return [known[name] if name in known else next(spare) for name in names]
