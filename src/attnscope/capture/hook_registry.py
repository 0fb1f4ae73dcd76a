"""Holds the hooks that are open in a thread, and the protocols of observers.

`hooks.py` intercepts the calls and delivers them.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from attnscope.capture.coverage import Check, is_checked
from attnscope.capture.forward_pass import CallSpec, ForwardPass
from attnscope.capture.geometry import Geometry
from attnscope.capture.sites import Site, Sites
from attnscope.kernels import AttentionCall
from attnscope.kernels.call import ScoreBias

Change = Callable[[Site, AttentionCall, Geometry], AttentionCall]
"""(site, call of the model, geometry) → the call that runs instead."""


# Not frozen, because that would take as long as a small layer. Do not change it.
@dataclass(slots=True, eq=False, kw_only=True)
class CapturedCall:
    """One attention call of a model, as it was computed."""

    site: Site
    values: Tensor | None = None
    """[B, G, K, E], after all changes; None if the module does not use the interface."""
    geometry: Geometry | None = None
    """Which keys each query could see.

    None, like all that follows, if no hook needs the geometry.
    """
    call: AttentionCall | None = None
    lse: Tensor | None = None
    """float32 [B, H, Q]; None if the attention function does not return it."""
    weights: Tensor | None = None
    """[B, H, Q, K], only if no smaller description exists; then `call` and `lse` are None."""
    spec: CallSpec | None = None
    """The spec that the call shares with others of its pass; None if it shares none."""
    changed: bool = False
    """Whether a hook changed the call."""
    sinks: bool = False
    """Whether the layer has learned sinks: rows of `weights` may then sum to less than 1."""


def on_cpu(captured: CapturedCall) -> CapturedCall:
    """The same call on the CPU, for devices without float64."""
    assert captured.geometry is not None
    geometry = captured.geometry.on(torch.device("cpu"))
    if captured.call is None:
        weights = None if captured.weights is None else captured.weights.cpu()
        return replace(captured, geometry=geometry, weights=weights)
    moved: dict[str, Any] = {
        each.name: value.cpu()
        for each in fields(captured.call)
        if isinstance(value := getattr(captured.call, each.name), Tensor)
    }
    score_biases = tuple(
        ScoreBias(
            bias=added_bias.bias.cpu(),
            queries=None if added_bias.queries is None else added_bias.queries.cpu(),
        )
        for added_bias in captured.call.score_biases
    )
    call = replace(captured.call, visible=geometry.visible, score_biases=score_biases, **moved)
    return replace(
        captured,
        geometry=geometry,
        call=call,
        lse=None if captured.lse is None else captured.lse.cpu(),
    )


DeferredCall = tuple[Site, Tensor | None, Tensor | None, Tensor | None]
"""A call that has run but was not delivered to hooks: (site, q, k, lse).

