"""The paged Triton kernel on a real GPU, with pages made by hand."""

from typing import Any

import pytest
import torch

from attnscope.kernels import triton_paged
from made_pages import compare, made_pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages of 64": {"page": 64},
    "pages of 48": {"page": 48},
    "keys by dimension": {"order": "sizes", "page": 32},
    "size 64": {"size": 64},
    "size 80": {"size": 80},
    "size 256": {"size": 256},
    "window": {"window": 100},
    "soft-cap": {"softcap": 20.0},
    "sinks": {"sinks": torch.linspace(-2, 3, 8)},
    "all": {"window": 300, "softcap": 20.0, "sinks": torch.linspace(-2, 3, 8)},
}
REQUESTS = {
    "prefill": [(0, 700), (0, 1), (0, 333)],
    "chunk": [(1500, 513), (0, 100)],
    "decode": [(5, 1), (999, 16), (0, 1), (2047, 7), (640, 64)],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("requests", list(REQUESTS))
@pytest.mark.parametrize("case", list(CASES))
def test_sums_of_pages_made_by_hand(case: str, requests: str, dtype: torch.dtype) -> None:
    options = {"heads": 8, "kv_heads": 2, "size": 128, "device": "cuda", **CASES[case]}
    paged, dense = made_pages(REQUESTS[requests], dtype=dtype, **options)
    assert triton_paged.supports(paged.q, paged.k)
    compare(triton_paged.reduce(paged), dense, 1e-3)
