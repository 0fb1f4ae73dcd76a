"""Mass by distance: on the first tokens (attention sinks), on recent tokens, and on the rest."""

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import SHARE, Measure

FIRST, RECENT = 4, 64


def _read(layer: Layer) -> Tensor:
    each: Tensor = layer.per_query.read("by_distance", FIRST, RECENT)
    return each.nanmean(2)


BY_DISTANCE = Measure(
    name="by_distance",
    range=SHARE,
    description="attention to the first, the recent and all other tokens, mean over queries",
    level="head",
    needs=frozenset({"sums", "rows"}),
    columns={
        "on_first": f"attention to the first {FIRST} tokens of the text, mean over queries",
        "on_recent": f"attention to the last {RECENT} tokens up to the query, except those",
        "on_rest": "attention to all other tokens",
    },
    function=_read,
)
