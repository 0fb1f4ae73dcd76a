"""`stats`: the numbers of a scope for plain queries and keys, where there is no model to watch."""

import inspect
from functools import partial
from typing import Any

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
from attnscope.capture.stored_rows import keep
from attnscope.capture.sums import LayerAccumulator
from attnscope.errors import InputError
from attnscope.kernels import AttentionCall
from attnscope.kernels.call import WITHOUT_FLOAT64


class Stats:
    """What attention did, as a `Scope` tells it, without a layer to name: `received()`,
    `mass(class_ids, n)`, `rows(class_ids, n)`, `measure("entropy")` and all the others."""

    def __init__(self, scope: Scope):
        self._scope = scope
        self.backend = scope.backend

    def __getattr__(self, name: str) -> Any:
        if name == "measure":
            return lambda measure: self._scope.measure(measure, 0)
        if name not in _READINGS:
            raise AttributeError(f"stats have no {name!r}; they have {', '.join(dir(self))}")
        return partial(getattr(self._scope, name), 0)

    def __dir__(self) -> list[str]:
        return sorted([*_READINGS, "backend", "measure"])

    def __repr__(self) -> str:
        return repr(self._scope).replace("<Scope of 1 layers,", "<Stats of")


_READINGS = {
    name
    for name, method in inspect.getmembers(Scope, inspect.isfunction)
    if not name.startswith("_") and list(inspect.signature(method).parameters)[1:2] == ["layer"]
}


def stats(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    mask: Any = None,
    lengths: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    queries: Any = "all",
    classes: Any = None,
    backend: str = "auto",
) -> Stats:
    """Where attention goes, from queries [batch, heads, queries, size] and keys
    [batch, key/value heads, keys, size], never n × n.

        found = attnscope.stats(q, k, scale=0.125)
        found.received()                       # [batch, heads, keys]
        found.rows(class_ids, n)               # [batch, heads, queries, n]

    scale     what scores are multiplied by; 1 / sqrt(size) by default
    causal    whether a query sees the keys up to its own alone. The queries are the last of the
              keys: all of them, or those of a decoding step. Otherwise every query sees every
              key; where there are not as many keys as queries, those are another text's
    window    how many keys a query sees, its own included (with `causal`)
    mask      bool or int [batch, keys], 0 at padding; or `lengths`, int [batch], where the padding
              is at the end
    softcap, sinks   as in the models that have them: cap · tanh(score / cap), and a score [heads]
              without a key
    queries   "all", "last", or a bool tensor [batch, keys]
    classes   int [batch, keys], -1 for none, for `flow`
    """
    q, k = _checked(q, k)
    if q.device.type in WITHOUT_FLOAT64:
        q, k = q.cpu(), k.cpu()
    frame = _frame(q, k, causal, window, _real(k, mask, lengths))
    asked = _queries(queries)
    ids = None if classes is None else torch.as_tensor(classes).long().cpu()
    groups = 0 if ids is None else max(int(ids.max()) + 1, 1)
    call = AttentionCall(
        layer=0,
        q=q,
        k=k,
        v=k,
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        visible=frame.visible,
        softcap=softcap,
        sinks=_sinks(sinks, q),
    )
    return Stats(_measured(call, frame, asked, ids, groups, kernels.choose(backend, q.device)))


def _measured(
    call: AttentionCall,
    frame: Geometry,
    asked: Queries,
    ids: Tensor | None,
    groups: int,
    backend: str,
) -> Scope:
    scope = Scope(layers=[0], backend=backend, queries=asked, groups=groups, cross=frame.cross)
    scope._classes = ids
    end = frame.first_query + frame.queries
    totals = LayerAccumulator(first=frame.first_real, position=end, keys=frame.keys)
    scope._layers[0] = totals
    selection = select(asked, frame, CompletionSpan(end, 0), ids, groups)
    if selection is not None:
        _add(call, selection, totals, groups, backend)
    scope._complete = True
    scope._check(call.q.dtype)
    return scope


