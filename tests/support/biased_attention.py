"""Dense float64 attention with a bias added to its scores, for tests of interventions.

It shares no code with the package on purpose: it is a function in the registry of transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "biased"
_added: dict[int, Tensor] = {}
_weights: dict[int, Tensor] = {}


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1).double() for t in (k, v))
    scale = options.get("scaling")
    scores = q.double() @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if options.get("softcap") is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if mask is not None:
        scores = scores + mask[..., : k.shape[2]]
    layer = module.layer_idx
    if layer in _added:
        scores = scores + _added[layer].double()
    if options.get("s_aux") is not None:
        sink = options["s_aux"].double()[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    _weights[layer] = weights
    return (weights @ v).to(q.dtype).transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def adding(bias: dict[int, Tensor]) -> Iterator[dict[int, Tensor]]:
    """Add a bias [B, H, Q, K] to the scores of these layers; yields the weights of all layers."""
    _added.update(bias)
    try:
        yield _weights
    finally:
        _added.clear()
