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

Listens = Callable[[nn.Module], bool]
Tell = Callable[[nn.Module, Any, Tensor, Tensor], None]
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
        self.found: list[tuple[Tensor, Tensor]] = []
        self.changed: float | None = None
        """How far what multiplies the values is from the softmax; None before that product."""
        self.kept = 1.0
        """The share of weights that dropout keeps."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and modules_around() is not None:
            self.calls += 1
            return self.attend(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self.found and self.changed is None and name in PRODUCTS:
            tensors = tree_leaves((args, kwargs))
            self.changed = self._off([t for t in tensors if isinstance(t, Tensor)])
        if self.found and name == "dropout" and kwargs.get("training", True):
            self.kept = 1 - kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        made = func(*args, **kwargs)
        if func in _SOFTMAX and made.ndim in (3, 4) and modules_around() is not None:
            scores = args[0] if args else kwargs["input"]
            self.found.append((made.detach(), scores.detach() > masks.HIDES))
        return made

    def used_others(self, returned: Any) -> bool:
        """Whether the values were multiplied by other weights than the softmax made; where that
        product was not seen, whether others were returned."""
        if self.changed is None and isinstance(returned, Tensor):
            self.changed = self._off([returned])
        return self.changed is not None and not self.changed <= 1

    def _off(self, factors: list[Tensor]) -> float | None:
        """How far these are from the weights, over queries that see a key; None where no factor
        has a row for every query of every head."""
        A, shown = self.found[-1]
        rows = A.numel() // A.shape[-1]
        offs = []
        for factor in factors:
            if factor.ndim < 3 or factor.shape[-2] != A.shape[-2]:
                continue
            if factor.numel() // factor.shape[-1] != rows:
                continue
            if factor.shape[-1] != A.shape[-1]:
                offs.append(math.inf)
                continue
            theirs = factor.detach().reshape(A.shape).float() * self.kept
            off = ((theirs - A.float()) * shown.any(-1, keepdim=True)).abs().nan_to_num(0)
            if self.kept < 1:
                off = off * (theirs != 0)
            offs.append(off.max().item() / (1e-5 if factor.dtype in _EXACT else 1e-2))
        return min(offs, default=None)


def plain_sdpa(
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
        self.seeing: _SoftmaxRecorder | None = None
        self.mask: Any = None
        self.text: tuple[int, ...] = ()
        """Batch and tokens, in the order in which the module takes them."""


def hook(
    module: nn.Module,
    listens: Listens,
    tell: Tell,
    attend: Attend,
    *,
    intercepted: Listens,
    name: Callable[[nn.Module], str],
) -> ExitStack:
    """Tell of the weights this module makes where somebody listens, and let its calls of sdpa be
    answered by `attend`, until undone. A call that went through the interface is `intercepted`
    and has no weights to tell.

    A copy of the module, which carries the hooks for ever, tells nothing.
    """
    looking, undo = _HookState(), ExitStack()

    def look(this: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if this is module and listens(module):
            looking.mask = argument(module, "attention_mask", args, kwargs)
            given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            shape = next(given).shape
            first = type(module).__name__ in CHANNELS_FIRST
            looking.text = (shape[0], shape[2]) if first else tuple(shape[:2])
            looking.seeing = _SoftmaxRecorder(partial(attend, module))
            looking.seeing.__enter__()  # type: ignore[no-untyped-call]

    def look_away(this: nn.Module, args: Any, output: Any) -> None:
        if this is module and looking.seeing is not None:
            looking.seeing.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def take(this: nn.Module, args: Any, output: Any) -> None:
        if this is not module or looking.seeing is None:
            return
        seeing, looking.seeing = looking.seeing, None
        calls, seen = seeing.calls, seeing.found
        if (calls or intercepted(module)) and not seen:
            return  # its attention was seen as it was called
        A = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        shown = None
        if len(seen) == 1:
            if seeing.used_others(A):
                raise _changed_after(module, name(module))
            A, shown = seen[0]
        if calls or not isinstance(A, Tensor) or A.ndim not in (3, 4):
            raise _unreadable(module, name(module), calls + len(seen))
        if A.ndim == 3:  # heads and sequences in one
            heads: int = getattr(module, "num_heads", 1)
            A = A.reshape(-1, heads, *A.shape[1:])
        seen_by_any = A > 0 if shown is None else shown.reshape(A.shape) | (A > 0)
        if not {A.shape[0], A.shape[2]} <= set(looking.text):
            raise _unplaced(module, A, looking.text)
        tell(module, looking.mask, A.detach(), seen_by_any.any(1))

    undo.callback(module.register_forward_pre_hook(look, with_kwargs=True).remove)
    undo.callback(module.register_forward_hook(look_away, always_call=True).remove)
    undo.callback(module.register_forward_hook(take).remove)
    return undo


def _changed_after(module: nn.Module, name: str) -> ModelError:
    return ModelError(
        f"{type(module).__name__} changes its attention weights after the softmax (gates, a "
        f"renormalised top-k, a softmax with an extra term), so what it uses cannot be read "
        f"(module {name}); choose other layers",
        code="weights-changed-after-softmax",
        module=name,
    )


def _unplaced(module: nn.Module, A: Tensor, text: tuple[int, ...]) -> ModelError:
    return ModelError(
        f"{type(module).__name__} made attention weights {list(A.shape)} for a text of "
        f"{list(text)}, which are not [batch, heads, queries, keys]; attnscope cannot tell which "
        "keys these are",
        code="unsupported-weights-shape",
        module=type(module).__name__,
        shape=tuple(A.shape),
    )


def _unreadable(module: nn.Module, name: str, made: int) -> ModelError:
    """For a module of which no single matrix of weights could be read."""
    reason = (
        f"made {made} matrices of attention weights in one call, and attnscope reads one"
        if made
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
        matrices=made,
    )


def frame(
    A: Tensor, mask: Any, given: ForwardPass, seen: Tensor, *, cross: bool = False
) -> Geometry:
    """Who could see whom, where a module made A under this mask; `seen` [B, Q, K] are the keys it
    did not hide from all heads.

    The mask may be one we do not understand, and the module may hide more than it says: how far
    back and ahead any query was let look, over all rows, tells a window and causality.
    """
    if cross:
        return _across(A, mask, given)
    B, _, Q, K = A.shape
    first = K - Q if given.past is None else given.past
    said = _said(mask, A, given)
    if said is not None:
        rows = torch.ones(B, Q, dtype=torch.bool)
        if said.real_queries is not None:
            rows = said.real_queries
        hidden = ~said.visibility().to(A.device).any(1)
        if bool((seen & hidden & rows[..., None].to(A.device)).any()):
            said = None  # it means something else
        else:
            seen = seen & ~hidden & rows[..., None].to(A.device)
            first = said.first_query
    padding = None
    if said is None and given.padding is not None and not bool(given.padding.all()):
        padding = given.padding[:, :K].bool().cpu()
        # A padding query sees nothing, whatever eager attention made of its row.
        real = padding.to(A.device)
        seen = seen & real[:, first : first + Q, None] & real[:, None]
    own, order = torch.arange(first, first + Q, device=A.device), torch.arange(K, device=A.device)
    back = torch.where(seen, own[:, None] - order, -K).amax().item()
    ahead = torch.where(seen, order - own[:, None], -K).amax().item()
    at = own.cpu()
    start = (at - int(back)).clamp(0, K).expand(B, Q)
    stop = (at + int(ahead) + 1).clamp(0, K).expand(B, Q)
    if said is None:
        return masks.build_frame(start, torch.maximum(stop, start), padding, first, 0, K, A.device)
    low, high = said.intervals
    start, stop = torch.maximum(start, low), torch.minimum(stop, high)
    return replace(
        said,
        form="interval",
        bounds=(start, torch.maximum(stop, start)),
        selections={},
        elsewhere={},
        device=A.device,
    )


def _across(A: Tensor, mask: Any, given: ForwardPass) -> Geometry:
    """The same where the keys are another text's: all of them, less what the mask hides."""
    B, _, Q, K = A.shape
    said = _said(mask, A, replace(given, padding=None, past=None))
    if said is None:
        bounds = torch.zeros(B, Q, dtype=torch.int64), torch.full((B, Q), K)
        said = masks.build_frame(*bounds, None, 0, 0, K, A.device)
    return said.across(given.past or 0, given.padding)


