"""Models that bypass the attention interface: take each layer's matrix where it is made, and
reduce it before the next layer makes its own.

The model runs as it always does. Where its layers compute weights, they are taken from what the
attention module returns; where they call torch's sdpa, the call is seen and its weights computed
beside it. One layer's n × n matrix at a time is the price, so this is for a few thousand tokens.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnscope.capture import masks, sites
from attnscope.capture.frame import Frame, Selection
from attnscope.capture.totals import LayerTotals
from attnscope.errors import ConservationError, ModelError
from attnscope.kernels import reference

__all__ = ["install", "reduce"]

Measure = Callable[[nn.Module, Frame, Tensor], None]


class _SeeSdpa(TorchFunctionMode):
    """While active, computes the weights of every sdpa call beside the call itself."""

    A: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            with torch.no_grad():
                self.A = _weights(*args, **kwargs)
        return func(*args, **kwargs)


def _weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A [B, H, Q, K] of one sdpa call; the names are torch's."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query.float() * scale) @ key.float().transpose(-1, -2)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, -1).nan_to_num(0.0)


def install(found: sites.Sites, measure: Measure, undo: ExitStack) -> None:
    """Take the weights each attention module makes."""
    padding: list[Tensor | None] = [None]
    seeing = _SeeSdpa()

    def remember(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask = sites.argument(module, "attention_mask", args, kwargs)
        padding[0] = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def look(module: nn.Module, args: Any) -> None:
        seeing.A = None
        seeing.__enter__()  # type: ignore[no-untyped-call]

    def look_away(module: nn.Module, args: Any, output: Any) -> None:
        seeing.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def take(module: nn.Module, args: Any, output: Any) -> Any:
        A = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        A, seeing.A = A if isinstance(A, Tensor) else seeing.A, None
        if A is None or A.ndim != 4:
            raise ModelError(
                f"{type(module).__name__} made no attention weights that attnscope can see; if it "
                "was loaded with a flash implementation, load it with attn_implementation='eager'"
            )
        measure(module, _frame(A.detach(), padding[0]), A.detach())
        return (output[0], None, *output[2:]) if isinstance(output, tuple) else output

    undo.callback(found.base.register_forward_pre_hook(remember, with_kwargs=True).remove)
    for module in found.modules:
        undo.callback(module.register_forward_pre_hook(look).remove)
        undo.callback(module.register_forward_hook(look_away, always_call=True).remove)
        undo.callback(module.register_forward_hook(take).remove)


def _frame(A: Tensor, padding: Tensor | None) -> Frame:
    """Who saw whom, read off the weights: a key is visible where any head looked at it at all."""
    Q, K = A.shape[2:]
    real = None
    if padding is not None and not bool(padding.all()):
        real = padding[:, :K].bool().cpu()
    seen = (A > 0).any(1)
    if real is not None:  # a padding query sees nothing, whatever eager attention made of its row
        seen = seen & real[:, K - Q :, None].to(A.device) & real[:, None].to(A.device)
    order = torch.arange(K, device=A.device)
    start = torch.where(seen, order, K).amin(-1).cpu()
    stop = torch.where(seen, order + 1, 0).amax(-1).cpu()
    return masks.build_frame(start, torch.maximum(stop, start), real, K - Q, 0, K, A.device)


def reduce(
    A: Tensor,
    frame: Frame,
    selection: Selection,
    layer: LayerTotals,
    groups: int,
    top: int,
    *,
    has_sinks: bool,
) -> None:
    """Add one layer's matrix to its totals. Samples are not drawn: the matrix is there anyway."""
    counted = selection.rows(selection.counted_queries()).to(A.device)
    own = selection.rows(frame.own().expand(frame.batch, -1)).to(A.device)
    if selection.whole.index is not None:
        index = selection.whole.index[:, None, :, None]
        A = A.gather(2, index.expand(-1, A.shape[1], -1, A.shape[3]))
    A = A.float()
    if frame.real_keys is not None:
        A = A * frame.real_keys[:, None, None].to(A.device)
    rowsum = A.sum(-1)
    off = ((rowsum - 1).abs() * counted[:, None]).max().item()
    if has_sinks:
        layer.add_sink(1 - rowsum, selection)
    elif not off <= 2e-2:
        raise ConservationError(
            f"a row of attention adds up to 1 only within {off:.3g}; in training, dropout changes "
            "the weights: call model.eval() first"
        )
    group = None if selection.group is None else selection.rows(selection.group).to(A.device)
    layer.add(reference.totals(A, own, rowsum.log(), counted.float(), None, group, groups), 0)
    layer.selections.append(selection)
    if top:
        weights, keys = A.topk(min(top, A.shape[-1]))
        keys = keys.where(weights > 0, -1)
        layer.top.append((own.where(counted, -1), keys, weights))
