"""Intercepts the attention calls of transformers models and dispatches them to hooks.

Inside a `with` block, the lookups of attention and mask functions in transformers are patched. A
call goes through all changes, then through attention, then to all observers. Attention is computed
once, and all observers get the same call, geometry and log-sum-exp.

Other threads, copies of the model, and vision or audio towers get the original functions. The
configuration of a model is not changed, so the model takes the same code paths as without hooks.
"""

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attnscope.capture import dense_fallback, masks, patches
from attnscope.capture.call_spec import AttentionRequest, eager_verified
from attnscope.capture.coverage import Check, name_in
from attnscope.capture.forward_pass import CallSpec, ForwardPass, same_options
from attnscope.capture.hook_registry import (
    CapturedCall,
    Change,
    DeferredGroup,
    HookRegistry,
    Observer,
    RegisteredHook,
)
from attnscope.capture.sites import Site, Sites, argument
from attnscope.errors import ModelError
from attnscope.kernels import AttentionCall
from attnscope.kernels.attend import attend


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.registry = HookRegistry()
        self.use_original = False
        """Whether lookups return the original functions of transformers."""

    @contextmanager
    def original_lookups(self) -> Iterator[None]:
        self.use_original = True
        try:
            yield
        finally:
            self.use_original = False


_local = _ThreadState()
_NOTHING = nullcontext()
_all_registries: list[HookRegistry] = []


@contextmanager
def register(
    sites: Sites,
    *,
    observer: Observer | None = None,
    change: Change | None = None,
    layers: Collection[int] | None = None,
    dense: bool = False,
) -> Iterator[None]:
    """Register an observer, a change or both for these sites and this thread, in a `with` block.

    `layers` are the layers that the change must reach; default: all. `dense` computes full weights.
    """
    hook, registry = RegisteredHook(sites, observer, change, dense), _local.registry
    if change is not None:
        hook.required = _required_modules(sites, layers)
    shared: list[tuple[Any, Callable[[], ExitStack]]] = [
        patches.UNCOMPILED,
        ("lookups", _patch_lookups),
    ]
    shared += [
        (base, partial(_hook_forward_pass, base)) for base in set(sites.base_models.values())
    ]
    shared += [(m, partial(_hook_module, m)) for m in (sites.hooked if hook.needs_geometry else ())]
    for module in hook.required:
        base = sites.base_models[sites.modules[module].stack]
        shared.append(((module, "runs"), partial(_hook_runs, module, base)))
    acquired = []
    try:
        for key, apply in shared:
            patches.acquire(key, apply)
            acquired.append(key)
        registry.add(hook)
        _all_registries.append(registry)
        try:
            yield
        finally:
            _all_registries.remove(registry)
            registry.remove(hook)
    finally:
        for key in reversed(acquired):
            patches.release(key)


