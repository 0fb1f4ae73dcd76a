"""Value similarity, against all pairs by hand."""

import numpy as np
import pytest
import torch

from attnscope.measures import values as module
from attnscope.measures.values import value_similarity


def by_hand(vectors: np.ndarray) -> float:
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = units @ units.T
    return float(cosines[np.triu_indices(len(units), 1)].mean())


@pytest.mark.parametrize("chunk", [4096, 5])
def test_all_pairs(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    values = torch.randn(2, 3, 17, 8) + 0.5
    span = torch.rand(2, 17) < 0.6
    found = value_similarity(values, span)
    for b in range(2):
        for h in range(3):
            expected = by_hand(values[b, h, span[b]].double().numpy())
            assert found[b, h].item() == pytest.approx(expected, abs=1e-9)


def test_the_same_vector_over_and_over_is_1_at_any_length() -> None:
    vector = torch.randn(1, 1, 1, 16)
    scales = torch.rand(1, 1, 50, 1) + 0.1
    span = torch.ones(1, 50, dtype=torch.bool)
    assert value_similarity(vector * scales, span).item() == pytest.approx(1, abs=1e-6)


def test_opposites_cancel() -> None:
    vector = torch.randn(16).double()
    values = torch.stack([vector, -vector])[None, None]
    assert value_similarity(values, torch.ones(1, 2).bool()).item() == pytest.approx(-1, abs=1e-12)


def test_one_vector_has_no_pair_and_a_zero_no_direction() -> None:
    values = torch.zeros(2, 1, 4, 3)
    values[0, 0, 0] = values[1, 0, 0] = values[1, 0, 1] = 1.0
    found = value_similarity(values, torch.ones(2, 4, dtype=torch.bool))
    assert found[0, 0].isnan()
    assert found[1, 0].item() == pytest.approx(1, abs=1e-12)
