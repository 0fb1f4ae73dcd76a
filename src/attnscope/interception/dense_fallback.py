"""Reads the full attention weights of a layer, for modules that do not use the interface.

Such modules run unchanged, and hooks read the weights of their softmax. A matrix is reduced before
the next layer computes its own, so memory limits this to a few thousand tokens. A module that
calls torch's sdpa needs no matrix: its call is handled like one of the attention interface.
"""

import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from attnscope.errors import ModelError
from attnscope.interception import masks
from attnscope.interception.arguments import argument
from attnscope.interception.coverage import PRODUCTS, modules_around, name_in
from attnscope.interception.families import CHANNELS_FIRST
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.geometry import Geometry
from attnscope.interception.hooks import current

OnWeights = Callable[[nn.Module, Any, Any, Tensor, Tensor, Tensor | None], None]
"""(module, listeners, mask, weights [B, H, Q, K], keys that were not hidden [B, Q, K], largest
score of each query [B, H, Q] if it is known)."""
Attend = Callable[..., Tensor]
"""(module, arguments of torch's sdpa) → output of sdpa."""

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_EXACT = (torch.float32, torch.float64)


class _SoftmaxRecorder(TorchFunctionMode):
    """While active, records the results of softmax, and replaces sdpa by `attend`.

    It also records which scores were not hidden, because rounding can give a weight of 0.
    """

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.calls = 0
        """The number of sdpa calls."""
        self.softmaxes: list[tuple[Tensor, Tensor, Tensor]] = []
        """Of each: the result, which scores were not hidden, and the largest of these of a row."""
        self.deviation: float | None = None
        """How far the factor of the values is from the softmax; None before that product."""
        self.kept_share = 1.0
        """The share of weights that dropout keeps."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and modules_around() is not None:
            self.calls += 1
            return self.attend(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self.softmaxes and self.deviation is None and name in PRODUCTS:
            tensors = tree_leaves((args, kwargs))
            self.deviation = self._deviation([t for t in tensors if isinstance(t, Tensor)])
        if self.softmaxes and name == "dropout" and kwargs.get("training", True):
            self.kept_share = 1 - kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        result = func(*args, **kwargs)
        if func in _SOFTMAX and result.ndim in (3, 4) and modules_around() is not None:
            scores = args[0] if args else kwargs["input"]
            not_hidden = scores.detach() > masks.MASK_THRESHOLD
            row_max = scores.detach().where(not_hidden, -torch.inf).amax(-1)
            self.softmaxes.append((result.detach(), not_hidden, row_max))
        return result

    def used_other_weights(self, returned: Any) -> bool:
        """Whether the module multiplied its values by other weights than those of the softmax.

        Without a recorded product, whether it returned other weights.
        """
        if self.deviation is None and isinstance(returned, Tensor):
            self.deviation = self._deviation([returned])
        return self.deviation is not None and not self.deviation <= 1

    def _deviation(self, factors: list[Tensor]) -> float | None:
        """How far these are from the weights, over queries that see a key.

        None if no factor has a row for every query of every head.
        """
        A, not_hidden, _ = self.softmaxes[-1]
        rows = A.numel() // A.shape[-1]
        deviations = []
        for factor in factors:
            if factor.ndim < 3 or factor.shape[-2] != A.shape[-2]:
                continue
            if factor.numel() // factor.shape[-1] != rows:
                continue
            if factor.shape[-1] != A.shape[-1]:
                deviations.append(math.inf)
                continue
            factor_weights = factor.detach().reshape(A.shape).float() * self.kept_share
            deviation = (
                ((factor_weights - A.float()) * not_hidden.any(-1, keepdim=True))
                .abs()
                .nan_to_num(0)
            )
            if self.kept_share < 1:
                deviation = deviation * (factor_weights != 0)
            deviations.append(deviation.max().item() / (1e-5 if factor.dtype in _EXACT else 1e-2))
        return min(deviations, default=None)


def original_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> tuple[Tensor, None]:
    """Torch's sdpa with the signature of the attention interface of transformers."""
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=enable_gqa,
    )
    return out.transpose(1, 2), None


def eager_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """sdpa in plain operations, with an additive mask; also returns the weights [B, H, Q, K]."""
    per_group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(per_group, 1) for t in (key, value))
    scores = (query.float() * scaling) @ key.float().transpose(-1, -2) + attention_mask
    weights = torch.softmax(scores, -1)
    return (weights.to(value.dtype) @ value).transpose(1, 2), weights