def _required_modules(sites: Sites, layers: Collection[int] | None) -> frozenset[nn.Module]:
    """The modules that a change of these layers must reach; an error if it cannot reach one."""
    required = frozenset(
        module
        for module, (stack, layer, kind) in sites.modules.items()
        if stack in sites.shared_stacks or layers is None or (layer in layers and kind == "self")
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


def _patch_lookups() -> ExitStack:
    undo = ExitStack()
    undo.callback(setattr, AttentionInterface, "get_interface", AttentionInterface.get_interface)
    AttentionInterface.get_interface = _get_interface
    for name, wrapped in (("get", _get_or_default), ("__getitem__", _get_item)):
        undo.callback(delattr, AttentionInterface, name)
        setattr(AttentionInterface, name, wrapped)
    undo.callback(delattr, AttentionMaskInterface, "__getitem__")
    AttentionMaskInterface.__getitem__ = _get_mask_function
    return undo


_original_get_interface = AttentionInterface.get_interface
_original_get_item = AttentionInterface.__getitem__
_original_get_mask_function = AttentionMaskInterface.__getitem__


def _get_interface(
    self: AttentionInterface, implementation: str, default: Callable[..., Any]
) -> Callable[..., Any]:
    registry = _local.registry
    known: Callable[..., Any] | None = registry.interfaces.get((implementation, default))
    if known is not None:
        return known
    with _local.original_lookups():
        original = _original_get_interface(self, implementation, default)
    wrapped: Callable[..., Any] = _wrap(original, default, implementation)
    return wrapped


def _get_or_default(self: AttentionInterface, implementation: str, default: Any = None) -> Any:
    """`ALL_ATTENTION_FUNCTIONS.get`; custom model code may look its function up with it."""
    try:
        original = _original_get_item(self, implementation)
    except KeyError:
        original = default
    if _local.use_original or original is None:
        return original
    return _wrap(original, default, implementation)


def _get_item(self: AttentionInterface, implementation: str) -> Any:
    """`ALL_ATTENTION_FUNCTIONS[…]`; this lookup does not name the family's eager attention."""
    original = _original_get_item(self, implementation)
    return original if _local.use_original else _wrap(original, None, implementation)


def _wrap(original: Any, default: Any, implementation: str) -> Any:
    """The function that a model gets in place of an attention function."""
    registry = _local.registry
    if not registry.hooks and torch._C._current_graph_task_id() == -1:
        return original
    wrapped = partial(_attention, registry, original, default, implementation)
    if registry.hooks and default is not None:
        registry.interfaces[implementation, default] = wrapped
    return wrapped


def _get_mask_function(self: AttentionMaskInterface, implementation: str) -> Callable[..., Any]:
    original: Callable[..., Any] = _original_get_mask_function(self, implementation)
    if not _local.registry.n_needs_geometry:
        return original
    return partial(masks.build_tagged_mask, original, implementation)


def _attention(
    registry: HookRegistry,
    original: Callable[..., Any],
    eager: Callable[..., Any] | None,
    implementation: str,
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run one attention call of a model: parse, change, attend, deliver to observers."""
    eager = eager or _eager_of(module)
    request = AttentionRequest.parse(original, eager, implementation, module, args, kwargs)
    registry = _registry_in_backward(registry)
    hook_sites = registry.hooks_for_module(module)
    if not hook_sites:
        for check in registry.running_checks():
            check.add_missed([module])
        return request.call_original()
    forward_pass, hook_sites = _forward_pass_of(registry, hook_sites)
    observers: list[tuple[Observer, Site]] = []
    needs_geometry = changes = dense = False
    _deliver_deferred(forward_pass)
    repeated = forward_pass.is_repeat(module, *request.unrounded[:2])
    for hook, site in hook_sites:
        observer = hook.observer
        if hook.change is not None:
            changes = True
        if observer is not None and not repeated and observer.wants(site):
            observers.append((observer, site))
            needs_geometry |= observer.needs_geometry
            dense |= hook.dense
    if not needs_geometry and not any(hook.needs_geometry for hook, _ in hook_sites):
        for observer, site in observers:
            observer.on_call(CapturedCall(site=site, values=request.v))
        return request.call_original()
    request.interpret(hook_sites[0][1], forward_pass)
    call = _rewrite_call(hook_sites, request) if changes else request.call
    if changes:
        forward_pass.changed.add(module)
    output, lse, weights = _attend(
        request, call, need_lse=needs_geometry, dense=dense, observed=bool(observers)
    )
    with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
        for observer, site in observers:
            observer.on_call(
                CapturedCall(
                    site=site,
                    values=call.v,
                    geometry=request.geometry,
                    call=call if weights is None else None,
                    lse=lse,
                    weights=weights,
                    spec=request.spec if call is request.call else None,
                    changed=call is not request.call,
                    sinks=call.sinks is not None,
                )
            )
        if request.spec is not None and lse is not None and not repeated and call is request.call:
            _install_fast_path(registry, forward_pass, hook_sites, request, request.spec)
    return output


def _registry_in_backward(registry: HookRegistry) -> HookRegistry:
    """The registry of the thread that ran the forward pass.

    In a backward pass, gradient checkpointing recomputes layers in any thread.
    """
    task = torch._C._current_graph_task_id()
    if task == -1:
        return registry
    others = (other for other in tuple(_all_registries) if other.backward_task == task)
    return next(others, registry)


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of a module's family, by the name that transformers gives it."""
    module_globals = getattr(module.forward, "__globals__", {})
    eager: Callable[..., Any] = module_globals.get(
        "eager_attention_forward", dense_fallback.eager_sdpa
    )
    return eager


def _install_fast_path(
    registry: HookRegistry,
    forward_pass: ForwardPass,
    hook_sites: list[tuple[RegisteredHook, Site]],
    request: AttentionRequest,
    spec: CallSpec,
) -> None:
    """Install the fast path: later layers with the same signature are not parsed, only queued."""
    module_group = None if spec.attend is None else registry.module_group(hook_sites)
    if module_group is None:
        return
    limit, needed = sys.maxsize, False
    for hook, site in hook_sites:
        assert hook.deferred_observer is not None
        hook_limit, needs_tensors = hook.deferred_observer.queue_limit(site, spec)
        limit, needed = min(limit, hook_limit), needed or needs_tensors
    group: DeferredGroup | None = forward_pass.deferred_groups.get(id(request.mask))
    if group is not None and group.spec is spec:
        group.remaining.pop(request.module, None)
        group.limit = limit
    elif group is None and limit > 0:
        observers = [
            (hook.deferred_observer, hook.sites.modules)
            for hook, _ in hook_sites
            if hook.deferred_observer is not None
        ]
        remaining = module_group.copy() if needed else dict.fromkeys(module_group, False)
        for module in forward_pass.last_qk:
            remaining.pop(module, None)
        if request.implementation == "eager":
            remaining = {
                module: n
                for module, n in remaining.items()
                if eager_verified(module, request.eager)
            }
        group = forward_pass.deferred_groups[id(request.mask)] = DeferredGroup(
            spec, remaining, limit, observers
        )
        key = request.implementation, request.eager
        original = registry.interfaces.get(key)
        if original is None:
            original = partial(
                _attention, registry, request.original, request.eager, request.implementation
            )
        registry.interfaces[key] = _fast_attention(group, original)


def _fast_attention(group: DeferredGroup, original: Callable[..., Any]) -> Callable[..., Any]:
    """The fast path: if the signature matches, call the fused operator and queue q, k, lse.

    Written without helpers, because its time dominates the overhead of small models.
    """
    spec, remaining = group.spec, group.remaining
    attend, known, options = spec.attend, spec.signature[3], spec.options
    (q_shape, k_shape, v_shape), dtype, device = spec.shapes, spec.dtype, spec.device
    kind, is_autocast_enabled = device.type, torch.is_autocast_enabled
    assert attend is not None

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 4:
            q, k, v, mask = args
            if (
                mask is known
                and module in remaining
                and q.shape == q_shape
                and k.shape == k_shape
                and v.shape == v_shape
                and q.dtype is dtype
                and q.device == device
                and not (q.requires_grad or k.requires_grad or v.requires_grad)
                and not is_autocast_enabled(kind)
                and len(group.calls) < group.limit
                and same_options(options, kwargs)
            ):
                out, lse = attend(q, k, v)
                if remaining.pop(module):
                    group.calls.append((module, q, k, lse))
                else:
                    group.calls.append((module, ref(q), ref(k), None))
                return out.transpose(1, 2).contiguous(), None
        return original(module, *args, **kwargs)

    return attention


def _deliver_deferred(forward_pass: ForwardPass) -> None:
    """Deliver queued calls, so that observers receive all calls in order."""
    for group in forward_pass.deferred_groups.values():
        for module, q, k, lse in group.calls:
            forward_pass.last_qk[module] = (q, k) if lse is None else (ref(q), ref(k))
        if group.calls:
            group.deliver()


def _rewrite_call(
    hook_sites: list[tuple[RegisteredHook, Site]], request: AttentionRequest
) -> AttentionCall:
    """Apply all changes to a call."""
    call = request.call
    for hook, site in hook_sites:
        if hook.change is not None:
            call = hook.change(site, call, request.geometry)
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


def _forward_pass_of(
    registry: HookRegistry, hook_sites: list[tuple[RegisteredHook, Site]], *, count: bool = True
) -> tuple[ForwardPass, list[tuple[RegisteredHook, Site]]]:
    """The forward pass of a module, and its (hook, site) pairs in that pass.

    A module that a pass calls several times is the next layer each time.
    """
    (hook, site), *_ = hook_sites
    forward_pass = registry.passes.get(hook.sites.base_models[site.stack]) or ForwardPass()
    if count and site.stack in hook.sites.shared_stacks:
        layer = forward_pass.loop_counts[site.stack]
        forward_pass.loop_counts[site.stack] = layer + 1
        hook_sites = [(hook, Site(site.stack, layer)) for hook, site in hook_sites]
    return forward_pass, hook_sites


def _hook_module(module: nn.Module) -> ExitStack:
    return dense_fallback.hook(
        module, _is_watched, _on_weights, _on_sdpa, intercepted=_intercepted, name_of=_module_name
    )


def _module_name(module: nn.Module) -> str:
    """The name of a module in the watched model."""
    (hook, _), *_ = _local.registry.hooks_for_module(module)
    return name_in(hook.sites.model, module)


def _intercepted(module: nn.Module) -> bool:
    """Whether a module used the attention interface in this pass."""
    registry = _local.registry
    forward_pass, _ = _forward_pass_of(registry, registry.hooks_for_module(module), count=False)
    return module in _captured(forward_pass)


def _captured(forward_pass: ForwardPass) -> set[nn.Module]:
    """The modules whose attention in this pass was delivered or is queued."""
    deferred = {call[0] for group in forward_pass.deferred_groups.values() for call in group.calls}
    return {*forward_pass.last_qk, *forward_pass.captured, *deferred}


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
        _local.registry,
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


def _is_watched(module: nn.Module) -> bool:
    """Whether a hook of this thread needs the attention of a module."""
    return any(hook.needs_geometry for hook, _ in _local.registry.hooks_for_module(module))


def _on_weights(module: nn.Module, mask: Any, weights: Tensor, visible: Tensor) -> None:
    """Deliver the weights of a module that does not use the attention interface."""
    registry = _local.registry
    forward_pass, hook_sites = _forward_pass_of(registry, registry.hooks_for_module(module))
    forward_pass.captured.add(module)
    observers = [
        (hook.observer, site)
        for hook, site in hook_sites
        if hook.observer is not None and hook.needs_geometry and hook.observer.wants(site)
    ]
    if observers:
        geometry = dense_fallback.geometry_of_weights(
            weights, mask, forward_pass, visible, cross=hook_sites[0][1].kind == "cross"
        )
        for observer, site in observers:
            observer.on_call(CapturedCall(site=site, geometry=geometry, weights=weights))


def _hook_forward_pass(base: nn.Module) -> ExitStack:
    undo = ExitStack()

    # A copy of the model keeps these hooks. Functions, because methods would be copied too.
    def begin(this: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if this is base:
            _start_pass(base, args, kwargs)

    def end(this: nn.Module, args: Any, output: Any) -> None:
        if this is base:
            _end_pass(base, finished=output is not None)
            if torch.is_grad_enabled():
                _mark_backward(_local.registry, base, output)

    undo.callback(base.register_forward_pre_hook(begin, with_kwargs=True).remove)
    undo.callback(base.register_forward_hook(end, always_call=True).remove)
    return undo


def _mark_backward(registry: HookRegistry, base: nn.Module, output: Any) -> None:
    """Record the id of the backward pass that reaches these outputs.

    Layers that it recomputes belong to the thread of this forward pass.
    """
    if isinstance(output, Tensor) and output.requires_grad and registry.observed_stacks(base):

        def mark(gradient: Tensor) -> None:
            registry.backward_task = torch._C._current_graph_task_id()

        output.register_hook(mark)  # type: ignore[no-untyped-call]
    elif isinstance(output, dict | tuple | list):
        for part in output.values() if isinstance(output, dict) else output:
            _mark_backward(registry, base, part)


def _hook_runs(module: nn.Module, base: nn.Module) -> ExitStack:
    """Record when a module runs that a change must reach."""
    undo = ExitStack()

    def note(this: nn.Module, args: Any) -> None:
        forward_pass = _local.registry.passes.get(base)
        if this is module and forward_pass is not None:
            forward_pass.ran.add(module)

    undo.callback(module.register_forward_pre_hook(note).remove)
    return undo


def _start_pass(base: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    registry = _local.registry
    observed_stacks = registry.observed_stacks(base)
    if not observed_stacks:
        return
    cache = argument(base, "past_key_values", args, kwargs)
    registry.stop_check(base)
    forward_pass = registry.passes[base] = ForwardPass.of(base, args, kwargs)
    registry.interfaces.clear()  # other functions may be registered since the last pass
    unchecked_stacks = registry.unchecked_stacks(base)
    if unchecked_stacks:
        forward_pass.check = Check(base, registry.sites_of_base(base))
        forward_pass.check.begin()
    for observer, stack in observed_stacks:
        if observer is not None:
            observer.begin(stack, cache)


def last_pass(base: nn.Module) -> ForwardPass:
    """The last forward pass of a base model, in this thread."""
    return _local.registry.passes.get(base) or ForwardPass()


def _end_pass(base: nn.Module, *, finished: bool) -> None:
    registry = _local.registry
    forward_pass, observed_stacks = registry.passes.get(base), registry.observed_stacks(base)
    delivered = False
    registry.stop_check(base)
    try:
        if forward_pass is not None and finished:
            _check_coverage(registry, base, forward_pass)
            with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
                for group in forward_pass.deferred_groups.values():
                    if group.calls:
                        group.deliver()
        delivered = finished
    finally:  # a failed delivery aborts the pass too
        if forward_pass is not None:
            forward_pass.clear()
        for observer, stack in observed_stacks:
            if observer is not None:
                observer.end(stack, finished=delivered)


def _check_coverage(registry: HookRegistry, base: nn.Module, forward_pass: ForwardPass) -> None:
    """Raise an error if a pass ran attention that was not intercepted, or missed a change."""
    check, forward_pass.check = forward_pass.check, None
    if check is not None:
        captured = _captured(forward_pass)
        for sites, stack in registry.unchecked_stacks(base):
            check.raise_if_missed(sites, stack, captured)
    for hook in registry.hooks:
        missing = hook.required & forward_pass.ran - forward_pass.changed
        for module in (module for module in hook.sites.modules if module in missing):
            raise _not_applied(
                hook.sites.model,
                module,
                "ran its attention without the intervention; load the model with "
                "attn_implementation='sdpa', or choose other layers",
            )
