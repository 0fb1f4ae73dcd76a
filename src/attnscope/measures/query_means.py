"""Means over queries of numbers of their attention rows: Rényi entropy, mass by distance, largest
weight."""

from attnscope.measures.measure import POSITIVE, SHARE, Measure

FIRST, RECENT, NEAR = 4, 64, 8


RENYI2 = Measure(
    name="renyi2",
    range=POSITIVE,
    description="Rényi entropy of order 2, -ln sum_j A² in nats, mean over queries",
    level="head",
    needs=frozenset({"sums", "rows"}),
    function=lambda layer: layer.per_query.entropy(order=2).nanmean(-1),
)

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
    function=lambda layer: layer.per_query.by_distance(FIRST, RECENT).nanmean(2),
)

NEARBY = Measure(
    name="nearby",
    range=SHARE,
    description=f"attention to the last {NEAR} tokens up to the query, except the first token of "
    "the text, mean over queries",
    level="head",
    needs=frozenset({"sums", "rows"}),
    function=lambda layer: layer.per_query.by_distance(1, NEAR)[..., 1].nanmean(2),
)

LARGEST = Measure(
    name="largest",
    range=SHARE,
    description="largest attention weight of a query, mean over queries",
    level="head",
    needs=frozenset({"sums", "rows"}),
    columns={"largest_weight": "largest weight of a query, mean over queries"},
    function=lambda layer: layer.per_query.largest()[1].nanmean(-1),
)
