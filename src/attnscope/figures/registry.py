"""Every figure by its name: the one list, which the command line, the report and the docs read.

A new figure is one file that declares `FIGURE`, and one line here. Files are imported when their
figure is drawn, so that the names alone cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnscope.errors import unknown

if TYPE_CHECKING:
    from attnscope.figures.figure import Figure

__all__ = ["FIGURES", "figure_named", "table"]

FIGURES: Mapping[str, str] = {
    "token-types": "token_types",
    "filler-profile": "filler_profile",
    "filler-vs-sentence": "filler_vs_sentence",
    "effect-heads": "effect_heads",
    "classes": "classes",
    "lift": "lift",
    "lambda": "lambda_heads",
    "lambda-length": "lambda_length",
    "flow": "flow",
    "depth": "depth",
    "text": "text",
    "sensitivity": "sensitivity",
}
"""Every figure, by its name, with the file that declares it."""


def figure_named(name: str) -> Figure[Any]:
    """The declaration of a figure."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    found: Figure[Any] = import_module(f"attnscope.figures.{FIGURES[name]}").FIGURE
    return found


def table() -> str:
    """All figures with what they show and their own options: the table of docs/figures.md."""
    rows = ["| name | shows | options of its own |", "| --- | --- | --- |"]
    for figure in map(figure_named, FIGURES):
        said = " · ".join(option.said for option in figure.options.values())
        rows.append(f"| `{figure.name}` | {figure.shows} | {said} |")
    return "\n".join(rows)
