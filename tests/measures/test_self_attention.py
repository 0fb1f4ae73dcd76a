"""Log self-attention and the eigenvalues of the Laplacian, against a matrix."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attnscope.measures.self_attention import LAPLACIAN, LOG_SELF_MASS, SMALLEST


def layer_of(A: torch.Tensor, queries: list[int]) -> Any:
    """A layer of one text with these weights, where these queries count; -1 is padding."""
    real = [q for q in queries if q >= 0]
    rows = A[:, :, real]
    own = torch.stack([A[:, :, q, q] if q >= 0 else A[:, :, 0, 0] * np.nan for q in queries], -1)

    def weight(keys: torch.Tensor) -> torch.Tensor:
        assert keys.tolist() == [queries]
        return own

    seen = torch.tensor([[sum(q >= k for q in real) for k in range(A.shape[-1])]])
    return SimpleNamespace(
        sums=SimpleNamespace(
            received=rows.sum(2), visibility=lambda name: {"eligible": seen}[name]
        ),
        per_query=SimpleNamespace(positions=torch.tensor([queries]), weight=weight),
    )


def attention(n: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 2, n, n, generator=draw, dtype=torch.float64)
    return scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.mark.parametrize("first", [0, 5])
def test_both_are_those_of_the_matrix(first: int) -> None:
    n = 18
    A = attention(n)
    layer = layer_of(A, [*range(first, n), -1])
    matrix = A[0].numpy()
    expected = np.log(np.diagonal(matrix, axis1=1, axis2=2)[:, first:]).mean(1)
    np.testing.assert_allclose(LOG_SELF_MASS.numbers(layer).value[0], expected, rtol=1e-12)
    # The Laplacian itself: degrees on the diagonal, minus attention; numpy finds its eigenvalues.
    part = matrix[:, first:, first:]
    degrees = part.sum(1) / np.arange(n - first, 0, -1)
    for head, degree in enumerate(degrees):
        values = np.sort(np.linalg.eigvals(np.diag(degree) - part[head]).real)[::-1]
        found = LAPLACIAN.numbers(layer).value[0, head]
        np.testing.assert_allclose(found, values[:10], atol=1e-9)


def test_a_short_text_has_fewer_eigenvalues() -> None:
    found = LAPLACIAN.numbers(layer_of(attention(4), [0, 1, 2, 3, -1])).value
    assert found.isnan().tolist() == [[[False] * 4 + [True] * 6] * 2]


def test_a_weight_of_0_has_a_finite_logarithm() -> None:
    A = attention(3)
    A[0, 0, 2, 2] = 0
    found = LOG_SELF_MASS.numbers(layer_of(A, [2])).value
    assert found[0, 0].item() == pytest.approx(np.log(SMALLEST))
