"""Runs one attention call of a watched model: interpret, rewrite, attend, deliver to hooks.

A call goes through all hooks that rewrite it, then through attention, then to all hooks. Attention
is computed once, and all hooks get the same call.
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from attnscope.errors import ModelError
from attnscope.interception import dense_fallback
from attnscope.interception.attention_request import AttentionRequest
from attnscope.interception.captured_call import CallSpec, CapturedCall
from attnscope.interception.coverage import name_in
from attnscope.interception.eager_attention import (
    call_dense,
    check_can_change,
    eager_matches,
    is_verified,
)
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.hooks import HookRegistry, Listeners, RegisteredHook, current
from attnscope.interception.row_max import row_max
from attnscope.interception.sites import Site
from attnscope.kernels import AttentionCall
from attnscope.kernels.attend import attend

HookSites = list[tuple[RegisteredHook, Site]]
_NOTHING = nullcontext()


def run_attention(
    registry: HookRegistry,
    original: Callable[..., Any],
    eager: Callable[..., Any] | None,
    implementation: str,
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run one attention call of a model: interpret, rewrite, attend, deliver to hooks."""
    eager = eager or eager_of(module)
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
            and is_verified(implementation, module, eager)
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
    scores = None
    if weights is not None and any(registered.hook.needs_scores for registered, _ in observers):
        scores = row_max(call, request.geometry, weights)
    _deliver(observers, spec, call.q, call.k, call.v, lse, weights, scores)
    return output


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
    row_max: Tensor | None = None,
) -> None:
    """Give a call to the hooks that want it."""
    with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
        for registered, site in observers:
            registered.hook.on_call(CapturedCall(site, spec, q, k, v, lse, weights, row_max))


def eager_of(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of a module's family, by the name that transformers gives it."""
    module_globals = getattr(module.forward, "__globals__", {})
    eager: Callable[..., Any] = module_globals.get(
        "eager_attention_forward", dense_fallback.eager_sdpa
    )
    return eager


def _rewrite_call(hook_sites: HookSites, request: AttentionRequest) -> AttentionCall:
    """Apply the changes of all hooks to a call."""
    call = request.call
    for registered, site in hook_sites:
        call = registered.hook.rewrite_call(site, call, request.geometry)
    if call is not request.call:
        check_can_change(request)
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
        if changed or eager_matches(request, out):
            return (out.transpose(1, 2).contiguous(), None), lse, None
    if not changed and not observed:
        return request.call_original(), None, None
    output, weights = call_dense(request, call)
    return output, None, weights


def _sites_in_pass(listeners: Listeners, forward_pass: ForwardPass) -> HookSites:
    """The hooks of a module with their sites in this pass.

    A module that a pass calls several times is the next layer each time.
    """
    (registered, site), *_ = listeners.hooks
    if site.stack not in registered.sites.shared_stacks:
        return listeners.hooks
    layer = forward_pass.loop_counts[site.stack]
    forward_pass.loop_counts[site.stack] = layer + 1
    return [(registered, Site(site.stack, layer)) for registered, site in listeners.hooks]


def hook_attention(module: nn.Module) -> ExitStack:
    """Hook a module that may not use the attention interface."""
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
    output, _ = run_attention(
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
    module: nn.Module,
    listeners: Listeners,
    mask: Any,
    weights: Tensor,
    visible: Tensor,
    largest: Tensor | None,
) -> None:
    """Deliver the weights of a module that does not use the attention interface."""
    forward_pass = current().pass_of(listeners)
    hook_sites = _sites_in_pass(listeners, forward_pass)
    forward_pass.captured.add(module)
    for registered, _ in hook_sites:
        if module in registered.required:
            raise not_applied(
                registered.sites.model,
                module,
                "ran its attention without the intervention; load the model with "
                "attn_implementation='sdpa', or choose other layers",
            )
    observers = _observers([each for each in hook_sites if each[0].needs_geometry])
    if observers:
        cross = hook_sites[0][1].kind == "cross"
        if not cross and weights.shape[3] < weights.shape[2]:
            raise dense_fallback.fewer_keys(observers[0][0].sites.model, module, weights)
        geometry = dense_fallback.geometry_of_weights(
            weights, mask, forward_pass, visible, cross=cross
        )
        _deliver(observers, CallSpec.of_weights(geometry), weights=weights, row_max=largest)


def not_applied(model: nn.Module, module: nn.Module, reason: str) -> ModelError:
    """The error for a module whose calls a hook cannot rewrite."""
    name = name_in(model, module)
    return ModelError(
        f"{type(module).__name__} {reason} (module {name})",
        code="intervention-not-applied",
        module=name,
    )
