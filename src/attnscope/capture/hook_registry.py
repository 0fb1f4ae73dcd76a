"""Who takes part in attention, and what they are told of it.

Must not know how a call is intercepted: that is `seam.py`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from attnscope.capture.coverage import Check, checked
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
    frame: Geometry | None = None
    """Who could see whom; None, as all that follows, where nobody describes."""
    call: AttentionCall | None = None
    lse: Tensor | None = None
    """float32 [B, H, Q], where the attention gave it away."""
    weights: Tensor | None = None
    """A [B, H, Q, K], only where nothing smaller tells what was done: then the rest is None."""
    terms: CallSpec | None = None
    """What the call has in common with others of its pass; None where that was not told."""
    changed: bool = False
    """Whether somebody changed the call."""
    sinks: bool = False
    """Whether learned sinks take part, so that the rows of `weights` may add up to less than 1."""


def on_cpu(seen: CapturedCall) -> CapturedCall:
    """The same attention where it can be measured, if it cannot be where it was computed."""
    assert seen.frame is not None
    frame = seen.frame.on(torch.device("cpu"))
    if seen.call is None:
        weights = None if seen.weights is None else seen.weights.cpu()
        return replace(seen, frame=frame, weights=weights)
    moved: dict[str, Any] = {
        each.name: value.cpu()
        for each in fields(seen.call)
        if isinstance(value := getattr(seen.call, each.name), Tensor)
    }
    links = tuple(
        ScoreBias(
            bias=link.bias.cpu(), queries=None if link.queries is None else link.queries.cpu()
        )
        for link in seen.call.links
    )
    call = replace(seen.call, visible=frame.visible, links=links, **moved)
    return replace(seen, frame=frame, call=call, lse=None if seen.lse is None else seen.lse.cpu())


DeferredCall = tuple[Site, Tensor | None, Tensor | None, Tensor | None]
"""A call that was made before it is told: queries, keys, log-sum-exp; None where nobody needs
them."""


class Observer(Protocol):
    """Looks at attention as it happens. Calls of one pass of one stack come in order."""

    describes: bool
    """Whether it needs frames: if nobody does, masks and attention stay those of transformers."""

    def begin(self, stack: str, cache: Any) -> None:
        """A forward pass of a stack begins."""

    def wants(self, site: Site) -> bool:
        """Whether to be told of this site's attention in this pass."""

    def see(self, seen: CapturedCall) -> None:
        """One attention."""

    def end(self, stack: str, *, finished: bool) -> None:
        """The pass is over, or broke off."""


class DeferredObserver(Observer, Protocol):
    """An observer that can be told later, and together, of calls that say what another said."""

    def waits(self, site: Site, terms: CallSpec) -> tuple[int, bool]:
        """Of how many more calls of this pass that say what this site's said it can be told later,
        and whether it needs their tensors at all."""

    def looks(self, sites: Collection[Site]) -> list[bool]:
        """Of which of these it ever needs the tensors."""

    def see_later(self, terms: CallSpec, calls: list[DeferredCall]) -> None:
        """Those calls, in order; at the latest when their pass is over."""


@dataclass(eq=False, slots=True)
class RegisteredHook:
    """Somebody inside a `with` block."""

    sites: Sites
    observer: Observer | None
    change: Change | None
    dense: bool
    """Whether the weights themselves are asked for: the fallback, on purpose."""
    meant: frozenset[nn.Module] = frozenset()
    """The modules that the change must reach."""
    describes: bool = field(init=False)
    quick: "DeferredObserver | None" = field(init=False)
    """The observer, where it does nothing but look and can be told later."""

    def __post_init__(self) -> None:
        changes, observer = self.change is not None, self.observer
        self.describes = changes or (observer is not None and observer.describes)
        looks = self.describes and not changes and not self.dense
        self.quick = (
            cast(DeferredObserver, observer) if looks and hasattr(observer, "see_later") else None
        )


@dataclass(eq=False, slots=True)
class DeferredGroup:
    """Calls of one pass that say what an earlier one said: made at once, told later."""

    terms: CallSpec
    left: dict[nn.Module, bool]
    """Modules that have not attended yet, and whether anybody needs their tensors."""
    room: int
    """How many calls may wait to be told."""
    looking: list[tuple[DeferredObserver, dict[nn.Module, Site]]]
    calls: list[tuple[nn.Module, Any, Any, Tensor | None]] = field(default_factory=list)
    """Module, queries, keys and log-sum-exp; references to tensors that nobody needs are weak."""

    def tell(self) -> None:
        """Tell everybody who looks."""
        calls, self.calls = self.calls, []
        for observer, sites in self.looking:
            observer.see_later(
                self.terms,
                [
                    (sites[module], None, None, None) if lse is None else (sites[module], q, k, lse)
                    for module, q, k, lse in calls
                ],
            )


