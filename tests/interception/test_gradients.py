"""Training a part of a watched model."""

from typing import Any

import pytest
import torch

import attnscope
from attnscope.kernels import AttentionCall
from attnscope.kernels import attend as attention
from families import build


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
def test_one_trained_projection_in_a_padded_pass(
    trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA, masked attention with gradients gives no log-sum-exp; here the CPU's gives none
    either. Layers below are frozen, so queries, keys and values differ in what they need."""
    plain = attention._by_blocks

    def as_on_cuda(call: AttentionCall, dropout: float = 0.0) -> Any:
        out, lse = plain(call, dropout)
        learns = any(tensor.requires_grad for tensor in (call.q, call.k, call.v))
        return out, None if learns else lse

    monkeypatch.setattr(attention, "_by_blocks", as_on_cuda)
    model = build("qwen2").requires_grad_(False)
    attn: Any = model.model.layers[1].self_attn
    getattr(attn, trained).weight.requires_grad_(True)
    ids, real = torch.randint(5, 97, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    real[1, :4] = 0
    with torch.no_grad(), attnscope.watch(model) as frozen:
        model(ids, attention_mask=real)
    with attnscope.watch(model) as scope:
        model(ids, attention_mask=real).logits.sum().backward()
    assert getattr(attn, trained).weight.grad is not None
    for layer in scope.layers:
        torch.testing.assert_close(scope.received(layer), frozen.received(layer), rtol=0, atol=2e-5)