Tensors are None if no hook needs them.
"""


class Observer(Protocol):
    """Receives the attention calls of a model. Calls of one pass of one stack come in order."""

    needs_geometry: bool
    """Whether it needs geometry, call and log-sum-exp.

    If no hook does, masks and attention are those of transformers.
    """

    def begin(self, stack: str, cache: Any) -> None:
        """Called when a forward pass of a stack starts."""

    def wants(self, site: Site) -> bool:
        """Whether to receive the call of this site in this pass."""

    def on_call(self, captured: CapturedCall) -> None:
        """Called after each attention call."""

    def end(self, stack: str, *, finished: bool) -> None:
        """Called at the end of the pass; `finished` is False if it raised an error."""


class DeferredObserver(Observer, Protocol):
    """An observer that accepts calls with the same signature later, several at once."""

    def queue_limit(self, site: Site, spec: CallSpec) -> tuple[int, bool]:
        """How many further calls of this spec may be queued, and whether it needs tensors."""

    def needs_tensors(self, sites: Collection[Site]) -> list[bool]:
        """For each site: whether it ever needs the tensors of its calls."""

    def on_deferred_calls(self, spec: CallSpec, calls: list[DeferredCall]) -> None:
        """Receives queued calls in order, at the latest at the end of their pass."""


@dataclass(eq=False, slots=True)
class RegisteredHook:
    """The observer or change of one open `with` block."""

    sites: Sites
    observer: Observer | None
    change: Change | None
    dense: bool
    """Whether to compute the full weights (`backend="eager-fallback"`)."""
    required: frozenset[nn.Module] = frozenset()
    """The modules that the change must reach; empty without a change."""
    needs_geometry: bool = field(init=False)
    deferred_observer: "DeferredObserver | None" = field(init=False)
    """The observer, if it accepts deferred calls and the block changes nothing."""

    def __post_init__(self) -> None:
        changes, observer = self.change is not None, self.observer
        self.needs_geometry = changes or (observer is not None and observer.needs_geometry)
        can_defer = self.needs_geometry and not changes and not self.dense
        self.deferred_observer = (
            cast(DeferredObserver, observer)
            if can_defer and hasattr(observer, "on_deferred_calls")
            else None
        )


@dataclass(eq=False, slots=True)
class DeferredGroup:
    """Calls of one pass with the same signature: run at once, delivered later."""

    spec: CallSpec
    remaining: dict[nn.Module, bool]
    """Modules that have not run yet in this pass → whether a hook needs their tensors."""
    limit: int
    """How many calls may be queued."""
    observers: list[tuple[DeferredObserver, dict[nn.Module, Site]]]
    calls: list[tuple[nn.Module, Any, Any, Tensor | None]] = field(default_factory=list)
    """(module, q, k, lse). If no hook needs the tensors, q and k are weak references."""

    def deliver(self) -> None:
        """Deliver the queued calls to all observers."""
        calls, self.calls = self.calls, []
        for observer, sites in self.observers:
            observer.on_deferred_calls(
                self.spec,
                [
                    (sites[module], None, None, None) if lse is None else (sites[module], q, k, lse)
                    for module, q, k, lse in calls
                ],
            )


@dataclass(eq=False, slots=True)
class HookRegistry:
    """The open hooks of one thread."""

    hooks: list[RegisteredHook] = field(default_factory=list)
    passes: dict[nn.Module, ForwardPass] = field(default_factory=dict)
    """By base model: its last forward pass."""
    backward_task: int = -1
    """The id of the last backward pass that reached outputs of this thread's passes."""
    n_needs_geometry: int = 0
    """How many hooks need the geometry."""
    interfaces: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    """By (implementation, eager function): the attention function that models get in this pass."""
    module_groups: dict[tuple[RegisteredHook, Site], dict[nn.Module, bool] | None] = field(
        default_factory=dict
    )
    """The results of `module_group`."""

    def hooks_for_module(self, module: nn.Module) -> list[tuple[RegisteredHook, Site]]:
        """The hooks of a module, each with its name for the site."""
        sites = ((hook, hook.sites.modules.get(module)) for hook in self.hooks)
        return [(hook, site) for hook, site in sites if site is not None]

    def observed_stacks(self, base: nn.Module) -> list[tuple[Observer | None, str]]:
        """The observers whose stacks run in a call of this base model, with the stack."""
        return [
            (hook.observer, stack)
            for hook in self.hooks
            for stack, other in hook.sites.base_models.items()
            if other is base
        ]

    def unchecked_stacks(self, base: nn.Module) -> list[tuple[Sites, str]]:
        """The (sites, stack) of this base model whose attention calls were not checked yet."""
        return [
            (hook.sites, stack)
            for hook in self.hooks
            if hook.needs_geometry
            for stack, other in hook.sites.base_models.items()
            if other is base and not is_checked(hook.sites, stack)
        ]

    def sites_of_base(self, base: nn.Module) -> dict[nn.Module, Site]:
        """All sites that run in a call of this base model."""
        return {
            module: site
            for hook in self.hooks
            for module, site in hook.sites.modules.items()
            if hook.needs_geometry and hook.sites.base_models[site.stack] is base
        }

    def running_checks(self) -> list[Check]:
        """The coverage checks that are running."""
        return [
            forward_pass.check
            for forward_pass in self.passes.values()
            if forward_pass.check is not None
        ]

    def stop_check(self, base: nn.Module) -> None:
        """Stop the coverage check of the last pass of this base model."""
        forward_pass = self.passes.get(base)
        if forward_pass is not None and forward_pass.check is not None:
            forward_pass.check.end()

    def module_group(
        self, hook_sites: list[tuple[RegisteredHook, Site]]
    ) -> dict[nn.Module, bool] | None:
        """Modules watched by exactly these hooks → whether any hook needs their tensors.

        None if a hook changes calls or accepts no deferred calls.
        """
        hook, (stack, _, kind) = hook_sites[0]
        key = hook, Site(stack, 0, kind)
        if key not in self.module_groups:
            self.module_groups[key] = self._make_module_group(hook_sites)
        return self.module_groups[key]

    def _make_module_group(
        self, hook_sites: list[tuple[RegisteredHook, Site]]
    ) -> dict[nn.Module, bool] | None:
        (first, (stack, _, kind)), *_ = hook_sites
        if any(
            hook.deferred_observer is None or site.stack in hook.sites.shared_stacks
            for hook, site in hook_sites
        ):
            return None
        sites = first.sites.modules
        if not first.sites.single_stack:
            sites = {m: s for m, s in sites.items() if s.stack == stack and s.kind == kind}
        if len(self.hooks) > 1:
            same_hooks = [hook for hook, _ in hook_sites]
            sites = {
                m: s
                for m, s in sites.items()
                if [other for other, _ in self.hooks_for_module(m)] == same_hooks
            }
        needed = [False] * len(sites)
        for hook, _ in hook_sites:
            assert hook.deferred_observer is not None
            needs = hook.deferred_observer.needs_tensors(
                [hook.sites.modules[module] for module in sites]
            )
            needed = [one or other for one, other in zip(needed, needs, strict=True)]
        return dict(zip(sites, needed, strict=True))

    def add(self, hook: RegisteredHook) -> None:
        """Add a hook at the start of its block."""
        self.interfaces.clear()
        self.module_groups.clear()
        self.n_needs_geometry += hook.needs_geometry
        self.hooks.append(hook)

    def remove(self, hook: RegisteredHook) -> None:
        """Remove a hook at the end of its block."""
        self.interfaces.clear()
        self.module_groups.clear()
        self.n_needs_geometry -= hook.needs_geometry
        self.hooks.remove(hook)
        for base in hook.sites.base_models.values():
            if not self.observed_stacks(base):
                self.stop_check(base)
                self.passes.pop(base, None)
