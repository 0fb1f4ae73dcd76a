"""Which heads attend more to one token class than to another."""

from dataclasses import replace
from itertools import chain

from attnscope.figures.comparing import SHOW, compared_by_head
from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.numbers import LEVEL
from attnscope.figures.options import NORMALISE, SCALE
from attnscope.figures.reading import read
from attnscope.figures.select import AbsentError
from attnscope.figures.shapes.matrix import Matrix


def _numbers(request: Request, figure: Figure) -> Numbers:
    request = request if request.choice.items else _as_claimed(request)
    rows = read(request, figure)
    pair = list(request.choice.items or rows.selection.items)
    if len(pair) != 2:
        raise AbsentError(
            "class-difference shows two classes, and no claim of this run compares two; choose "
            f"two of {', '.join(rows.selection.items)} with items",
            code="number-of-classes",
            known=rows.selection.items,
        )
    return compared_by_head(rows, figure, "item", *pair)


def _as_claimed(request: Request) -> Request:
    """The request for the two classes that a claim of the run compares, if there is one."""
    for line in chain.from_iterable(claim.lines for claim in request.run.claims):
        classes = [name for quantity in line.quantities for name in quantity.cls]
        if len(classes) == len(set(classes)) == 2 and line.left.measure == "mass":
            choice, left = request.choice, line.left
            keys, queries = choice.keys or left.keys, choice.queries or left.queries
            choice = replace(choice, items=classes, keys=keys, queries=queries)
            how = request.options["normalise"] or left.scale
            return replace(request, choice=choice, options={**request.options, "normalise": how})
    return request


FIGURE = Figure(
    name="class-difference",
    shows="layers × heads: attention to one token class minus another; a dot marks q < 0.05",
    measures=["mass"],
    by=["model", "layer", "head"],
    shape=Matrix(
        panel="model",
        value="difference",
        rule=0.0,
        marked="significant",
        mark_means=f"q < {LEVEL}",
    ),
    numbers=_numbers,
    title="Attention to {of} against {minus}, head by head",
    what="Each cell is one head: {measure} of {of} minus {measure} of {minus}; a positive head "
    "attends more to {of}",
    quantity="{show}",
    needs="an experiment with `mass` among its measures and two token classes has them",
    options=SHOW | NORMALISE | SCALE,
    rank=0,  # by default it is drawn only if a claim of the run is about it
)
