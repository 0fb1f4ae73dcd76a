"""Statistics beside a dense float64 computation, as tests/gpu does it on a GPU."""

import pytest
import torch

from dense_statistics import INTERVENTIONS, MASKS, combinations, worst


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("intervention", INTERVENTIONS)
def test_on_a_cpu(intervention: str, mask: str) -> None:
    queries = combinations(intervention, mask)
    if not queries:
        pytest.skip("not a combination")
    off = worst(intervention, mask, queries, "cpu", torch.float32, tokens=60, backend="streaming")
    assert off < 5e-5


@pytest.mark.parametrize(
    ("intervention", "mask", "queries"),
    [
        ("nested", "window", "mask"),
        pytest.param("knockout all", "none", "all", marks=pytest.mark.slow),
        pytest.param("knockout all", "none", "last", marks=pytest.mark.slow),
        pytest.param("knockout layers", "left", "all", marks=pytest.mark.slow),
    ],
)
def test_by_triton(intervention: str, mask: str, queries: str) -> None:
    """In Triton's interpreter, over several blocks of keys."""
    pytest.importorskip("triton")
    given = {"tokens": 80, "backend": "triton"}
    assert worst(intervention, mask, [queries], "cpu", torch.float16, **given) < 2e-3