@dataclass(eq=False, slots=True)
class HookRegistry:
    """Everybody at work in one thread."""

    here: list[RegisteredHook] = field(default_factory=list)
    passes: dict[nn.Module, ForwardPass] = field(default_factory=dict)
    """The last pass of every base."""
    task: int = -1
    """The backward pass of autograd that last came to outputs of this thread's passes."""
    describing: int = 0
    """How many of them need frames."""
    interfaces: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    """What models call in this pass, by what they asked for."""
    crowds: dict[tuple[RegisteredHook, Site], dict[nn.Module, bool] | None] = field(
        default_factory=dict
    )
    """Modules that are looked at by the same users as one of them, as `DeferredGroup` has them
    left."""

    def attending(self, module: nn.Module) -> list[tuple[RegisteredHook, Site]]:
        """Who attends to a module, with what they call its place."""
        sites = ((user, user.sites.modules.get(module)) for user in self.here)
        return [(user, site) for user, site in sites if site is not None]

    def passing(self, base: nn.Module) -> list[tuple[Observer | None, str]]:
        """Whose stacks run in a call of this base."""
        return [
            (user.observer, stack)
            for user in self.here
            for stack, other in user.sites.bases.items()
            if other is base
        ]

    def unchecked(self, base: nn.Module) -> list[tuple[Sites, str]]:
        """The sites whose stacks run in a call of this base, where no pass of these was checked
        for attention that is not intercepted; with the stack."""
        return [
            (user.sites, stack)
            for user in self.here
            if user.describes
            for stack, other in user.sites.bases.items()
            if other is base and not checked(user.sites, stack)
        ]

    def modules_of(self, base: nn.Module) -> dict[nn.Module, Site]:
        """All sites that run in a call of this base."""
        return {
            module: site
            for user in self.here
            for module, site in user.sites.modules.items()
            if user.describes and user.sites.bases[site.stack] is base
        }

    def checks(self) -> list[Check]:
        """The checks under way."""
        return [given.check for given in self.passes.values() if given.check is not None]

    def stop_check(self, base: nn.Module) -> None:
        """The last pass of this base is over."""
        given = self.passes.get(base)
        if given is not None and given.check is not None:
            given.check.end()

    def crowd(self, here: list[tuple[RegisteredHook, Site]]) -> dict[nn.Module, bool] | None:
        """The modules of a stack that the same users look at as at one of them, and whether any
        of these needs their tensors; None where more is done than looking."""
        user, (stack, _, kind) = here[0]
        key = user, Site(stack, 0, kind)
        if key not in self.crowds:
            self.crowds[key] = self._crowd(here)
        return self.crowds[key]

    def _crowd(self, here: list[tuple[RegisteredHook, Site]]) -> dict[nn.Module, bool] | None:
        (first, (stack, _, kind)), *_ = here
        if any(user.quick is None or site.stack in user.sites.loops for user, site in here):
            return None
        sites = first.sites.modules
        if not first.sites.uniform:
            sites = {m: s for m, s in sites.items() if s.stack == stack and s.kind == kind}
        if len(self.here) > 1:
            same = [user for user, _ in here]
            sites = {m: s for m, s in sites.items() if [u for u, _ in self.attending(m)] == same}
        needed = [False] * len(sites)
        for user, _ in here:
            assert user.quick is not None
            looks = user.quick.looks([user.sites.modules[module] for module in sites])
            needed = [one or other for one, other in zip(needed, looks, strict=True)]
        return dict(zip(sites, needed, strict=True))

    def enter(self, user: RegisteredHook) -> None:
        """Somebody takes part from now on."""
        self.interfaces.clear()
        self.crowds.clear()
        self.describing += user.describes
        self.here.append(user)

    def leave(self, user: RegisteredHook) -> None:
        """And no longer."""
        self.interfaces.clear()
        self.crowds.clear()
        self.describing -= user.describes
        self.here.remove(user)
        for base in user.sites.bases.values():
            if not self.passing(base):
                self.stop_check(base)
                self.passes.pop(base, None)
