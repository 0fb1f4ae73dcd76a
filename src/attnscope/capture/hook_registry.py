"""Who takes part in attention, and what they are told of it.

Must not know how a call is intercepted: that is `seam.py`.
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
"""From the call a model makes to the call that is made instead."""


# Not frozen, which would take as long as a small layer: made once and not changed.
@dataclass(slots=True, eq=False, kw_only=True)
class CapturedCall:
    """One attention of a model, as it was computed."""

    site: Site
    values: Tensor | None = None
    """[B, G, K, E], after all changes; None where a module bypasses the interface."""
    geometry: Geometry | None = None
    """Who could see whom; None, as all that follows, where nobody describes."""
    call: AttentionCall | None = None
    lse: Tensor | None = None
    """float32 [B, H, Q], where the attention gave it away."""
    weights: Tensor | None = None
    """A [B, H, Q, K], only where nothing smaller tells what was done: then the rest is None."""
    spec: CallSpec | None = None
    """What the call has in common with others of its pass; None where that was not told."""
    changed: bool = False
    """Whether somebody changed the call."""
    sinks: bool = False
    """Whether learned sinks take part, so that the rows of `weights` may add up to less than 1."""


def on_cpu(captured: CapturedCall) -> CapturedCall:
    """The same attention where it can be measured, if it cannot be where it was computed."""
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
    links = tuple(
        ScoreBias(
            bias=link.bias.cpu(), queries=None if link.queries is None else link.queries.cpu()
        )
        for link in captured.call.links
    )
    call = replace(captured.call, visible=geometry.visible, links=links, **moved)
    return replace(
        captured,
        geometry=geometry,
        call=call,
        lse=None if captured.lse is None else captured.lse.cpu(),
    )


DeferredCall = tuple[Site, Tensor | None, Tensor | None, Tensor | None]
"""A call that was made before it is told: queries, keys, log-sum-exp; None where nobody needs
them."""


class Observer(Protocol):
    """Looks at attention as it happens. Calls of one pass of one stack come in order."""

    needs_geometry: bool
    """Whether it needs frames: if nobody does, masks and attention stay those of transformers."""

    def begin(self, stack: str, cache: Any) -> None:
        """A forward pass of a stack begins."""

    def wants(self, site: Site) -> bool:
        """Whether to be told of this site's attention in this pass."""

    def on_call(self, captured: CapturedCall) -> None:
        """One attention."""

    def end(self, stack: str, *, finished: bool) -> None:
        """The pass is over, or broke off."""


class DeferredObserver(Observer, Protocol):
    """An observer that can be told later, and together, of calls that say what another said."""

    def queue_limit(self, site: Site, spec: CallSpec) -> tuple[int, bool]:
        """Of how many more calls of this pass that say what this site's said it can be told later,
        and whether it needs their tensors at all."""

    def needs_tensors(self, sites: Collection[Site]) -> list[bool]:
        """Of which of these it ever needs the tensors."""

    def on_deferred_calls(self, spec: CallSpec, calls: list[DeferredCall]) -> None:
        """Those calls, in order; at the latest when their pass is over."""


@dataclass(eq=False, slots=True)
class RegisteredHook:
    """Somebody inside a `with` block."""

    sites: Sites
    observer: Observer | None
    change: Change | None
    dense: bool
    """Whether the weights themselves are asked for: the fallback, on purpose."""
    required: frozenset[nn.Module] = frozenset()
    """The modules that the change must reach."""
    needs_geometry: bool = field(init=False)
    deferred_observer: "DeferredObserver | None" = field(init=False)
    """The observer, where it does nothing but look and can be told later."""

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
    """Calls of one pass that say what an earlier one said: made at once, told later."""

    spec: CallSpec
    remaining: dict[nn.Module, bool]
    """Modules that have not attended yet, and whether anybody needs their tensors."""
    limit: int
    """How many calls may wait to be told."""
    observers: list[tuple[DeferredObserver, dict[nn.Module, Site]]]
    calls: list[tuple[nn.Module, Any, Any, Tensor | None]] = field(default_factory=list)
    """Module, queries, keys and log-sum-exp; references to tensors that nobody needs are weak."""

    def deliver(self) -> None:
        """Tell everybody who looks."""
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
    """Everybody at work in one thread."""

    hooks: list[RegisteredHook] = field(default_factory=list)
    passes: dict[nn.Module, ForwardPass] = field(default_factory=dict)
    """The last pass of every base."""
    backward_task: int = -1
    """The backward pass of autograd that last came to outputs of this thread's passes."""
    n_needs_geometry: int = 0
    """How many of them need frames."""
    interfaces: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    """What models call in this pass, by what they asked for."""
    module_groups: dict[tuple[RegisteredHook, Site], dict[nn.Module, bool] | None] = field(
        default_factory=dict
    )
    """Modules that are looked at by the same users as one of them, as `DeferredGroup` has them
    left."""

    def hooks_for_module(self, module: nn.Module) -> list[tuple[RegisteredHook, Site]]:
        """Who attends to a module, with what they call its place."""
        sites = ((hook, hook.sites.modules.get(module)) for hook in self.hooks)
        return [(hook, site) for hook, site in sites if site is not None]

    def observed_stacks(self, base: nn.Module) -> list[tuple[Observer | None, str]]:
        """Whose stacks run in a call of this base."""
        return [
            (hook.observer, stack)
            for hook in self.hooks
            for stack, other in hook.sites.base_models.items()
            if other is base
        ]

    def unchecked_stacks(self, base: nn.Module) -> list[tuple[Sites, str]]:
        """The sites whose stacks run in a call of this base, where no pass of these was checked
        for attention that is not intercepted; with the stack."""
        return [
            (hook.sites, stack)
            for hook in self.hooks
            if hook.needs_geometry
            for stack, other in hook.sites.base_models.items()
            if other is base and not is_checked(hook.sites, stack)
        ]

    def sites_of_base(self, base: nn.Module) -> dict[nn.Module, Site]:
        """All sites that run in a call of this base."""
        return {
            module: site
            for hook in self.hooks
            for module, site in hook.sites.modules.items()
            if hook.needs_geometry and hook.sites.base_models[site.stack] is base
        }

    def running_checks(self) -> list[Check]:
        """The checks under way."""
        return [
            forward_pass.check
            for forward_pass in self.passes.values()
            if forward_pass.check is not None
        ]

    def stop_check(self, base: nn.Module) -> None:
        """The last pass of this base is over."""
        forward_pass = self.passes.get(base)
        if forward_pass is not None and forward_pass.check is not None:
            forward_pass.check.end()

    def module_group(
        self, hook_sites: list[tuple[RegisteredHook, Site]]
    ) -> dict[nn.Module, bool] | None:
        """The modules of a stack that the same users look at as at one of them, and whether any
        of these needs their tensors; None where more is done than looking."""
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
        """Somebody takes part from now on."""
        self.interfaces.clear()
        self.module_groups.clear()
        self.n_needs_geometry += hook.needs_geometry
        self.hooks.append(hook)

    def remove(self, hook: RegisteredHook) -> None:
        """And no longer."""
        self.interfaces.clear()
        self.module_groups.clear()
        self.n_needs_geometry -= hook.needs_geometry
        self.hooks.remove(hook)
        for base in hook.sites.base_models.values():
            if not self.observed_stacks(base):
                self.stop_check(base)
                self.passes.pop(base, None)