def _said(mask: Any, A: Tensor, given: ForwardPass) -> Geometry | None:
    """What the mask says, as far as it is of a kind we know."""
    B, _, Q, K = A.shape
    if isinstance(mask, masks.MaskTensor):
        fits = (mask.frame.batch, mask.frame.queries, mask.frame.keys) == (B, Q, K)
        return mask.frame if fits and mask.frame.first_key == 0 else None
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] == K:
        return masks.frame_of_dense(mask, A, K, given.past, given.padding)[0]
    return None


def reduce(
    A: Tensor,
    frame: Geometry,
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
    own = selection.rows(frame.own().expand(frame.batch, -1)).to(A.device)
    if selection.whole.only is not None:
        A = A[:, :, selection.whole.only : selection.whole.only + 1]
    elif selection.whole.index is not None:
        index = selection.whole.index[:, None, :, None]
        A = A.gather(2, index.expand(-1, A.shape[1], -1, A.shape[3]))
    A = A.float().masked_fill(~counted[:, None, :, None], 0.0)  # which may be anything, nan too
    if frame.real_keys is not None:
        A = A * frame.real_keys[:, None, None].to(A.device)
    rowsum = A.sum(-1)
    off = ((rowsum - 1).abs() * counted[:, None]).max().item()
    if has_sinks:
        layer.add_sink(1 - rowsum, selection)
    elif off > 2e-2:  # nan is found out, and said, at the end of the pass
        raise ConservationError(
            f"a row of attention adds up to 1 only within {off:.3g}; in training, dropout changes "
            "the weights: call model.eval() first. A softmax with an extra term is not supported",
            code="row-sum",
            deviation=off,
        )
    group = None if selection.group is None else selection.rows(selection.group).to(A.device)
    sums = reference.totals(A, own, rowsum.log(), counted.float(), None, group, groups)
    seen = selection.visibility().to(A.device).any(2)
    layer.add(received_unseen(sums, ~seen), 0)
    layer.selections.append(selection)
    if top:
        weights, keys = A.topk(min(top, A.shape[-1]))
        keys = keys.where(weights > 0, -1)
        layer.top.append((own.where(counted, -1), keys, weights))
    return A
