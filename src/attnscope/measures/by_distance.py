"""Mass by distance: on the first tokens, where sinks are, on the recent ones, and on the rest."""

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import SHARE, Measure

FIRST, RECENT = 4, 64


def _read(layer: Layer) -> Tensor:
    each: Tensor = layer.single.read("by_distance", FIRST, RECENT)
    return each.nanmean(2)


BY_DISTANCE = Measure(
    name="by_distance",
    range=SHARE,
    about="mean over the queries of their attention to what lies near, far, and at the beginning",
    level="head",
    needs=frozenset({"sums", "rows"}),
    columns={
        "on_first": f"on the first {FIRST} tokens of the text",
        "on_recent": f"on the last {RECENT} tokens up to the query's own, less those",
        "on_rest": "on all others",
    },
    function=_read,
)
