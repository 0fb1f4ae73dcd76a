"""Intercepts the attention calls of transformers models and delivers them to hooks.

Inside a `with` block, the lookups of attention and mask functions in transformers are patched
(`lookups.py`), and each attention call of the model is run by `dispatch.py`.

Other threads, copies of the model, and vision or audio towers get the original functions. The
configuration of a model is not changed, so the model takes the same code paths as without hooks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from attnscope.interception import patches
from attnscope.interception.captured_call import CapturedCall
from attnscope.interception.compiled_pass import route_passes
from attnscope.interception.dispatch import hook_attention, not_applied
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.hooks import Hook, RegisteredHook, current
from attnscope.interception.lookups import LOOKUPS
from attnscope.interception.pass_hooks import hook_forward_pass, hook_outer_model
from attnscope.interception.sites import Site, Sites, find, outer_models_of, select_sites


@contextmanager
def intercept(
    model: nn.Module,
    on_call: Callable[[CapturedCall], None] | None = None,
    *,
    layers: int | Iterable[int] | None = None,
) -> Iterator[list[CapturedCall]]:
    """Get every attention call of a model inside a `with` block, for a reduction of one's own.

    The model and its outputs stay the same. A call has `site` (stack, layer, kind), `q`, `k`, `v`,
    `lse`, `geometry` (which keys each query sees) and `scale`. It has `weights` instead of the
    tensors if a model computes its own softmax. Tensors are the model's own: read them, do not
    write.

    Args:
        model: A transformers model, or a part of it such as `model.get_encoder()`. A tower for
            pictures or sound, and each encoder of CLIP, is a model: give `model.vision_model`.
        on_call: A function that gets each call when its attention has run; default: the calls of
            the last forward pass are collected in the list that the block gives.
        layers: The layers whose calls are given, in the model's own numbering; default: all.

    Returns:
        A context manager that gives a list of calls; empty with `on_call`.

    Raises:
        InputError: The model has no such layer.
        ModelError: The model cannot be intercepted; raised by a forward pass too.

    Examples:
        >>> import attnscope
        >>> model, tokenizer = attnscope.load("zoo:spatial-phys")
        >>> inputs = tokenizer("The ball is left of the box.", return_tensors="pt")
        >>> with attnscope.intercept(model, layers=[0, 1]) as calls:
        ...     _ = model(**inputs)
        >>> [(call.site.layer, tuple(call.q.shape)) for call in calls]
        [(0, (1, 12, 8, 16)), (1, (1, 12, 8, 16))]
    """
    sites = find(model)
    hook = _CollectCalls(on_call, set(select_sites(sites, layers)))
    with register(sites, hook):
        yield hook.calls


class _CollectCalls(Hook):
    """The hook of `intercept`."""

    in_graphs = True

    def __init__(self, on_call: Callable[[CapturedCall], None] | None, sites: set[Site]):
        self.calls: list[CapturedCall] = []
        self.sites = sites
        self.running: set[str] = set()
        """Stacks whose forward pass runs; a backward pass may run layers again after it."""
        self.deliver = self.calls.append if on_call is None else on_call

    def begin(self, stack: str, forward_pass: ForwardPass) -> None:
        self.running.add(stack)
        self.calls[:] = [call for call in self.calls if call.site.stack != stack]

    def wants(self, site: Site) -> bool:
        return site.stack in self.running and site in self.sites

    def on_call(self, captured: CapturedCall) -> None:
        self.deliver(captured)

    def end(self, stack: str, *, finished: bool) -> None:
        self.running.discard(stack)


@contextmanager
def register(
    sites: Sites, hook: Hook, *, rewritten: Collection[Site] | None = None, dense: bool = False
) -> Iterator[None]:
    """Register a hook for these sites and this thread, in a `with` block.

    `rewritten` are the sites whose calls the hook must rewrite, if it rewrites calls; default: all.
    `dense` computes full weights.
    """
    registered, registry = RegisteredHook(sites, hook, dense), current()
    if registered.rewrites:
        registered.required = _required_modules(sites, rewritten)
    shared: list[tuple[Any, Callable[[], ExitStack]]] = [patches.UNCOMPILED, LOOKUPS]
    for base in {*sites.base_models.values()}:
        shared += [
            (base, partial(hook_forward_pass, base)),
            ((base, "call"), partial(route_passes, base, sites)),
        ]
    shared += [
        ((outer, base), partial(hook_outer_model, outer, base))
        for base, outer_models in outer_models_of(sites).items()
        for outer in outer_models
    ]
    if registered.needs_geometry:
        shared += [(module, partial(hook_attention, module)) for module in sites.hooked]
    with ExitStack() as acquired:
        for key, apply in shared:
            acquired.enter_context(patches.applied(key, apply))
        registry.add(registered)
        try:
            yield
        finally:
            registry.remove(registered)


def _required_modules(sites: Sites, rewritten: Collection[Site] | None) -> frozenset[nn.Module]:
    """The modules that a change of these sites must reach; an error if it cannot reach one."""
    required = frozenset(
        module
        for module, site in sites.modules.items()
        if site.stack in sites.shared_stacks or rewritten is None or site in rewritten
    )
    for module in required & sites.non_interface:
        raise not_applied(
            sites.model,
            module,
            "does not use the attention interface of transformers, so its attention can be "
            "measured but not changed; choose other layers",
        )
    return required
