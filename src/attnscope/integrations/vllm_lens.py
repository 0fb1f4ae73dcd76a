"""Reads queries and keys that vllm-lens captured, and measures them as plain tensors.

vllm-lens (version 1.3.0, MIT licence) adds `activations` to the output of a request whose sampling
parameters have `extra_args={"output_qk": True}`. vllm-lens itself is not needed here.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import InputError, ModelError, unknown, wrong_shape
from attnscope.scope.from_tensors import KernelName, from_tensors
from attnscope.scope.scope import Scope

KEYS = ("attn_q", "attn_k", "qk_layers", "qk_meta")
"""What a capture has: queries [layers, tokens, heads, size], keys [layers, tokens, KV heads, size],
the numbers of the layers, and the settings of each."""


def read_capture(
    activations: Mapping[str, Any],
    layers: Iterable[int] | None = None,
    *,
    queries: str | Tensor = "all",
    classes: Tensor | None = None,
    backend: KernelName = "auto",
) -> dict[int, Scope]:
    """Measure the attention of a request that vllm-lens captured.

    Args:
        activations: `output.activations` of the request.
        layers: The layers to measure; default: all captured ones.
        queries: As for `from_tensors`: "all", "last", or a bool tensor [1, tokens].
        classes: Int [1, tokens], -1 for no class; needed for `flow`.
        backend: "auto", "reference", "streaming" or "triton".

    Returns:
        By number of the layer: a `Scope` of one sequence and one layer, which it calls 0.

    Raises:
        InputError: The capture lacks something, or a layer was not captured.
        ModelError: A layer has ALiBi or a window to the right.

    Example:
        >>> import torch
        >>> from attnscope.integrations.vllm_lens import read_capture
        >>> capture = {
        ...     "attn_q": torch.randn(1, 20, 8, 64),
        ...     "attn_k": torch.randn(1, 20, 2, 64),
        ...     "qk_layers": [5],
        ...     "qk_meta": [{"scale": 0.125, "sliding_window": [-1, -1]}],
        ... }
        >>> read_capture(capture)[5].entropy(0).shape  # [batch, heads]
        torch.Size([1, 8])
    """
    q, k, captured, settings = _parts(activations)
    scopes = {}
    for layer in captured if layers is None else layers:
        if layer not in captured:
            raise unknown("layer", layer, captured)
        at = captured.index(layer)
        scopes[layer] = from_tensors(
            q[at].transpose(0, 1)[None],
            k[at].transpose(0, 1)[None],
            queries=queries,
            classes=classes,
            backend=backend,
            **_options(layer, settings[at]),
        )
    return scopes


def _parts(
    activations: Mapping[str, Any],
) -> tuple[Tensor, Tensor, list[int], list[Mapping[str, Any]]]:
    """Queries, keys, numbers of the layers, and their settings."""
    for key in KEYS:
        if key not in activations:
            raise InputError(
                f"the activations have no {key!r}; request them with "
                "extra_args={'output_qk': True}. They have: "
                f"{', '.join(map(str, activations)) or 'nothing'}",
                code="no-capture",
                value=key,
                known=list(KEYS),
            )
    q, k = (_check(key, activations[key]) for key in KEYS[:2])
    captured, settings = list(activations["qk_layers"]), list(activations["qk_meta"])
    if not len(q) == len(k) == len(captured) == len(settings) or q.shape[1] != k.shape[1]:
        raise InputError(
            f"the capture is not complete: queries {list(q.shape)}, keys {list(k.shape)}, "
            f"{len(captured)} layers and {len(settings)} settings; all must have the same layers "
            "and tokens",
            code="incomplete-capture",
        )
    return q, k, captured, settings


def _check(name: str, tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor) or tensor.ndim != 4:
        raise wrong_shape(name, "a float tensor [layers, tokens, heads, size]", tensor)
    return tensor


def _options(layer: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a layer as arguments of `from_tensors`."""
    left, right = settings.get("sliding_window") or (-1, -1)
    if settings.get("alibi_slopes") is not None:
        raise _refused(layer, "ALiBi")
    if right > 0:
        raise _refused(layer, f"a window of {right} tokens to the right")
    if "scale" not in settings:
        raise InputError(
            f"the settings of layer {layer} have no 'scale'; they have: {', '.join(settings)}",
            code="no-capture",
            value="scale",
        )
    sinks = settings.get("sinks")
    return {
        "scale": float(settings["scale"]),
        "window": None if left < 0 else int(left) + 1,  # the own key is not counted in `left`
        "softcap": settings.get("logits_soft_cap") or None,
        "sinks": None if sinks is None else torch.as_tensor(sinks, dtype=torch.float32),
    }


def _refused(layer: int, what: str) -> ModelError:
    return ModelError(
        f"layer {layer} has {what}, which from_tensors does not support; measure the model with "
        "attnscope.watch(llm)",
        code="unsupported-attention",
        layer=layer,
    )
