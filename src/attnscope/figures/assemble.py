"""A figure put together from its chart, data and words: the last step of every figure.

This module must not know any single figure.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from attnscope.figures.describe import Words, describe
from attnscope.figures.figure import Figure
from attnscope.figures.layout import finish
from attnscope.figures.style import Style

__all__ = ["assemble"]


def assemble(
    name: str,
    chart: Any,
    data: pl.DataFrame,
    words: Words,
    *,
    caption: str,
    style: Style,
    width: float,
    differences: pl.DataFrame | None = None,
    interactive: Any = None,
) -> Figure:
    """The figure; `interactive` is the chart for the screen, where it is another."""
    described = describe(data, words, differences)

    def whole(drawn: Any) -> dict[str, Any]:
        return finish(
            drawn,
            title=words.title,
            caption=caption,
            alt_text=described.alt,
            width=width,
            theme=style.theme,
        )

    spec = whole(chart)
    return Figure(
        name=name,
        title=words.title,
        spec=spec,
        interactive=spec if interactive is None else whole(interactive),
        data=data,
        caption=caption,
        description=described.markdown,
        alt=described.alt,
        theme=style.theme,
    )
