"""Weights as they are, one layer's matrix at a time: for attention that nothing smaller describes.

Modules that bypass the attention interface run as they always do, and the weights that they make
are taken. The matrix is reduced before the next layer makes its own; one is the price, so this is
for a few thousand tokens. Where they call torch's sdpa instead, there is no matrix: that call is
handed on as if it had come through the interface.
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

from attnscope.capture import masks
from attnscope.capture.conservation import received_unseen
from attnscope.capture.coverage import PRODUCTS, modules_around
from attnscope.capture.families import CHANNELS_FIRST
from attnscope.capture.forward_pass import ForwardPass
from attnscope.capture.geometry import Geometry, QuerySelection
from attnscope.capture.sites import argument
from attnscope.capture.sums import LayerAccumulator
from attnscope.errors import ConservationError, ModelError
from attnscope.kernels import reference

ModuleFilter = Callable[[nn.Module], bool]
OnWeights = Callable[[nn.Module, Any, Tensor, Tensor], None]
Attend = Callable[..., Tensor]
"""From a module and the arguments of a call of torch's sdpa to what that returns."""


_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_EXACT = (torch.float32, torch.float64)


class _SoftmaxRecorder(TorchFunctionMode):
    """While active, keeps the weights that softmax makes and which of them were not hidden (a
    weight of 0 may be rounding, a score says); and lets sdpa be answered by `attend`."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.calls = 0
        """Of sdpa."""
        self.softmaxes: list[tuple[Tensor, Tensor]] = []
        self.deviation: float | None = None
        """How far what multiplies the values is from the softmax; None before that product."""
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
            self.softmaxes.append((result.detach(), scores.detach() > masks.MASK_THRESHOLD))
        return result

    def used_other_weights(self, returned: Any) -> bool:
        """Whether the values were multiplied by other weights than the softmax made; where that
        product was not seen, whether others were returned."""
        if self.deviation is None and isinstance(returned, Tensor):
            self.deviation = self._deviation([returned])
        return self.deviation is not None and not self.deviation <= 1

    def _deviation(self, factors: list[Tensor]) -> float | None:
        """How far these are from the weights, over queries that see a key; None where no factor
        has a row for every query of every head."""
        A, not_hidden = self.softmaxes[-1]
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
    """Torch's sdpa as the attention interface would call it; the names are transformers'."""
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
    """The same spelled out, under an additive mask, with its weights [B, H, Q, K]."""
    per_group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(per_group, 1) for t in (key, value))
    scores = (query.float() * scaling) @ key.float().transpose(-1, -2) + attention_mask
    weights = torch.softmax(scores, -1)
    return (weights.to(value.dtype) @ value).transpose(1, 2), weights


class _HookState(threading.local):
    """The call of a module under way in this thread."""

    def __init__(self) -> None:
        self.recorder: _SoftmaxRecorder | None = None
        self.mask: Any = None
        self.input_shape: tuple[int, ...] = ()
        """Batch and tokens, in the order in which the module takes them."""


def hook(
    module: nn.Module,
    is_watched: ModuleFilter,
    on_weights: OnWeights,
    attend: Attend,
    *,
    intercepted: ModuleFilter,
    name_of: Callable[[nn.Module], str],
) -> ExitStack:
    """Tell of the weights this module makes where somebody listens, and let its calls of sdpa be
    answered by `attend`, until undone. A call that went through the interface is `intercepted`
    and has no weights to tell.

    A copy of the module, which carries the hooks for ever, tells nothing.
    """
    state, undo = _HookState(), ExitStack()

    def start(this: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if this is module and is_watched(module):
            state.mask = argument(module, "attention_mask", args, kwargs)
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            shape = next(tensors).shape
            first = type(module).__name__ in CHANNELS_FIRST
            state.input_shape = (shape[0], shape[2]) if first else tuple(shape[:2])
            state.recorder = _SoftmaxRecorder(partial(attend, module))
            state.recorder.__enter__()  # type: ignore[no-untyped-call]

    def stop(this: nn.Module, args: Any, output: Any) -> None:
        if this is module and state.recorder is not None:
            state.recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def collect(this: nn.Module, args: Any, output: Any) -> None:
        if this is not module or state.recorder is None:
            return
        recorder, state.recorder = state.recorder, None
        calls, softmaxes = recorder.calls, recorder.softmaxes
        if (calls or intercepted(module)) and not softmaxes:
            return  # its attention was seen as it was called
        A = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        not_hidden = None
        if len(softmaxes) == 1:
            if recorder.used_other_weights(A):
                raise _weights_changed_error(module, name_of(module))
            A, not_hidden = softmaxes[0]
        if calls or not isinstance(A, Tensor) or A.ndim not in (3, 4):
            raise _not_captured_error(module, name_of(module), calls + len(softmaxes))
        if A.ndim == 3:  # heads and sequences in one
            heads: int = getattr(module, "num_heads", 1)
            A = A.reshape(-1, heads, *A.shape[1:])
        visible = A > 0 if not_hidden is None else not_hidden.reshape(A.shape) | (A > 0)
        if not {A.shape[0], A.shape[2]} <= set(state.input_shape):
            raise _shape_error(module, A, state.input_shape)
        on_weights(module, state.mask, A.detach(), visible.any(1))

    undo.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
    undo.callback(module.register_forward_hook(stop, always_call=True).remove)
    undo.callback(module.register_forward_hook(collect).remove)
    return undo


def _weights_changed_error(module: nn.Module, name: str) -> ModelError:
    return ModelError(
        f"{type(module).__name__} changes its attention weights after the softmax (gates, a "
        f"renormalised top-k, a softmax with an extra term), so what it uses cannot be read "
        f"(module {name}); choose other layers",
        code="weights-changed-after-softmax",
        module=name,
    )


def _shape_error(module: nn.Module, A: Tensor, input_shape: tuple[int, ...]) -> ModelError:
    return ModelError(
        f"{type(module).__name__} made attention weights {list(A.shape)} for a text of "
        f"{list(input_shape)}, which are not [batch, heads, queries, keys]; attnscope cannot "
        "tell which keys these are",
        code="unsupported-weights-shape",
        module=type(module).__name__,
        shape=tuple(A.shape),
    )


def _not_captured_error(module: nn.Module, name: str, count: int) -> ModelError:
    """For a module of which no single matrix of weights could be read."""
    reason = (
        f"made {count} matrices of attention weights in one call, and attnscope reads one"
        if count
        else "does not call the attention interface of transformers, and neither "
        "scaled_dot_product_attention nor softmax of torch, so its weights cannot be read"
    )
    if isinstance(module, nn.MultiheadAttention):
        reason = "is torch's own module, which computes its attention out of reach"
    return ModelError(
        f"{type(module).__name__} {reason} (module {name}); let it call "
        "ALL_ATTENTION_FUNCTIONS.get_interface, or load the model with "
        "attn_implementation='eager' where its code has that",
        code="attention-not-captured",
        module=name,
        matrices=count,
    )


def geometry_of_weights(
    A: Tensor, mask: Any, forward_pass: ForwardPass, visible: Tensor, *, cross: bool = False
) -> Geometry:
    """The geometry of a call that made weights A under this mask.

    `visible` [B, Q, K] marks the keys that the module did not hide from all heads.

    The mask may be one we do not understand, and the module may hide more than it says: how far
    back and ahead any query was let look, over all rows, tells a window and causality.
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
            mask_geometry = None  # it means something else
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
        # A padding query sees nothing, whatever eager attention made of its row.
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
    low, high = mask_geometry.intervals
    start, stop = torch.maximum(start, low), torch.minimum(stop, high)
    return replace(
        mask_geometry,
        form="interval",
        bounds=(start, torch.maximum(stop, start)),
        selections={},
        elsewhere={},
        device=A.device,
    )


