"""The text of a prompt, each token shaded by the attention that it receives."""

import polars as pl

from attnscope.figures.caption import head_list_text
from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.numbers import rounded
from attnscope.figures.options import LEAVE_OUT_FIRST, Option
from attnscope.figures.profiles import select_profiles
from attnscope.figures.shapes.text import MOST, Text, laid_out

BY = {
    "average": "average attention weight: mean over the later queries that can see the token",
    "received": "attention received: sum over queries",
}


def _numbers(request: Request, figure: Figure) -> Numbers:
    by, first_hidden = request.options["by"], request.options["leave_out_first"]
    selection, heads = select_profiles(request, value=by)
    condition, frame = selection.conditions[0], selection.frame
    of = {**heads.row(0, named=True), "prompt": min(frame["prompt"]), "condition": condition}
    full = frame.filter(**of).sort("position")
    if first_hidden:
        full = full.filter(pl.col("position") > 0)
    columns = ["position", "token", "class", "role", "value"]
    data = laid_out(full.select(columns), request.width or 780, request.theme)
    return Numbers(
        data=rounded(data),
        models=[of["model"]],
        words={"by": by},
        settings={"y": BY[by].partition(":")[0].capitalize()},
        sentences=[
            head_list_text(pl.DataFrame([of])),
            f"{BY[by].capitalize()}; queries: {selection.queries[0]}; condition: {condition}",
            f"n = 1: prompt {of['prompt']}; 1 of {heads.height} heads in the run",
            "The first token is not shown" if first_hidden else "",
            f"The first {data.height:,} of {full.height:,} tokens (at most {MOST} lines)"
            if full.height > data.height
            else "",
        ],
    )


FIGURE = Figure(
    name="text",
    shows="the tokens of a prompt, shaded by attention",
    by=["position", "token"],
    shape=Text(),
    sentences=["Colour shows the square root of the value"],
    numbers=_numbers,
    differences="The figure shows one prompt, so nothing is compared.",
    title="Attention that each token receives, in the text",
    what="The darker a token, the more attention it receives",
    quantity="{by}",
    needs="an experiment with `profile` among its measures has them, such as the recipe "
    "filler-profile",
    options={
        "by": Option(help="average (default) or received", known=tuple(BY)),
        **LEAVE_OUT_FIRST,
    },
)
