"""`from_tensors`: the numbers of a scope from query and key tensors, without a model."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from attnscope import kernels
from attnscope.capture.conservation import compare_unseen
from attnscope.capture.generation import CompletionSpan
from attnscope.capture.geometry import Geometry, QuerySelection
from attnscope.capture.kernel_rows import positions, rows_of
from attnscope.capture.masks import build_geometry
from attnscope.capture.query_selection import Queries, parse, select
from attnscope.capture.scope import Scope
from attnscope.capture.stored_rows import store_rows
from attnscope.capture.sums import LayerAccumulator
from attnscope.errors import InputError, describe
from attnscope.kernels import AttentionCall
from attnscope.kernels.call import WITHOUT_FLOAT64

KernelName = Literal["auto", "reference", "streaming", "triton"]


class TensorScope:
    """The results of `from_tensors`: the methods of a `Scope` without their argument `layer`.

    For example `received()`, `mass(class_ids, n)`, `rows(class_ids, n)`, `measure("entropy")`.
    """

    def __init__(self, scope: Scope):
        self._scope = scope
        self.backend = scope.backend

    def __getattr__(self, name: str) -> Any:
        if name == "measure":
            return lambda measure: self._scope.measure(measure, 0)
        if name not in _METHODS:
            raise AttributeError(f"TensorScope has no {name!r}; it has {', '.join(dir(self))}")
        return partial(getattr(self._scope, name), 0)

    def __dir__(self) -> list[str]:
        return sorted([*_METHODS, "backend", "measure"])

    def __repr__(self) -> str:
        return repr(self._scope).replace("<Scope of 1 layers,", "<TensorScope of")


_METHODS = {
    name
    for name, method in inspect.getmembers(Scope, inspect.isfunction)
    if not name.startswith("_") and list(inspect.signature(method).parameters)[1:2] == ["layer"]
}
"""The methods of `Scope` whose first argument is `layer`."""


def from_tensors(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    queries: str | Tensor = "all",
    classes: Tensor | None = None,
    backend: KernelName = "auto",
) -> TensorScope:
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
        lengths: Int [batch], number of tokens of each sequence that is padded on the right; give
            it in place of `mask`.
        softcap: Scores become softcap · tanh(score / softcap); default: off.
        sinks: Learned sink scores, one for each head [heads]; default: none.
        queries: Which queries count: "all", "last", or a bool tensor [batch, keys].
        classes: Int [batch, keys], -1 for no class; needed for `flow`.
        backend: "auto", "reference", "streaming" or "triton".

    Returns:
        The methods of a `Scope` without the argument `layer`.

    Raises:
        InputError: A tensor has the wrong shape or dtype, or an option has an unknown value.
        ModelError: The queries or keys contain NaN or infinite numbers.

    Example:
        >>> import torch, attnscope
        >>> q, k = torch.randn(1, 8, 50, 64), torch.randn(1, 2, 50, 64)
        >>> found = attnscope.from_tensors(q, k, window=32)
        >>> found.received().shape  # [batch, heads, keys]
        torch.Size([1, 8, 50])
        >>> found.measure("entropy").shape  # [batch, heads]
        torch.Size([1, 8])
    """
    q, k = _check_tensors(q, k)
    if q.device.type in WITHOUT_FLOAT64:
        q, k = q.cpu(), k.cpu()
    geometry = _geometry(q, k, causal, window, _key_mask(k, mask, lengths))
    parsed = _queries(queries)
    ids = None if classes is None else torch.as_tensor(classes).long().cpu()
    groups = 0 if ids is None else max(int(ids.max()) + 1, 1)
    call = AttentionCall(
        layer=0,
        q=q,
        k=k,
        v=k,
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        visible=geometry.visible,
        softcap=softcap,
        sinks=_sinks(sinks, q),
    )
    return TensorScope(
        _measure(call, geometry, parsed, ids, groups, kernels.choose(backend, q.device))
    )


def _measure(
    call: AttentionCall,
    geometry: Geometry,
    parsed: Queries,
    ids: Tensor | None,
    groups: int,
    backend: str,
) -> Scope:
    scope = Scope(layers=[0], backend=backend, queries=parsed, groups=groups, cross=geometry.cross)
    scope._classes = ids
    end = geometry.first_query + geometry.queries
    totals = LayerAccumulator(first_token=geometry.first_token, position=end, keys=geometry.keys)
    scope._layers[0] = totals
    selection = select(parsed, geometry, CompletionSpan(end, 0), ids, groups)
    if selection is not None:
        _add(call, selection, totals, groups, backend)
    scope._pass_done = True
    scope._check_conservation(call.q.dtype)
    return scope