class _RunningCall(threading.local):
    """The call of a module that is running in this thread."""

    def __init__(self) -> None:
        self.recorder: _SoftmaxRecorder | None = None
        self.listeners: Any = None
        self.mask: Any = None
        self.input_shape: tuple[int, ...] = ()
        """Batch and tokens, in the order of the module's input."""


def hook(module: nn.Module, on_weights: OnWeights, attend: Attend) -> ExitStack:
    """Pass the weights of a watched module to `on_weights`, and replace its sdpa by `attend`.

    A copy of the module keeps the hooks, but they do nothing there.
    """
    call, undo = _RunningCall(), ExitStack()

    def start(this: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        call.listeners = current().listeners(module) if this is module else None
        if call.listeners is None or not call.listeners.needs_geometry:
            return
        call.mask = argument(module, "attention_mask", args, kwargs)
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        shape = next(tensors).shape
        first = type(module).__name__ in CHANNELS_FIRST
        call.input_shape = (shape[0], shape[2]) if first else tuple(shape[:2])
        call.recorder = _SoftmaxRecorder(partial(attend, module))
        call.recorder.__enter__()  # type: ignore[no-untyped-call]

    def finish(this: nn.Module, args: Any, output: Any) -> None:
        if this is not module or call.recorder is None:
            return
        recorder, call.recorder = call.recorder, None
        recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        intercepted = module in current().pass_of(call.listeners).intercepted()
        if output is None or ((recorder.calls or intercepted) and not recorder.softmaxes):
            return  # it raised an error, or its attention was intercepted
        model = call.listeners.hooks[0][0].sites.model
        A, visible, row_max = _weights_of(module, recorder, output, call.input_shape, model)
        on_weights(module, call.listeners, call.mask, A.detach(), visible, row_max)

    undo.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
    undo.callback(module.register_forward_hook(finish, always_call=True).remove)
    return undo


def _weights_of(
    module: nn.Module,
    recorder: _SoftmaxRecorder,
    output: Any,
    input_shape: tuple[int, ...],
    model: nn.Module,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The weights [B, H, Q, K] of a module that ran, the keys that it hid from no head, and the
    largest score of each query [B, H, Q], if it is known."""
    A = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    not_hidden = row_max = None
    problem, code = "", "attention-not-captured"
    if len(recorder.softmaxes) == 1:
        if recorder.used_other_weights(A):
            code = "weights-changed-after-softmax"
            problem = (
                "changes its attention weights after the softmax, for example with gates or a "
                "top-k; attnscope cannot read the weights that it uses; choose other layers"
            )
        A, not_hidden, row_max = recorder.softmaxes[0]
        if bool((row_max == 0).all()):  # a module may have taken the largest off every row
            row_max = None
    if not isinstance(A, Tensor) or A.ndim not in (3, 4) or recorder.calls:
        problem = _not_captured(module, recorder.calls + len(recorder.softmaxes))
    elif not problem:
        if A.ndim == 3:  # heads and sequences share one dimension
            heads: int = getattr(module, "num_heads", 1)
            A = A.reshape(-1, heads, *A.shape[1:])
        visible = A > 0 if not_hidden is None else not_hidden.reshape(A.shape) | (A > 0)
        if {A.shape[0], A.shape[2]} <= set(input_shape):
            return A, visible.any(1), None if row_max is None else row_max.view(A.shape[:3])
        code = "unsupported-weights-shape"
        problem = (
            f"made attention weights {list(A.shape)} for a text of {list(input_shape)}, which are "
            "not [batch, heads, queries, keys]; attnscope cannot assign them to keys"
        )
    name = name_in(model, module)
    raise ModelError(f"{type(module).__name__} (module {name}) {problem}", code=code, module=name)


def fewer_keys(model: nn.Module, module: nn.Module, weights: Tensor) -> ModelError:
    """The error for self-attention whose weights are not over its tokens (SwiftFormer)."""
    name = name_in(model, module)
    queries, keys = weights.shape[2:]
    return ModelError(
        f"{type(module).__name__} (module {name}) made attention weights of {queries} queries and "
        f"{keys} keys in self-attention; attnscope cannot assign them to tokens",
        code="unsupported-weights-shape",
        module=name,
    )


def _not_captured(module: nn.Module, count: int) -> str:
    """The problem of a module with no matrix of weights, or with several."""
    reason = (
        f"made {count} matrices of attention weights in one call, but attnscope reads one"
        if count
        else "calls neither the attention interface of transformers nor torch's "
        "scaled_dot_product_attention or softmax, so attnscope cannot read its weights"
    )
    if isinstance(module, nn.MultiheadAttention):
        reason = "is a module of torch, whose attention attnscope cannot read"
    return (
        f"{reason}; its forward must call ALL_ATTENTION_FUNCTIONS.get_interface, or load the model "
        "with attn_implementation='eager' if its code supports that"
    )


def geometry_of_weights(
    A: Tensor, mask: Any, forward_pass: ForwardPass, visible: Tensor, *, cross: bool = False
) -> Geometry:
    """The geometry of a call that made weights A under this mask.

    `visible` [B, Q, K] marks the keys that the module did not hide from all heads.

    The mask may be of an unknown form, and the module may hide more than its mask. The largest
    distance back and ahead over all rows gives the window, and whether the call is causal.
    """
    if cross:
        return _cross_geometry(A, mask, forward_pass)
    B, _, Q, K = A.shape
    first = K - Q if forward_pass.past is None else forward_pass.past
    mask_geometry = _mask_geometry(mask, A, forward_pass)
    if mask_geometry is not None:
        rows = torch.ones(B, Q, dtype=torch.bool)
        if mask_geometry.real_queries is not None:
            rows = mask_geometry.real_queries
        hidden = ~mask_geometry.visibility().to(A.device).any(1)
        if bool((visible & hidden & rows[..., None].to(A.device)).any()):
            mask_geometry = None  # the mask has another meaning
        else:
            visible = visible & ~hidden & rows[..., None].to(A.device)
            first = mask_geometry.first_query
    padding = None
    if (
        mask_geometry is None
        and forward_pass.padding is not None
        and not bool(forward_pass.padding.all())
    ):
        padding = forward_pass.padding[:, :K].bool().cpu()
        # A padding query sees no key, whatever eager attention computed for its row.
        real = padding.to(A.device)
        visible = visible & real[:, first : first + Q, None] & real[:, None]
    position = torch.arange(first, first + Q, device=A.device)
    order = torch.arange(K, device=A.device)
    back = torch.where(visible, position[:, None] - order, -K).amax().item()
    ahead = torch.where(visible, order - position[:, None], -K).amax().item()
    at = position.cpu()
    start = (at - int(back)).clamp(0, K).expand(B, Q)
    stop = (at + int(ahead) + 1).clamp(0, K).expand(B, Q)
    if mask_geometry is None:
        return masks.build_geometry(
            start, torch.maximum(stop, start), padding, first, 0, K, A.device
        )
    low, high = mask_geometry.visible_ranges
    start, stop = torch.maximum(start, low), torch.minimum(stop, high)
    return replace(
        mask_geometry,
        form="interval",
        bounds=(start, torch.maximum(stop, start)),
        selections={},
        copies={},
        device=A.device,
    )


def _cross_geometry(A: Tensor, mask: Any, forward_pass: ForwardPass) -> Geometry:
    """The geometry of cross-attention: all keys of the other text that the mask does not hide."""
    B, _, Q, K = A.shape
    mask_geometry = _mask_geometry(mask, A, replace(forward_pass, mask=None, past=None))
    if mask_geometry is None:
        bounds = torch.zeros(B, Q, dtype=torch.int64), torch.full((B, Q), K)
        mask_geometry = masks.build_geometry(*bounds, None, 0, 0, K, A.device)
    return mask_geometry.as_cross(forward_pass.past or 0, forward_pass.padding)


def _mask_geometry(mask: Any, A: Tensor, forward_pass: ForwardPass) -> Geometry | None:
    """The geometry of a mask; None if its form is unknown."""
    B, _, Q, K = A.shape
    if isinstance(mask, masks.MaskTensor):
        fits = (mask.geometry.batch, mask.geometry.queries, mask.geometry.keys) == (B, Q, K)
        return mask.geometry if fits and mask.geometry.first_key == 0 else None
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] == K:
        return masks.geometry_of_dense(mask, A, K, forward_pass.past, forward_pass.padding)[0]
    return None
