"""Calls the eager attention of a family: for weights, and to check that attnscope understands it.

Eager attention takes an additive mask and returns the weights. It may do more than its arguments
state, so one row of every module is compared with attnscope's own result.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attnscope.errors import ModelError
from attnscope.interception import masks
from attnscope.interception.arguments import parameters
from attnscope.interception.attention_request import AttentionRequest
from attnscope.interception.biases import additive_mask, total_bias
from attnscope.kernels import AttentionCall
from attnscope.kernels.attend import attend
from attnscope.kernels.autocast import without_autocast

# Modules whose eager attention was compared with attnscope's result and matched → the function.
_verified: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()


def is_verified(implementation: str, module: nn.Module, eager: Callable[..., Any]) -> bool:
    """Whether the model's attention needs no comparison: it is not eager, or was compared."""
    return implementation != "eager" or _verified.get(module) is eager


def call_dense(request: AttentionRequest, call: AttentionCall) -> tuple[Any, Tensor]:
    """What the attention function returns, and the weights [B, H, Q, K]."""
    changed = call is not request.call
    if request.unsupported and (changed or request.implementation not in ("eager", "sdpa")):
        module, names = type(request.module).__name__, ", ".join(request.unsupported)
        instead = (
            "it cannot change the call; choose other layers"
            if changed
            else "it cannot measure the call; load the model with attn_implementation='eager'"
        )
        raise ModelError(
            f"{module} passes {names} to its attention function; attnscope does not support this, "
            f"so {instead}",
            code="unsupported-argument",
            module=module,
            arguments=request.unsupported,
        )
    if changed:
        out, weights = _call_eager(
            request,
            call.q,
            call.k,
            call.v,
            additive_mask(call, request.geometry),
            scaling=call.scale,
            softcap=call.softcap,
            s_aux=call.sinks,
            position_bias=total_bias(call, request.geometry),
        )
        output = out, weights if request.implementation == "eager" else None
    else:
        output = request.call_original()
        weights = output[1] if request.implementation == "eager" else _weights(request)
    return output, _apply_sink(request, call, weights.detach()[..., : call.k.shape[2]])


@torch.no_grad()
@without_autocast
def _weights(request: AttentionRequest) -> Tensor:
    """The weights of the unchanged call."""
    q, k, v, mask, call = request.q, request.k, request.v, request.mask, request.call
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        k, v, mask = call.k, call.v, additive_mask(call, request.geometry)
    else:
        mask = request.rounded_bias(mask)
    if request.rounding is not None:  # autocast rounds the tensors of sdpa, not its scores
        q, k, v = (tensor.float() for tensor in (q, k, v))
    weights: Tensor = _call_eager(request, q, k, v, mask, scaling=call.scale)[1]
    return weights


def _call_eager(
    request: AttentionRequest, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any
) -> Any:
    options = request.options | options
    bias = options.get("position_bias")
    if bias is not None and "position_bias" not in parameters(request.eager):
        mask = mask + bias
    return request.eager(request.module, q, k, v, mask, **options)


def _apply_sink(request: AttentionRequest, call: AttentionCall, weights: Tensor) -> Tensor:
    """The weights of a layer with learned sinks.

    Some families scale the output instead and return weights without the sink.
    """
    if call.sinks is None or not bool((weights.sum(-1) - 1).abs().max() < 1e-6):
        return weights
    _, lse = attend(replace(call, sinks=None))
    if lse is None or call.bias is not None or request.geometry.gap_mask is not None:
        raise ModelError(
            f"{type(request.module).__name__} returns its weights without its learned sinks; "
            "load the model with attn_implementation='sdpa'",
            code="weights-without-sinks",
            module=type(request.module).__name__,
        )
    return weights * torch.sigmoid(lse - call.sinks.float()[:, None])[..., None]


def check_can_change(request: AttentionRequest) -> None:
    """Raise an error if the family's eager attention does not match its arguments.

    Such attention can be measured by calling it, but not changed.
    """
    if (
        is_verified(request.implementation, request.module, request.eager)
        or request.needs_weights(request.call)
        or eager_matches(request, attend(request.call)[0])
    ):
        return
    raise ModelError(
        f"the eager attention of {type(request.module).__name__} does not match its arguments, so "
        "attnscope can measure it but not change it",
        code="intervention-not-applied",
        module=type(request.module).__name__,
    )


@torch.no_grad()
def eager_matches(request: AttentionRequest, out: Tensor) -> bool:
    """Whether the family's eager attention gives our output for the last row.

    Checked once for every module, because eager attention may do more than its arguments.
    """
    call, visible = request.call, request.call.visible
    if is_verified(request.implementation, request.module, request.eager):
        return True
    sees_a_key = visible.stop[:, -1] > visible.start[:, -1]
    if request.dropout or not bool(sees_a_key.any()):
        return True
    if request.mask is None or isinstance(request.mask, masks.MaskTensor):
        mask = additive_mask(call, request.geometry, last=True)
    else:
        mask = request.mask[:, :, -1:, : call.k.shape[2]]
    options = {"scaling": call.scale}
    if (bias := request.options.get("position_bias")) is not None:
        options["position_bias"] = bias[:, :, -1:, : call.k.shape[2]]
    last = _call_eager(request, request.q[:, :, -1:], call.k, call.v, mask, **options)[0][:, 0]
    deviation = (last - out[:, :, -1])[sees_a_key].abs().max()
    tolerance = 1e-3 if out.dtype in (torch.float32, torch.float64) else 3e-2
    if not bool(deviation <= tolerance * last[sees_a_key].abs().max().clamp(min=1)):
        return False
    _verified[request.module] = request.eager
    return True
