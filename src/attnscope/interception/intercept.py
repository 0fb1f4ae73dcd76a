"""Intercepts the attention calls of transformers models and delivers them to hooks.

Inside a `with` block, the lookups of attention and mask functions in transformers are patched. A
call goes through all hooks that rewrite it, then through attention, then to all hooks. Attention is
computed once, and all hooks get the same call.

Other threads, copies of the model, and vision or audio towers get the original functions. The
configuration of a model is not changed, so the model takes the same code paths as without hooks.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface

from attnscope.errors import ModelError
from attnscope.interception import dense_fallback, masks, patches
from attnscope.interception.attention_request import AttentionRequest, eager_verified
from attnscope.interception.captured_call import CallSpec, CapturedCall
from attnscope.interception.checkpointing import check_open, runs_again
from attnscope.interception.coverage import name_in, start_check
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.hooks import Hook, HookRegistry, Listeners, RegisteredHook, current
from attnscope.interception.sites import Site, Sites, find, select_sites
from attnscope.kernels import AttentionCall
from attnscope.kernels.attend import attend

_NOTHING = nullcontext()


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
        model: A transformers model, or a part of it such as `model.get_encoder()`.
        on_call: A function that gets each call when its attention has run; default: the calls of
            the last forward pass are collected in the list that the block gives.
        layers: The layers whose calls are given, in the model's own numbering; default: all.

    Returns:
        A context manager that gives a list of calls; empty with `on_call`.

    Raises:
        InputError: The model has no such layer.
        ModelError: The model cannot be intercepted; raised by a forward pass too.

    Example:
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
    shared: list[tuple[Any, Callable[[], ExitStack]]] = [patches.UNCOMPILED, _LOOKUPS]
    shared += [
        (base, partial(_hook_forward_pass, base)) for base in set(sites.base_models.values())
    ]
    hooked = sites.hooked if registered.needs_geometry else ()
    shared += [(module, partial(_hook_module, module)) for module in hooked]
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
        raise _not_applied(
            sites.model,
            module,
            "does not use the attention interface of transformers, so its attention can be "
            "measured but not changed; choose other layers",
        )
    return required


def _not_applied(model: nn.Module, module: nn.Module, reason: str) -> ModelError:
    name = name_in(model, module)
    return ModelError(
        f"{type(module).__name__} {reason} (module {name})",
        code="intervention-not-applied",
        module=name,
    )


class _Lookup(threading.local):
    """Whether `get_interface` is running in this thread; it calls the other lookups."""

    get_interface = False


_inside = _Lookup()
_original_get_interface = AttentionInterface.get_interface
_original_get_item = AttentionInterface.__getitem__
_original_get_mask_function = AttentionMaskInterface.__getitem__


def _get_interface(
    self: AttentionInterface, implementation: str, default: Callable[..., Any]
) -> Callable[..., Any]:
    known = current().interfaces.get((implementation, default))
    if known is not None:
        return known
    _inside.get_interface = True
    try:
        original = _original_get_interface(self, implementation, default)
    finally:
        _inside.get_interface = False
    wrapped: Callable[..., Any] = _wrap(original, default, implementation)
    return wrapped


def _get_or_default(self: AttentionInterface, implementation: str, default: Any = None) -> Any:
    """`ALL_ATTENTION_FUNCTIONS.get`; custom model code may look its function up with it."""
    try:
        original = _original_get_item(self, implementation)
    except KeyError:
        original = default
    return original if original is None else _wrap(original, default, implementation)


def _get_item(self: AttentionInterface, implementation: str) -> Any:
    """`ALL_ATTENTION_FUNCTIONS[…]`; this lookup does not name the family's eager attention."""
    return _wrap(_original_get_item(self, implementation), None, implementation)


def _wrap(original: Any, default: Any, implementation: str) -> Any:
    """The function that a model gets in place of an attention function."""
    registry = current()
    if _inside.get_interface or not any(hook.listens for hook in registry.hooks):
        return original
    wrapped = partial(_attention, registry, original, default, implementation)
    if default is not None:
        registry.interfaces[implementation, default] = wrapped
    return wrapped


def _get_mask_function(self: AttentionMaskInterface, implementation: str) -> Callable[..., Any]:
    original: Callable[..., Any] = _original_get_mask_function(self, implementation)
    if not any(hook.needs_geometry for hook in current().hooks):
        return original
    return partial(masks.build_tagged_mask, original, implementation)


_LOOKUPS = patches.lookups(
    {"get_interface": _get_interface, "get": _get_or_default, "__getitem__": _get_item},
    _get_mask_function,
)


