"""Draws, for each head, its mass on a token class and the effect of a knockout of that class.

Drawn from a table of both.
"""

from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.charts.matrix import head_matrices
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Drawing, draw_table
from attnscope.figures.numbers import rounded
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style


def mass_effect(table: pl.DataFrame, *, of: str, **options: Any) -> Drawing:
    """The figure `mass-effect` of a table with `problem`, `class`, `layer`, `head`, `mass` (of the
    last prompt token on the class) and `effect` (of the knockout in that head on the log-
    probability of the right answer); `of` names the model."""
    mean = table.group_by("class", "layer", "head", maintain_order=True).agg(
        pl.col("mass").mean(), pl.col("effect").mean(), pl.col("problem").n_unique().alias("n")
    )
    data = rounded(mean)
    names = data["class"].unique(maintain_order=True).to_list()
    text = FigureText(
        title=f"Mass and effect of a knockout, by head: {of}",
        caption=[
            "Upper row: attention of the last prompt token to a token class. Lower row: change of "
            "the log-probability (nats) of the right answer when no query of that head can attend "
            "to the class. Negative: the answer depends on it",
            f"Means over n = {max(data['n'].to_list(), default=0)} problems; no intervals; layers "
            "and heads counted from 0",
        ],
        models=[],
        overview=f"Two coloured matrices of layers by heads for each of {join(names)}: mass and "
        "effect.",
        axes=["x: head, from 0", "y: layer, from 0 at the top"],
        legend=[
            "colour, above: mass, from none to most",
            "colour, below: effect, either side of 0",
        ],
        value="effect",
        quantity="effect",
        places={"class": "{}", "layer": "layer {}", "head": "head {}"},
        split=["class"],
        notes=[_together(part) for part in data.partition_by("class", maintain_order=True)],
        no_differences="Means, not compared with one another.",
    )
    return draw_table("mass-effect", data, text, _chart, width=640, height=170, **options)


def _together(part: pl.DataFrame) -> str:
    """Whether heads with more mass have larger effects."""
    ranks = part.select(pl.col("mass").rank(), pl.col("effect").abs().rank())
    rho = ranks.select(pl.corr("mass", "effect")).item()
    most = part.sort("mass", descending=True).row(0, named=True)
    far = part.sort(pl.col("effect").abs(), descending=True).row(0, named=True)
    return (
        f"{part['class'][0]}: Spearman's ρ of mass and |effect| over {part.height} heads is "
        f"{rho:.2f}; most mass {most['mass']:.3g} at layer {most['layer']}, head {most['head']} "
        f"(effect {most['effect']:+.2g}); largest effect {far['effect']:+.2g} at layer "
        f"{far['layer']}, head {far['head']} (mass {far['mass']:.3g})."
    )


def _chart(frame: pl.DataFrame, style: Style) -> Any:
    """Matrices of `mass` above and of `effect` below, `layer` by `head`, a panel per `class`."""
    far = max((abs(v) for v in frame["effect"].drop_nulls()), default=0.0) or 1.0
    most = max(frame["mass"].drop_nulls().to_list(), default=0.0) or 1.0
    colours = style.theme.sequential
    mass = head_matrices(
        frame,
        style,
        panel="class",
        value="mass",
        value_title="Mass",
        domain=[most * i / (len(colours) - 1) for i in range(len(colours))],
        colours=colours,
    )
    effect = head_matrices(
        frame,
        style,
        panel="class",
        value="effect",
        value_title="Effect (nats)",
        domain=[-far, -far / 2, 0, far / 2, far],
        colours=style.theme.diverging,
    )
    return alt.vconcat(mass, effect, spacing=26).resolve_scale(color="independent")
