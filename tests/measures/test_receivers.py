"""Receiver heads against a literal sentence × sentence matrix."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attnscope.measures import receivers
from attnscope.measures.receivers import RECEIVERS, kurtosis, vertical_scores
from attnscope.tokens.sentences import sentence_ends, sentences_of_tokens


def attention(heads: int, n: int) -> torch.Tensor:
    """Random causal attention of one text, [1, heads, n, n]."""
    draw = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(1, heads, n, n, generator=draw, dtype=torch.float64)
    hidden = torch.ones(n, n).triu(1).bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def layer_of(A: torch.Tensor, sentences: list[int], keys: Any = None) -> Any:
    """A layer with these weights, and the last query left out of the counted ones twice over."""
    n = A.shape[-1]
    positions = torch.tensor([[*range(n), -1]])  # padding at the end, as in a batch
    rows = torch.cat([A, torch.full((*A.shape[:2], 1, n), torch.nan)], 2)
    return SimpleNamespace(
        sums=SimpleNamespace(received=A.sum(2)),
        keys=np.ones((1, n), bool) if keys is None else keys,
        sentence_numbers=np.array([sentences]),
        per_query=SimpleNamespace(
            positions=positions, mass=lambda shares, n: rows @ shares[:, None]
        ),
    )


def literal(A: Any, sentences: list[int], keys: Any) -> Any:
    """[heads, sentences]: the mean of each block, then of each column from 4 below on."""
    names = [s for s in dict.fromkeys(sentences) if s >= 0]
    blocks = [[k for k, s in enumerate(sentences) if s == name and keys[k]] for name in names]
    blocks = [block for block in blocks if block]
    found = np.full((A.shape[1], len(blocks)), np.nan)
    for j, of_keys in enumerate(blocks):
        means = [A[0][:, i][:, :, of_keys].mean((1, 2)) for i in blocks[j + 4 :]]
        if means:
            found[:, j] = np.mean(means, 0)
    return found


LENGTHS = [3, 1, 4, 2, 2, 5, 1, 3, 2, 4]
SENTENCES = [-1, *(n for n, length in enumerate(LENGTHS) for _ in range(length))]


@pytest.mark.parametrize("together", [64, 3])
@pytest.mark.parametrize("left_out", [[], [0, 1, 2, 3, 8, 9]])
def test_scores_are_those_of_the_matrix_of_sentences(
    together: int, left_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receivers, "TOGETHER", together)
    A = attention(2, len(SENTENCES))
    keys = ~np.isin(np.arange(len(SENTENCES)), left_out)
    found = vertical_scores(layer_of(A, SENTENCES, keys[None]))[0].numpy()
    expected = literal(A.numpy(), SENTENCES, keys)
    assert np.isfinite(expected).any()
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_head_with_one_receiver_has_a_large_kurtosis() -> None:
    n = len(SENTENCES)
    A = attention(2, n)
    A[0, 1, :, 5] += torch.tensor([0.0] * 12 + [20.0] * (n - 12))  # a token of the third sentence
    A = A / A.sum(-1, keepdim=True)
    found = RECEIVERS.numbers(layer_of(A, SENTENCES)).value[0]
    assert found[1, 0] > found[0, 0]
    assert found[1, 1] == SENTENCES[5]
    scores = literal(A.numpy(), SENTENCES, np.ones(n, bool))[1, :-4]
    off = scores - scores.mean()
    assert found[1, 0].item() == pytest.approx((off**4).mean() / (off**2).mean() ** 2 - 3)


def test_too_few_sentences_have_no_kurtosis() -> None:
    A = attention(1, 14)
    short = [n // 2 for n in range(14)]  # 7 sentences: 3 have a score
    assert RECEIVERS.numbers(layer_of(A, short)).value.isnan().all()
    none = RECEIVERS.numbers(layer_of(A, [-1] * 14)).value
    assert none.shape == (1, 1, 2)
    assert none.isnan().all()
    assert kurtosis(torch.tensor([0.1, 0.1, 0.1, 0.1 + 1e-9], dtype=torch.float64)).isnan()


def test_sentences_end_at_marks_and_empty_lines() -> None:
    text = '1. The first one. Is it (so?) "Yes, it is!" A list\n\nof things, 3.5 of them.\n'
    ends = sentence_ends(text)
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert pieces == [
        "1. The first one. ",
        'Is it (so?) "Yes, it is!" '[:12],
        '"Yes, it is!" ',
        "A list\n\nof things, 3.5 of them.\n",
    ]
    assert sentence_ends("") == []
    assert sentence_ends("no end") == [6]


def test_a_token_belongs_to_the_sentence_of_its_first_letter() -> None:
    text = "One is here. Two is there."
    offsets = np.array([[0, 0], [0, 3], [3, 12], [12, 16], [12, 13], [16, 26]])
    assert sentences_of_tokens(text, offsets).tolist() == [-1, 0, 0, 1, 0, 1]
