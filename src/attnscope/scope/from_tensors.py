"""`from_tensors`: the numbers of a scope from query and key tensors, without a model."""

import sys
from typing import Any, Literal

import torch
from torch import Tensor

from attnscope import kernels
from attnscope.errors import InputError, check_int, describe, wrong_shape
from attnscope.interception.captured_call import CallSpec, CapturedCall
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.generation import KnownSpans
from attnscope.interception.geometry import Geometry
from attnscope.interception.masks import build_geometry
from attnscope.interception.sites import Site
from attnscope.scope.queries import Queries, parse
from attnscope.scope.reduce import Reducer
from attnscope.scope.scope import Scope
from attnscope.scope.watch import class_ids
from attnscope.scope.watch_hook import WatchHook

KernelName = Literal["auto", "reference", "streaming", "triton"]


def from_tensors(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    queries: str | Tensor = "all",
    classes: Tensor | None = None,
    backend: KernelName = "auto",
) -> Scope:
    """Measure attention from query and key tensors, without a model.

    The memory grows with the number of keys, never with queries × keys. With `causal=True` the
    queries are the last tokens of the keys, as in a decode step.

    Args:
        q: Queries, float [batch, heads, queries, size].
        k: Keys, float [batch, KV heads, keys, size], same dtype and device as `q`. The number of
            heads of `q` is a multiple of that of `k`.
        scale: Factor of the dot products; default: 1 / sqrt(size).
        causal: Whether a query sees only keys up to its own token. With False every query sees
            every key.
        window: Number of keys a query sees, its own included (sliding window); default: no limit.
        mask: Bool or int [batch, keys], 0 at padding; default: no padding.
        softcap: Scores become softcap · tanh(score / softcap); default: off.
        sinks: Learned sink scores, one for each head [heads]; default: none.
        queries: Which queries count: "all", "last", or a bool tensor [batch, keys].
        classes: Int [batch, keys], -1 for no class; needed for `flow`.
        backend: "auto", "reference", "streaming" or "triton".

    Returns:
        A `Scope` of one layer, 0.

    Raises:
        InputError: A tensor has the wrong shape or dtype, or an option has an unknown value.
        ModelError: The queries or keys contain NaN or infinite numbers.

    Examples:
        >>> import torch, attnscope
        >>> q, k = torch.randn(1, 8, 50, 64), torch.randn(1, 2, 50, 64)
        >>> found = attnscope.from_tensors(q, k, window=32)
        >>> found.received(0).shape  # [batch, heads, keys]
        torch.Size([1, 8, 50])
        >>> found.measure("entropy", 0).shape  # [batch, heads]
        torch.Size([1, 8])
    """
    q, k = _check_tensors(q, k)
    geometry = _geometry(q, k, causal, window, _key_mask(k, mask))
    ids, groups = class_ids(classes)
    spec = CallSpec(
        geometry=geometry,
        visible=geometry.visible,
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        softcap=softcap,
        sinks=_sinks(sinks, q),
    )
    name, site = kernels.choose(backend, q.device), Site("decoder", 0)
    scope = Scope(
        layers=[0], backend=name, queries=_queries(queries), groups=groups, cross=geometry.cross
    )
    scope._classes = ids
    scope._extents[0] = geometry.first_query, 0  # the queries may be the last tokens of the keys
    reducer = Reducer({"decoder": scope}, name, q.device, keep=True)
    reducer.keep_budget = sys.maxsize  # the caller has the tensors
    hook = WatchHook({site}, reducer, {"decoder": KnownSpans()})
    hook.begin("decoder", ForwardPass())
    if hook.wants(site):
        hook.on_call(CapturedCall(site, spec, q, k))
    hook.end("decoder", finished=True)
    hook.finish()
    for block in scope._blocks:
        block.computed()
    scope._verify()
    return scope


def _check_tensors(q: Any, k: Any) -> tuple[Tensor, Tensor]:
    for name, tensor in {"q": q, "k": k}.items():
        if not isinstance(tensor, Tensor) or tensor.ndim != 4 or not tensor.is_floating_point():
            raise wrong_shape(name, "a float tensor [batch, heads, tokens, size]", tensor)
    problem = None
    if q.device != k.device or q.dtype != k.dtype:
        problem = "dtype and device must be the same"
    elif q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        problem = (
            "batch and size must be equal, and the number of heads of q a multiple of that of k"
        )
    elif 0 in q.shape or 0 in k.shape:
        problem = "every size must be at least 1"
    if problem is not None:
        got = {"q": f"{describe(q)} on {q.device}", "k": f"{describe(k)} on {k.device}"}
        raise InputError(
            f"q is {got['q']} and k is {got['k']}; {problem}", code="tensors-differ", **got
        )
    return q.detach(), k.detach()


def _key_mask(k: Tensor, mask: Any) -> Tensor | None:
    """bool [B, K] on the CPU; None where nothing is padding."""
    if mask is None:
        return None
    real, shape = torch.as_tensor(mask).cpu(), [k.shape[0], k.shape[2]]
    if list(real.shape) != shape or real.is_floating_point():
        expected = f"a bool or int tensor {shape} ([batch, keys]), 0 at padding"
        raise wrong_shape("mask", expected, real)
    return None if bool(real.bool().all()) else real.bool()


def _geometry(
    q: Tensor, k: Tensor, causal: bool, window: int | None, real: Tensor | None
) -> Geometry:
    B, Q, K = q.shape[0], q.shape[2], k.shape[2]
    if window is not None:
        check_int("window", window, "how many keys a query sees", 1)
        if not causal:
            raise InputError(
                f"window={window!r} needs causal=True",
                code="window-not-causal",
                argument="window",
                value=window,
            )
    start, stop = torch.zeros(B, Q, dtype=torch.int64), torch.full((B, Q), K)
    if not causal:
        geometry = build_geometry(start, stop, real, max(K - Q, 0), 0, K, q.device)
        return geometry if Q == K else geometry.as_cross(0, None)
    if Q > K:
        raise InputError(
            f"{Q} queries and {K} keys: with causal=True the queries are the last tokens of the "
            "keys. Give the keys of all tokens, or causal=False for the keys of another text",
            code="more-queries-than-keys",
            queries=Q,
            keys=K,
        )
    self_key = torch.arange(K - Q, K).expand(B, Q)
    if window is not None:
        start = (self_key - window + 1).clamp(min=0)
    return build_geometry(start, self_key + 1, real, K - Q, 0, K, q.device)


def _queries(queries: Any) -> Queries:
    parsed = parse(queries, 0)
    if parsed.name not in ("all", "last", "mask"):
        raise InputError(
            f"queries={queries!r} needs a model (watch); from_tensors takes 'all', 'last', or a "
            "bool tensor [batch, keys]",
            code="unknown-queries",
            value=queries,
        )
    return parsed


def _sinks(sinks: Any, q: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    scores = torch.as_tensor(sinks, device=q.device)
    if list(scores.shape) != [q.shape[1]]:
        raise wrong_shape("sinks", f"one score for each of {q.shape[1]} heads", scores)
    return scores.detach()
