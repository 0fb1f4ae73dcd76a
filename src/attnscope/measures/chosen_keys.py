"""Weight on one key of every query: the token before it, and the one that came after its like."""

import numpy as np
from numpy.typing import NDArray

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import Measure, Numbers


def induction_keys(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B, K]: for every position the one after the last earlier occurrence of its token; -1 where
    there is none. Tokens below 0 are padding, and like nothing."""
    keys = np.full(tokens.shape, -1, dtype=np.int64)
    for row, found in zip(tokens, keys, strict=True):
        order = np.argsort(row, kind="stable")
        again = (row[order[1:]] == row[order[:-1]]) & (row[order[1:]] >= 0)
        found[order[1:][again]] = order[:-1][again] + 1
    return keys


def _mean(layer: Layer, key_of: Tensor) -> Numbers:
    """Over the queries that have such a key, and how many those are."""
    weight = layer.single.read("weight", key_of)
    return Numbers(weight.nanmean(-1), tokens=(~weight.isnan()).sum(-1))


def previous_key_of(layer: Layer) -> Tensor:
    """int64 [B, Q]: the token before each query; -1 for the first."""
    where = layer.single.positions
    first = layer.sums.first.to(where.device)[:, None]
    return (where - 1).where(where > first, -1)


def induction_key_of(layer: Layer) -> Tensor:
    """int64 [B, Q]: the token that followed the last one like the query's; -1 for none."""
    where = layer.single.positions
    keys = where.new_tensor(induction_keys(layer.of_tokens))
    return keys.gather(1, where.clamp(min=0)).where(where >= 0, -1)


def _previous(layer: Layer) -> Numbers:
    return _mean(layer, previous_key_of(layer))


def _induction(layer: Layer) -> Numbers:
    return _mean(layer, induction_key_of(layer))


PREVIOUS_TOKEN = Measure(
    name="previous_token",
    about="mean over the queries of their attention to the token before them",
    level="head",
    needs=frozenset({"sums", "rows"}),
    function=_previous,
)

INDUCTION = Measure(
    name="induction",
    about="mean over the queries whose token came before of their attention to what followed it, "
    "the last time",
    level="head",
    needs=frozenset({"sums", "rows"}),
    function=_induction,
)
