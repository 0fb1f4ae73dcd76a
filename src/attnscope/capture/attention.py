"""`watch`: measure a model's attention while it runs, and leave the model as it was.

The seam to transformers: inside the `with` block the model's attention and mask functions are
ours, registered under a name of this watch alone. The output comes from torch's own fused
attention; the statistics from a second, streamed pass over queries and keys.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attnscope import kernels
from attnscope.capture import fallback, masks, sites
from attnscope.capture.queries import parse
from attnscope.capture.recorder import Recorder, device_of
from attnscope.capture.scope import Scope
from attnscope.errors import InputError, ScopeError

__all__ = ["watch"]

_names = itertools.count()
_watched: WeakSet[nn.Module] = WeakSet()


def watch(
    model: nn.Module,
    layers: Any = None,
    queries: Any = "all",
    backend: str = "auto",
    *,
    classes: Any = None,
    top: int = 0,
    seed: int = 0,
) -> AbstractContextManager[Scope]:
    """Measure where the attention of a transformers model goes, inside a `with` block.

        with attnscope.watch(model) as scope:
            model(**inputs)                  # or model.generate(**inputs)
        scope.received(layer)

    layers    which layers to measure, in the model's own numbering; all of them by default
    queries   which tokens' attention counts: "all", "last" (prompt token), "generated",
              "sample:K" (K queries spread over the text: estimates, with standard errors),
              or a bool tensor [batch, keys]
    backend   "auto", or "reference", "streaming", "triton", "eager-fallback"
    classes   int [batch, keys], -1 for none: also tell attention *from* these classes, for `flow`
    top       also keep, for each counted query, this many keys it looks at most
    seed      of "sample:K"
    """
    eager = backend == "eager-fallback"
    found = sites.find(model)
    measured = sites.restrict(found, layers)
    chosen = parse(queries, seed)
    if isinstance(top, bool) or not isinstance(top, int) or top < 0:
        raise InputError(f"top={top!r}: the number of keys to keep is a whole number from 0")
    ids, groups = _classes(classes)
    if not eager:
        backend = kernels.choose(backend, device_of(found))
        if not found.interface:
            backend = "eager-fallback"
    scope = Scope(layers=sorted(measured), backend=backend, queries=chosen, groups=groups)
    scope._classes = ids
    return _watching(found, scope, top)


def _classes(classes: Any) -> tuple[Tensor | None, int]:
    if classes is None:
        return None, 0
    ids = torch.as_tensor(classes)
    if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool or ids.numel() == 0:
        raise InputError(
            "classes is an int tensor [batch, keys] with -1 for no class; got "
            f"{str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
        )
    return ids.long().cpu(), max(int(ids.max()) + 1, 1)


@contextmanager
def _watching(found: sites.Sites, scope: Scope, top: int) -> Iterator[Scope]:
    if any(module in _watched for module in found.modules):
        raise ScopeError("this model is being watched already; leave that with block first")
    recorder = Recorder(found, scope, top)
    with ExitStack() as undo:
        # A compiled graph would not call us: compiled parts run as written while watched.
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        _watched.update(found.modules)
        undo.callback(_watched.difference_update, list(found.modules))
        for hook in recorder.hooks():
            undo.callback(hook.remove)
        undo.callback(recorder.release_cache)
        if scope.backend == "eager-fallback":
            if found.interface:
                _use_implementation(found, "eager", undo)
            fallback.install(found, recorder.measure_weights, undo)
        else:
            _install(found, recorder.attention, undo)
        yield scope


def _install(found: sites.Sites, attention: Callable[..., Any], undo: ExitStack) -> None:
    """Put our attention and mask functions in place, under a name of their own."""
    name = f"attnscope-{next(_names)}"
    AttentionInterface.register(name, attention)
    undo.callback(AttentionInterface._global_mapping.pop, name)
    AttentionMaskInterface.register(name, masks.mask_function)
    undo.callback(AttentionMaskInterface._global_mapping.pop, name)
    _use_implementation(found, name, undo)


def _use_implementation(found: sites.Sites, name: str, undo: ExitStack) -> None:
    """Point the configs of the attention modules at an implementation, until undone.

    Not `set_attn_implementation`: that walks the whole model, and would switch vision towers too.
    """
    modules: list[Any] = [*found.modules, found.base]
    configs = {id(module.config): module.config for module in modules}
    for config in configs.values():
        undo.callback(
            setattr, config, "_attn_implementation_internal", config._attn_implementation_internal
        )
        config._attn_implementation_internal = name
