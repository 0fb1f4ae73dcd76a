"""The paged Triton kernel in Triton's interpreter, compared with the definition."""

from typing import Any

import pytest
import torch

from attnscope.kernels import triton_paged
from made_pages import compare, made_pages

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small pages": {"page": 8},
    "large pages": {"page": 128},
    "pages of a size that is no power of two": {"page": 24},
    "keys by dimension": {"order": "sizes"},
    "size that is no power of two": {"size": 20},
    "one head for each key": {"heads": 2},
    "window": {"window": 7},
    "long window": {"window": 50},
    "soft-cap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])},
    "all": {"window": 20, "softcap": 5.0, "sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])},
}
REQUESTS = {
    "prefill": [(0, 70), (0, 1), (0, 33)],
    "decode": [(5, 1), (99, 1), (0, 1), (64, 1)],
    "mixed": [(0, 40), (63, 9), (17, 1), (31, 33)],
}


@pytest.mark.parametrize(
    "requests",
    [
        "mixed",  # parts of prompts and decode steps
        pytest.param("prefill", marks=pytest.mark.slow),
        pytest.param("decode", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", list(CASES))
def test_sums_of_pages_made_by_hand(case: str, requests: str) -> None:
    paged, dense = made_pages(REQUESTS[requests], **CASES[case])
    assert triton_paged.supports(paged.q, paged.k)
    compare(triton_paged.reduce(paged), dense, 1e-4)
