"""Weight on one key of every query: the previous, the duplicate or the induction token.

The duplicate token is the latest earlier occurrence of the query's token; the induction token
follows it.
"""

import numpy as np
from numpy.typing import NDArray

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import SHARE, Measure, Numbers


def earlier_keys(tokens: NDArray[np.int64], *, after: int) -> NDArray[np.int64]:
    """[B, K]: for every position, that of the latest earlier occurrence of its token.

    `after=1` gives the real token after that occurrence. -1 if there is none. Tokens below 0 are
    padding and are skipped.
    """
    keys = np.full(tokens.shape, -1, dtype=np.int64)
    for row, out in zip(tokens, keys, strict=True):
        real = np.flatnonzero(row >= 0)
        order = np.argsort(row[real], kind="stable")
        again = row[real][order[1:]] == row[real][order[:-1]]
        out[real[order[1:][again]]] = real[order[:-1][again] + after]
    return keys


def previous_keys(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B, K]: for every position, that of the previous real token; -1 if there is none."""
    order = np.where(tokens >= 0, np.arange(tokens.shape[1]), -1)
    before = np.maximum.accumulate(order, axis=1)
    return np.pad(before[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def _mean(layer: Layer, key_of: Tensor) -> Numbers:
    """Mean weight over the queries that have such a key, and the number of these queries."""
    weight = layer.per_query.weight(key_of)
    return Numbers(weight.nanmean(-1), tokens=(~weight.isnan()).sum(-1))


def previous_key_of(layer: Layer) -> Tensor:
    """int64 [B, Q]: the token before each query; -1 for the first."""
    where = layer.per_query.positions
    if layer.tokens is not None:  # tokens show the gaps of the attention mask
        return _at(where, previous_keys(layer.tokens))
    first = layer.sums.first_token.to(where.device)[:, None]
    return (where - 1).where(where > first, -1)


def induction_key_of(layer: Layer) -> Tensor:
    """int64 [B, Q]: the position of each query's induction token; -1 for none."""
    return _at(layer.per_query.positions, earlier_keys(layer.token_ids, after=1))


def _at(where: Tensor, keys: NDArray[np.int64]) -> Tensor:
    """int64 [B, Q]: the keys at the positions of queries; -1 if there is no query."""
    return where.new_tensor(keys).gather(1, where.clamp(min=0)).where(where >= 0, -1)


def _previous(layer: Layer) -> Numbers:
    return _mean(layer, previous_key_of(layer))


def _duplicate(layer: Layer) -> Numbers:
    return _mean(layer, _at(layer.per_query.positions, earlier_keys(layer.token_ids, after=0)))


def _induction(layer: Layer) -> Numbers:
    return _mean(layer, induction_key_of(layer))


PREVIOUS_TOKEN = Measure(
    name="previous_token",
    range=SHARE,
    description="attention to the previous token, mean over queries",
    level="head",
    needs=frozenset({"sums", "rows"}),
    function=_previous,
)

DUPLICATE_TOKEN = Measure(
    name="duplicate_token",
    range=SHARE,
    description="attention to the latest earlier occurrence of the query's token, mean over the "
    "queries whose token occurred earlier",
    level="head",
    needs=frozenset({"sums", "rows"}),
    function=_duplicate,
)

INDUCTION = Measure(
    name="induction",
    range=SHARE,
    description="attention to the token after the latest earlier occurrence of the query's token, "
    "mean over the queries whose token occurred earlier",
    level="head",
    needs=frozenset({"sums", "rows"}),
    function=_induction,
)