def _add(
    call: AttentionCall,
    selection: QuerySelection,
    totals: LayerAccumulator,
    groups: int,
    backend: str,
) -> None:
    frame = selection.frame
    rows = rows_of(call, selection.whole, None, groups)
    sums = compare_unseen(rows, kernels.kernel(backend)(rows))
    totals.add(sums, 0)
    totals.selections.append(selection)
    if call.sinks is not None:
        assert sums.lse is not None
        taken = torch.exp(call.sinks.double()[:, None] - sums.lse)
        totals.add_sink(taken, selection)
    where = positions(selection).to(call.q.device)
    seen = int(frame.intervals[1].max())
    totals.kept.append(keep([], rows, where, 0, seen, copy=False)[0])


def _checked(q: Any, k: Any) -> tuple[Tensor, Tensor]:
    for name, tensor in {"q": q, "k": k}.items():
        if not isinstance(tensor, Tensor) or tensor.ndim != 4 or not tensor.is_floating_point():
            got = type(tensor).__name__
            if isinstance(tensor, Tensor):
                got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise InputError(f"{name} is a float tensor [batch, heads, tokens, size]; got {got}")
    if q.device != k.device or q.dtype != k.dtype:
        raise InputError(
            f"q is {q.dtype} on {q.device} and k is {k.dtype} on {k.device}; they must be alike"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise InputError(
            f"q is {list(q.shape)} and k is {list(k.shape)}; batch and size must be equal, and the "
            "heads of q a multiple of those of k"
        )
    if 0 in q.shape or 0 in k.shape:
        raise InputError(f"q is {list(q.shape)} and k is {list(k.shape)}: there is nothing in them")
    return q.detach(), k.detach()


def _real(k: Tensor, mask: Any, lengths: Any) -> Tensor | None:
    """bool [B, K] on the CPU; None where nothing is padding."""
    B, K = k.shape[0], k.shape[2]
    if mask is not None and lengths is not None:
        raise InputError("give either mask or lengths: both say what is padding")
    if lengths is not None:
        sizes = torch.as_tensor(lengths).cpu()
        if list(sizes.shape) != [B] or sizes.is_floating_point() or sizes.dtype == torch.bool:
            raise InputError(f"lengths is an int tensor [{B}]; got {list(sizes.shape)}")
        if int(sizes.min()) < 1 or int(sizes.max()) > K:
            raise InputError(
                f"lengths must lie in 1 … {K}; found {int(sizes.min())} … {int(sizes.max())}"
            )
        mask = torch.arange(K) < sizes[:, None]
    if mask is None:
        return None
    real = torch.as_tensor(mask).cpu()
    if list(real.shape) != [B, K] or real.is_floating_point():
        raise InputError(
            f"mask is a bool or int tensor [{B}, {K}] ([batch, keys]), 0 at padding; got "
            f"{str(real.dtype).removeprefix('torch.')} {list(real.shape)}"
        )
    return None if bool(real.bool().all()) else real.bool()


def _frame(q: Tensor, k: Tensor, causal: bool, window: int | None, real: Tensor | None) -> Geometry:
    B, Q, K = q.shape[0], q.shape[2], k.shape[2]
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise InputError(f"window={window!r}: how many keys a query sees is a whole number from 1")
    if window is not None and (window < 1 or not causal):
        raise InputError(f"window={window!r} is from 1 on, and goes with causal=True")
    start, stop = torch.zeros(B, Q, dtype=torch.int64), torch.full((B, Q), K)
    if not causal:
        frame = build_geometry(start, stop, real, max(K - Q, 0), 0, K, q.device)
        return frame if Q == K else frame.across(0, None)
    if Q > K:
        raise InputError(
            f"{Q} queries and {K} keys: with causal=True the queries are the last of the keys; "
            "give the keys that came before them too, or causal=False for another text's"
        )
    own = torch.arange(K - Q, K).expand(B, Q)
    if window is not None:
        start = (own - window + 1).clamp(min=0)
    return build_geometry(start, own + 1, real, K - Q, 0, K, q.device)


def _queries(queries: Any) -> Queries:
    asked = parse(queries, 0)
    if asked.name not in ("all", "last", "mask"):
        raise InputError(
            f"queries={queries!r} goes with a model that is watched; here: 'all', 'last', or a "
            "bool tensor [batch, keys]"
        )
    return asked


def _sinks(sinks: Any, q: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    given = torch.as_tensor(sinks, device=q.device)
    if list(given.shape) != [q.shape[1]]:
        raise InputError(f"sinks is one score for each of {q.shape[1]} heads; got {given.shape}")
    return given.detach()
