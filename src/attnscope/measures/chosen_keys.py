"""Weight on one key of every query: the token before it, and the one that came after its like."""

import numpy as np
from numpy.typing import NDArray

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import SHARE, Measure, Numbers


def induction_keys(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B, K]: for every position the one after the last earlier occurrence of its token; -1 where
    there is none. Tokens below 0 are padding: they occur nowhere, and come after nothing."""
    keys = np.full(tokens.shape, -1, dtype=np.int64)
    for row, found in zip(tokens, keys, strict=True):
        real = np.flatnonzero(row >= 0)
        order = np.argsort(row[real], kind="stable")
        again = row[real][order[1:]] == row[real][order[:-1]]
        found[real[order[1:][again]]] = real[order[:-1][again] + 1]
    return keys


def previous_keys(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B, K]: for every position the one of the real token before it; -1 where there is none."""
    order = np.where(tokens >= 0, np.arange(tokens.shape[1]), -1)
    before = np.maximum.accumulate(order, axis=1)
    return np.pad(before[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def _mean(layer: Layer, key_of: Tensor) -> Numbers:
    """Over the queries that have such a key, and how many those are."""
    weight = layer.single.read("weight", key_of)
    return Numbers(weight.nanmean(-1), tokens=(~weight.isnan()).sum(-1))


def previous_key_of(layer: Layer) -> Tensor:
    """int64 [B, Q]: the token before each query; -1 for the first."""
    where = layer.single.positions
    if layer.tokens is not None:  # which say where the mask has holes
        return _at(where, previous_keys(layer.tokens))
    first = layer.sums.first.to(where.device)[:, None]
    return (where - 1).where(where > first, -1)


def induction_key_of(layer: Layer) -> Tensor:
    """int64 [B, Q]: the token that followed the last one like the query's; -1 for none."""
    return _at(layer.single.positions, induction_keys(layer.of_tokens))


def _at(where: Tensor, keys: NDArray[np.int64]) -> Tensor:
    """int64 [B, Q]: the keys of the positions of queries; -1 where there is no query."""
    return where.new_tensor(keys).gather(1, where.clamp(min=0)).where(where >= 0, -1)


def _previous(layer: Layer) -> Numbers:
    return _mean(layer, previous_key_of(layer))


def _induction(layer: Layer) -> Numbers:
    return _mean(layer, induction_key_of(layer))


PREVIOUS_TOKEN = Measure(
    name="previous_token",
    range=SHARE,
    about="mean over the queries of their attention to the token before them",
    level="head",
    needs=frozenset({"sums", "rows"}),
    function=_previous,
)

INDUCTION = Measure(
    name="induction",
    range=SHARE,
    about="mean over the queries whose token came before of their attention to what followed it, "
    "the last time",
    level="head",
    needs=frozenset({"sums", "rows"}),
    function=_induction,
)
