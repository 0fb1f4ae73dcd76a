"""Scores of documents against the formula, token by token, and the ranks of the recipe."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attnscope.measures.rerank import RERANK
from attnscope.recipes.rerank import best, drawn_at_random, held_out, ndcg, ranks


def sums(received: Any, queries: int) -> Any:
    return SimpleNamespace(received=received, count=torch.tensor([float(queries)]))


def test_a_document_has_the_sum_of_its_tokens_without_outliers() -> None:
    draw = np.random.default_rng(0)
    base, empty = draw.random((1, 2, 12)), draw.random((1, 2, 12))
    empty[0, 1, 4] += 30  # far below the others in head 1 alone
    aligned = np.arange(12)[None].copy()
    aligned[0, 11] = -1  # a new token has no score
    keys = np.zeros((1, 12), bool)
    keys[0, 2:12] = True
    layer: Any = SimpleNamespace(
        sums=sums(torch.from_numpy(empty), 4),
        baseline=SimpleNamespace(sums=sums(torch.from_numpy(base), 2), aligned_position=aligned),
        keys=keys,
    )
    found = RERANK.numbers(layer)
    tokens = (base / 2 - empty / 4)[0, :, 2:11]
    least = tokens.mean(1) - 2 * tokens.std(1, ddof=1)
    expected = [sum(t for t in head if t > low) for head, low in zip(tokens, least, strict=True)]
    np.testing.assert_allclose(found.value[0], expected, rtol=1e-12)
    assert (tokens[1] <= least[1]).tolist() == [False, False, True, *[False] * 6]
    assert found.tokens[0].tolist() == [9]
    layer.keys = np.zeros((1, 12), bool)
    assert RERANK.numbers(layer).value.isnan().all()


def test_ranks_and_ndcg() -> None:
    scores = np.array([[[3.0, 1, 2], [1, 2, 3]], [[0, 0, 0], [5, 4, 1]]])  # 2 prompts, 2 heads
    relevant = np.array([0.0, 1.0])
    assert ranks(scores, relevant).tolist() == [[1, 3], [2, 2]]
    assert ndcg(np.array([1.0, 2, 3, 11])) == pytest.approx([1, 1 / np.log2(3), 0.5, 0])


def test_heads_are_judged_on_the_half_that_did_not_choose_them() -> None:
    """Noise in all heads but one: choosing and judging on the same prompts would find many."""
    draw = np.random.default_rng(0)
    scores, relevant = draw.normal(size=(60, 40, 10)), draw.integers(0, 10, 60).astype(float)
    assert len(best(scores, relevant)) == 8
    by_chance = (held_out(scores, relevant) == 1).mean()
    assert by_chance < 0.25
    heads = best(scores, relevant).astype(int)
    assert (ranks(scores[:, heads].sum(1), relevant) == 1).mean() > by_chance + 0.1
    scores[np.arange(60), 7, relevant.astype(int)] += 30
    assert 7 in best(scores, relevant)
    assert (held_out(scores, relevant) == 1).all()
    at_random = (drawn_at_random(scores, relevant) == 1).mean()
    assert 0.1 < at_random < 0.5  # 8 of 40 heads: the good one is in a fifth of the draws