def _cross_geometry(A: Tensor, mask: Any, forward_pass: ForwardPass) -> Geometry:
    """The same where the keys are another text's: all of them, less what the mask hides."""
    B, _, Q, K = A.shape
    mask_geometry = _mask_geometry(mask, A, replace(forward_pass, padding=None, past=None))
    if mask_geometry is None:
        bounds = torch.zeros(B, Q, dtype=torch.int64), torch.full((B, Q), K)
        mask_geometry = masks.build_geometry(*bounds, None, 0, 0, K, A.device)
    return mask_geometry.across(forward_pass.past or 0, forward_pass.padding)


def _mask_geometry(mask: Any, A: Tensor, forward_pass: ForwardPass) -> Geometry | None:
    """What the mask says, as far as it is of a kind we know."""
    B, _, Q, K = A.shape
    if isinstance(mask, masks.MaskTensor):
        fits = (mask.geometry.batch, mask.geometry.queries, mask.geometry.keys) == (B, Q, K)
        return mask.geometry if fits and mask.geometry.first_key == 0 else None
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] == K:
        return masks.geometry_of_dense(mask, A, K, forward_pass.past, forward_pass.padding)[0]
    return None


def reduce(
    A: Tensor,
    geometry: Geometry,
    selection: QuerySelection,
    layer: LayerAccumulator,
    groups: int,
    top: int,
    *,
    has_sinks: bool,
) -> Tensor:
    """Add one layer's matrix to its totals, and give its counted rows [B, H, M, K]. Samples are not
    drawn: the matrix is there anyway."""
    counted = selection.rows(selection.counted_queries()).to(A.device)
    self_key = selection.rows(geometry.own().expand(geometry.batch, -1)).to(A.device)
    if selection.whole.only is not None:
        A = A[:, :, selection.whole.only : selection.whole.only + 1]
    elif selection.whole.index is not None:
        index = selection.whole.index[:, None, :, None]
        A = A.gather(2, index.expand(-1, A.shape[1], -1, A.shape[3]))
    A = A.float().masked_fill(~counted[:, None, :, None], 0.0)  # which may be anything, nan too
    if geometry.real_keys is not None:
        A = A * geometry.real_keys[:, None, None].to(A.device)
    rowsum = A.sum(-1)
    deviation = ((rowsum - 1).abs() * counted[:, None]).max().item()
    if has_sinks:
        layer.add_sink(1 - rowsum, selection)
    elif deviation > 2e-2:  # nan is found out, and said, at the end of the pass
        raise ConservationError(
            f"a row of attention weights adds up to 1 only within {deviation:.3g}; dropout changes "
            "the weights in training, so call model.eval() first; a softmax with an extra term is "
            "not supported",
            code="row-sum",
            deviation=deviation,
        )
    group = None if selection.group is None else selection.rows(selection.group).to(A.device)
    sums = reference.totals(A, self_key, rowsum.log(), counted.float(), None, group, groups)
    visible = selection.visibility().to(A.device).any(2)
    layer.add(received_unseen(sums, ~visible), 0)
    layer.selections.append(selection)
    if top:
        weights, keys = A.topk(min(top, A.shape[-1]))
        keys = keys.where(weights > 0, -1)
        layer.top.append((self_key.where(counted, -1), keys, weights))
    return A
