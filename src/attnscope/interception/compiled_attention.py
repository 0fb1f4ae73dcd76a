"""Attention of a watched model inside a compiled graph: one operator.

Dynamo traces `traced_mask` and `traced_attention` in place of the lookups. The graph then calls
`attnscope::attend`, whose implementation runs the call outside of the graph, as in a model that is
not compiled. A graph holds no hook, so it serves every block.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnscope.errors import ModelError
from attnscope.interception import masks
from attnscope.interception.arguments import REDUNDANT, reads_kwarg
from attnscope.interception.dispatch import eager_of
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.geometry import Geometry
from attnscope.interception.hooks import Listeners, current

traced_masks: list[Tensor] = []
"""The masks that the trace of a pass has made so far, as the graph knows them. Empty outside."""


class _Running(threading.local):
    """The compiled pass that runs in this thread."""

    def __init__(self) -> None:
        self.begin({})

    def begin(self, modules: dict[int, nn.Module]) -> None:
        """Start a pass, or end one (no modules)."""
        self.modules = modules
        """By id: the attention modules of the pass."""
        self.masks: dict[Any, Any] = {}
        """By the number of the mask, or the shape of a call without one: the mask with its
        geometry."""


running = _Running()


def traced_mask(original: Callable[..., Any], implementation: str, **kwargs: Any) -> Any:
    """Replaces a mask builder while a pass is traced: the model's own mask, numbered.

    None for a causal mask without padding, which sdpa does not need.
    """
    if (
        implementation == "sdpa"
        and kwargs.get("attention_mask") is None
        and kwargs.get("mask_function") is masking_utils.causal_mask_function
        and kwargs.get("allow_is_causal_skip", False)
        and kwargs.get("q_length") == kwargs.get("kv_length")
    ):
        return None
    mask = original(**kwargs)
    if mask is not None:
        traced_masks.append(mask)
    return mask


def traced_attention(
    implementation: str,
    eager: Callable[..., Any] | None,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Replaces the attention function while a pass is traced. What the operator cannot take ends
    the trace, and the pass runs uncompiled."""
    if implementation not in ("sdpa", "eager"):
        torch._dynamo.graph_break(msg=f"attn_implementation={implementation!r}")
    if dropout:
        torch._dynamo.graph_break(msg="dropout")
    for name, value in options.items():
        if name not in REDUNDANT and value is not None and _reads(implementation, eager, name):
            torch._dynamo.graph_break(msg=f"the argument {name} of attention")
    number = -1
    for index, known in enumerate(traced_masks):
        if known is mask:
            number = index
    out = torch.ops.attnscope.attend(
        q, k, v, mask, s_aux, scaling, softcap, is_causal, number, implementation, id(module)
    )
    return out, None


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _reads(implementation: str, eager: Callable[..., Any] | None, name: str) -> bool:
    """Whether an attention function may read an argument that the operator does not take."""
    function = eager if implementation == "eager" else sdpa_attention_forward
    return function is None or reads_kwarg(function, name)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
    causal: bool | None,
    number: int,
    implementation: str,
    module_id: int,
) -> Tensor:
    """The operator: one call of a module of the running pass."""
    module = running.modules.get(module_id)
    if module is None:
        raise ModelError(
            "a graph that was compiled inside an attnscope block runs outside of it; compile or "
            "export the model outside of the block, and open no block in a compiled function",
            code="compiled-graph-outside",
        )
    registry = current()
    listeners = registry.listeners(module)
    if listeners is not None:  # the graph uses the memory of its tensors again
        q, k = q.clone(), k.clone()
        sinks = None if sinks is None else sinks.clone()
        if listeners.keeps_values:
            v = v.clone()
        mask = _described(
            mask, number, q, k, module, causal, listeners, registry.pass_of(listeners)
        )
    options = {"scaling": scale, "softcap": softcap, "s_aux": sinks, "is_causal": causal}
    present = {name: value for name, value in options.items() if value is not None}
    # Inside a block this is `run_attention`.
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_of(module))
    output: Tensor = function(module, q, k, v, mask, **present)[0]
    return output.contiguous()


def _described(
    mask: Tensor | None,
    number: int,
    q: Tensor,
    k: Tensor,
    module: nn.Module,
    causal: bool | None,
    listeners: Listeners,
    forward_pass: ForwardPass,
) -> Any:
    """A copy of the mask, with its geometry unless it has a bias; layers share it."""
    if not listeners.needs_geometry or (mask is not None and number < 0):
        return None if mask is None else mask.clone()
    if causal is None:
        causal = bool(getattr(module, "is_causal", True))
    key: Any = number if mask is not None else (q.shape, k.shape, causal)
    if key not in running.masks:
        running.masks[key] = _with_geometry(mask, q, k, causal, forward_pass)
    return running.masks[key]


def _with_geometry(
    mask: Tensor | None, q: Tensor, k: Tensor, causal: bool, forward_pass: ForwardPass
) -> Any:
    if mask is None:
        return _tagged(None, masks.geometry_without_mask(q, k, causal=causal), torch.bool)
    mask = mask.clone()
    geometry, bias = masks.geometry_of_dense(
        mask, q, k.shape[2], forward_pass.past, forward_pass.padding
    )
    return mask if bias is not None else _tagged(mask, geometry, mask.dtype)


def _tagged(mask: Tensor | None, geometry: Geometry, dtype: torch.dtype) -> masks.MaskTensor:
    def build(*, allow_is_causal_skip: bool = True, **_: Any) -> Any:
        return mask if mask is not None or allow_is_causal_skip else geometry.visibility()

    sizes = {
        "batch_size": geometry.batch,
        "q_length": geometry.queries,
        "kv_length": geometry.keys,
    }
    return masks.tag(
        masks.placeholder(dtype, geometry.device), geometry, masks.LazyMask(build, sizes, dtype)
    )


def _shape_of_output(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


# A `Library`, because a call of a `custom_op` takes several times as long.
_library = torch.library.Library("attnscope", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "attend(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, float? scale, "
    "float? softcap, bool? causal, int number, str implementation, int module) -> Tensor",
    tags=tuple(
        getattr(torch.Tag, name)
        for name in ("needs_exact_strides", "cudagraph_unsafe")
        if hasattr(torch.Tag, name)
    ),
)
_library.impl("attend", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("attnscope::attend", _shape_of_output, lib=_library)