def _attention(
    registry: HookRegistry,
    original: Callable[..., Any],
    eager: Callable[..., Any] | None,
    implementation: str,
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run one attention call of a model: interpret, rewrite, attend, deliver to hooks."""
    eager = eager or _eager_of(module)
    listeners = registry.listeners(module)
    if listeners is None:
        for forward_pass in registry.passes.values():
            if forward_pass.check is not None:
                forward_pass.check.add_missed([module])
        return AttentionRequest.parse(
            original, eager, implementation, module, args, kwargs
        ).call_original()
    forward_pass = registry.pass_of(listeners)
    forward_pass.note_layer()
    if listeners.can_match and len(args) == 4 and module not in forward_pass.last_qk:
        q, k, v, mask = args
        signature = original, eager, implementation, mask, listeners.hooks[0][1].kind
        spec = forward_pass.spec_for(signature, kwargs, q, k, v)
        if (
            spec is not None
            and spec.attend is not None
            and not (q.requires_grad or k.requires_grad or v.requires_grad)
            and not torch.is_autocast_enabled(q.device.type)
            and (implementation != "eager" or eager_verified(module, eager))
        ):
            forward_pass.last_qk[module] = ref(q), ref(k)
            return _attend_matched(listeners, spec, spec.attend, q, k, v)
    request = AttentionRequest.parse(original, eager, implementation, module, args, kwargs)
    return _attend_parsed(listeners, forward_pass, request)


def _attend_matched(
    listeners: Listeners, spec: CallSpec, attend: Any, q: Tensor, k: Tensor, v: Tensor
) -> Any:
    """Run a call that matches the spec of an earlier layer."""
    keys = spec.geometry.keys
    if k.shape[2] != keys:  # a static cache has more keys than tokens
        k, v = k[:, :, :keys], v[:, :, :keys]
    out, lse = attend(q, k, v)
    _deliver(_observers(listeners.hooks), spec, q, k, v, lse)
    return out.transpose(1, 2).contiguous(), None


def _attend_parsed(
    listeners: Listeners, forward_pass: ForwardPass, request: AttentionRequest
) -> Any:
    """Run a call whose arguments are interpreted first."""
    hook_sites = _sites_in_pass(listeners, forward_pass)
    repeated = forward_pass.is_repeat(request.module, *request.unrounded[:2])
    observers = [] if repeated else _observers(hook_sites)
    if not listeners.needs_geometry:
        _deliver(observers, None, request.q, request.k, request.v)
        return request.call_original()
    request.interpret(hook_sites[0][1], forward_pass)
    call, spec = request.call, request.spec
    if listeners.rewrites:
        call = _rewrite_call(hook_sites, request)
        if call is not request.call:
            spec = CallSpec.of_call(call, request.geometry)
    output, lse, weights = _attend(
        request,
        call,
        need_lse=any(registered.hook.needs_geometry for registered, _ in observers),
        dense=any(registered.dense for registered, _ in observers),
        observed=bool(observers),
    )
    if lse is None:
        spec.attend = None
    _deliver(observers, spec, call.q, call.k, call.v, lse, weights)
    return output


HookSites = list[tuple[RegisteredHook, Site]]


def _observers(hook_sites: HookSites) -> HookSites:
    """The hooks that want the call of their site in this pass."""
    return [(registered, site) for registered, site in hook_sites if registered.hook.wants(site)]


def _deliver(
    observers: HookSites,
    spec: CallSpec | None,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    lse: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Give a call to the hooks that want it."""
    with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
        for registered, site in observers:
            registered.hook.on_call(CapturedCall(site, spec, q, k, v, lse, weights))


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of a module's family, by the name that transformers gives it."""
    module_globals = getattr(module.forward, "__globals__", {})
    eager: Callable[..., Any] = module_globals.get(
        "eager_attention_forward", dense_fallback.eager_sdpa
    )
    return eager


def _rewrite_call(
    hook_sites: list[tuple[RegisteredHook, Site]], request: AttentionRequest
) -> AttentionCall:
    """Apply the changes of all hooks to a call."""
    call = request.call
    for registered, site in hook_sites:
        call = registered.hook.rewrite_call(site, call, request.geometry)
    if call is not request.call:
        request.check_can_change()
    return call


def _attend(
    request: AttentionRequest, call: AttentionCall, *, need_lse: bool, dense: bool, observed: bool
) -> tuple[Any, Tensor | None, Tensor | None]:
    """Run a call: (what the attention function returns, log-sum-exp, weights).

    The weights are computed only if an observer needs them and no smaller description exists.
    """
    changed = call is not request.call
    if not dense and not request.needs_weights(call):
        out, lse = attend(call, dropout=request.dropout, need_lse=need_lse)
        if changed or request.eager_matches(out):
            return (out.transpose(1, 2).contiguous(), None), lse, None
    if not changed and not observed:
        return request.call_original(), None, None
    output, weights = request.call_dense(call)
    return output, None, weights


def _sites_in_pass(
    listeners: Listeners, forward_pass: ForwardPass
) -> list[tuple[RegisteredHook, Site]]:
    """The hooks of a module with their sites in this pass.

    A module that a pass calls several times is the next layer each time.
    """
    (registered, site), *_ = listeners.hooks
    if site.stack not in registered.sites.shared_stacks:
        return listeners.hooks
    layer = forward_pass.loop_counts[site.stack]
    forward_pass.loop_counts[site.stack] = layer + 1
    return [(registered, Site(site.stack, layer)) for registered, site in listeners.hooks]


def _hook_module(module: nn.Module) -> ExitStack:
    return dense_fallback.hook(module, _on_weights, _on_sdpa)


def _on_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replaces torch's sdpa for a module that calls it directly; parameter names are torch's."""
    output, _ = _attention(
        current(),
        dense_fallback.original_sdpa,
        dense_fallback.eager_sdpa,
        "sdpa",
        module,
        query,
        key,
        value,
        attn_mask,
        dropout=dropout_p,
        is_causal=is_causal,
        scaling=scale,
        enable_gqa=enable_gqa,
    )
    result: Tensor = output.transpose(1, 2)
    return result


def _on_weights(
    module: nn.Module, listeners: Listeners, mask: Any, weights: Tensor, visible: Tensor
) -> None:
    """Deliver the weights of a module that does not use the attention interface."""
    forward_pass = current().pass_of(listeners)
    hook_sites = _sites_in_pass(listeners, forward_pass)
    forward_pass.captured.add(module)
    for registered, _ in hook_sites:
        if module in registered.required:
            raise _not_applied(
                registered.sites.model,
                module,
                "ran its attention without the intervention; load the model with "
                "attn_implementation='sdpa', or choose other layers",
            )
    observers = _observers([each for each in hook_sites if each[0].needs_geometry])
    if observers:
        cross = hook_sites[0][1].kind == "cross"
        geometry = dense_fallback.geometry_of_weights(
            weights, mask, forward_pass, visible, cross=cross
        )
        _deliver(observers, CallSpec.of_weights(geometry), weights=weights)


def _hook_forward_pass(base: nn.Module) -> ExitStack:
    undo = ExitStack()

    # A copy of the model keeps these hooks. Functions, because methods would be copied too.
    def begin(this: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if this is base:
            _start_pass(base, args, kwargs)

    def end(this: nn.Module, args: Any, output: Any) -> None:
        if this is base:
            _end_pass(base, output)

    undo.callback(base.register_forward_pre_hook(begin, with_kwargs=True).remove)
    undo.callback(base.register_forward_hook(end, always_call=True).remove)
    return undo


def _start_pass(base: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    registry = current()
    hooks = registry.hooks_of(base)
    if not hooks:
        return
    forward_pass = registry.passes[base] = ForwardPass.of(base, args, kwargs)
    registry.interfaces.clear()  # other functions may be registered since the last pass
    stacks = [(registered.sites, stack) for registered, stack in hooks if registered.needs_geometry]
    forward_pass.check = start_check(base, stacks)
    for registered, stack in hooks:
        registered.hook.begin(stack, forward_pass)


def _end_pass(base: nn.Module, output: Any) -> None:
    """Finish a forward pass; `output` is None if it raised an error."""
    registry = current()
    forward_pass, hooks = registry.passes.get(base), registry.hooks_of(base)
    complete = False
    try:
        if forward_pass is not None:
            forward_pass.stop_check()
            check, forward_pass.check = forward_pass.check, None
            forward_pass.specs.clear()  # they hold masks and arguments of the layers
            if check is not None and output is not None:
                check.raise_if_missed(forward_pass.intercepted())
        complete = output is not None
    finally:
        for registered, stack in hooks:
            registered.hook.end(stack, finished=complete)
    if forward_pass is not None and torch.is_grad_enabled():
        _follow_backward(registry, base, forward_pass, output)


def _follow_backward(
    registry: HookRegistry, base: nn.Module, forward_pass: ForwardPass, output: Any
) -> None:
    """Note the backward pass that reaches these outputs, and check that blocks are still open.

    Layers that it runs again belong to the thread of this forward pass.
    """
    needed = [hook for hook, _ in registry.hooks_of(base) if runs_again(base, forward_pass, hook)]

    def on_backward(gradient: Tensor) -> None:
        registry.backward_task = torch._C._current_graph_task_id()
        check_open(hook in registry.hooks for hook in needed)

    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(on_backward)  # type: ignore[no-untyped-call]