def _add(
    call: AttentionCall,
    selection: QuerySelection,
    totals: LayerAccumulator,
    groups: int,
    backend: str,
) -> None:
    geometry = selection.geometry
    rows = rows_of(call, selection.all_rows, None, groups)
    sums = compare_unseen(rows, kernels.kernel(backend)(rows))
    totals.add(sums, 0)
    totals.selections.append(selection)
    if call.sinks is not None:
        assert sums.lse is not None
        sink_weights = torch.exp(call.sinks.double()[:, None] - sums.lse)
        totals.add_sink(sink_weights, selection)
    where = positions(selection).to(call.q.device)
    n_visible = int(geometry.visible_ranges[1].max())
    totals.stored.append(store_rows([], rows, where, 0, n_visible, copy=False)[0])


def _check_tensors(q: Any, k: Any) -> tuple[Tensor, Tensor]:
    for name, tensor in {"q": q, "k": k}.items():
        if not isinstance(tensor, Tensor) or tensor.ndim != 4 or not tensor.is_floating_point():
            got = describe(tensor)
            raise InputError(
                f"{name} must be a float tensor [batch, heads, tokens, size]; got {got}",
                code="wrong-shape",
                argument=name,
                got=got,
            )
    if q.device != k.device or q.dtype != k.dtype:
        raise InputError(
            f"q is {q.dtype} on {q.device} and k is {k.dtype} on {k.device}; dtype and device "
            "must be the same",
            code="tensors-differ",
            q=f"{q.dtype} on {q.device}",
            k=f"{k.dtype} on {k.device}",
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise InputError(
            f"q is {list(q.shape)} and k is {list(k.shape)}; batch and size must be equal, and the "
            "number of heads of q a multiple of that of k",
            code="tensors-differ",
            q=list(q.shape),
            k=list(k.shape),
        )
    if 0 in q.shape or 0 in k.shape:
        raise InputError(
            f"q is {list(q.shape)} and k is {list(k.shape)}; every size must be at least 1",
            code="empty-tensor",
            q=list(q.shape),
            k=list(k.shape),
        )
    return q.detach(), k.detach()


def _key_mask(k: Tensor, mask: Any, lengths: Any) -> Tensor | None:
    """bool [B, K] on the CPU; None where nothing is padding."""
    B, K = k.shape[0], k.shape[2]
    if mask is not None and lengths is not None:
        raise InputError(
            "mask and lengths both define the padding; give one of them", code="mask-and-lengths"
        )
    if lengths is not None:
        sizes = torch.as_tensor(lengths).cpu()
        if list(sizes.shape) != [B] or sizes.is_floating_point() or sizes.dtype == torch.bool:
            raise InputError(
                f"lengths must be an int tensor [{B}]; got {describe(sizes)}",
                code="wrong-shape",
                argument="lengths",
                got=describe(sizes),
            )
        if int(sizes.min()) < 1 or int(sizes.max()) > K:
            raise InputError(
                f"lengths must lie in 1 … {K}; got {int(sizes.min())} … {int(sizes.max())}",
                code="out-of-range",
                argument="lengths",
                value=[int(sizes.min()), int(sizes.max())],
            )
        mask = torch.arange(K) < sizes[:, None]
    if mask is None:
        return None
    real = torch.as_tensor(mask).cpu()
    if list(real.shape) != [B, K] or real.is_floating_point():
        raise InputError(
            f"mask must be a bool or int tensor [{B}, {K}] ([batch, keys]), 0 at padding; got "
            f"{describe(real)}",
            code="wrong-shape",
            argument="mask",
            got=describe(real),
        )
    return None if bool(real.bool().all()) else real.bool()


def _geometry(
    q: Tensor, k: Tensor, causal: bool, window: int | None, real: Tensor | None
) -> Geometry:
    B, Q, K = q.shape[0], q.shape[2], k.shape[2]
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise InputError(
            f"window={window!r} must be a whole number from 1: how many keys a query sees",
            code="bad-number",
            argument="window",
            value=window,
        )
    if window is not None and (window < 1 or not causal):
        raise InputError(
            f"window={window!r} must be at least 1, and needs causal=True",
            code="bad-number" if window < 1 else "window-not-causal",
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
        raise InputError(
            f"sinks must be one score for each of {q.shape[1]} heads; got {describe(scores)}",
            code="wrong-shape",
            argument="sinks",
            got=describe(scores),
        )
    return scores.detach()
