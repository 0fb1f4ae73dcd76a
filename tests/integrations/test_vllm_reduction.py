"""The offsets in place of log-sum-exps, compared with scores computed one by one."""

import pytest
import torch

from attnscope.integrations.vllm.reduction import with_offsets
from attnscope.kernels import KernelRows

STARTS = torch.tensor([[0, 2, 3, 5]] * 2, dtype=torch.int32)
OWN = torch.tensor([[4, 5, 6, 7]] * 2, dtype=torch.int32)


@pytest.mark.parametrize("scale", [0.5, -0.5])
@pytest.mark.parametrize("causal", [True, False])
def test_an_offset_is_the_score_of_the_first_or_the_own_key(causal: bool, scale: float) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 4, 8), torch.randn(2, 2, 8, 8)
    rows = KernelRows(q=q, k=k, scale=scale, causal=True, diagonal_offset=4)
    if not causal:
        rows = KernelRows(q=q, k=k, scale=scale, start=STARTS, stop=OWN + 1, self_key=OWN)
    offsets = with_offsets(rows).lse
    assert offsets is not None
    x = torch.einsum("bhmd,bhkd->bhmk", q, k.repeat_interleave(2, 1)) * scale
    for m in range(4):
        first = 0 if causal else int(STARTS[0, m])
        expected = torch.maximum(x[:, :, m, first], x[:, :, m, int(OWN[0, m])])
        torch.testing.assert_close(offsets[:, :, m], expected)
