"""Who takes part in attention, and what they are told of it.

Must not know how a call is intercepted: that is `seam.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from attnscope.capture.frame import Frame
from attnscope.capture.passes import Pass, Terms
from attnscope.capture.sites import Site, Sites
from attnscope.kernels import AttentionCall
from attnscope.kernels.call import Link

Change = Callable[[Site, AttentionCall, Frame], AttentionCall]
"""From the call a model makes to the call that is made instead."""


# Not frozen, which would take as long as a small layer: made once and not changed.
@dataclass(slots=True, eq=False, kw_only=True)
class Seen:
    """One attention of a model, as it was computed."""

    site: Site
    values: Tensor | None = None
    """[B, G, K, E], after all changes; None where a module bypasses the interface."""
    frame: Frame | None = None
    """Who could see whom; None, as all that follows, where nobody describes."""
    call: AttentionCall | None = None
    lse: Tensor | None = None
    """float32 [B, H, Q], where the attention gave it away."""
    weights: Tensor | None = None
    """A [B, H, Q, K], only where nothing smaller tells what was done: then the rest is None."""
    terms: Terms | None = None
    """What the call has in common with others of its pass; None where that was not told."""
    changed: bool = False
    """Whether somebody changed the call."""
    sinks: bool = False
    """Whether learned sinks take part, so that the rows of `weights` may add up to less than 1."""


def on_cpu(seen: Seen) -> Seen:
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
        Link(bias=link.bias.cpu(), queries=None if link.queries is None else link.queries.cpu())
        for link in seen.call.links
    )
    call = replace(seen.call, visible=frame.visible, links=links, **moved)
    return replace(seen, frame=frame, call=call, lse=None if seen.lse is None else seen.lse.cpu())


def seen_by(site: Site, terms: Terms, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None) -> Seen:
    """An attention as the terms of its call tell it."""
    frame = terms.frame
    call = AttentionCall(
        layer=site.layer,
        q=q,
        k=k,
        v=v,
        scale=terms.scale,
        visible=frame.visible,
        softcap=terms.softcap,
        first=frame.first_query - frame.first_key,
    )
    return Seen(site=site, values=v, frame=frame, call=call, lse=lse, terms=terms)


class Observer(Protocol):
    """Looks at attention as it happens. Calls of one pass of one stack come in order."""

    describes: bool
    """Whether it needs frames: if nobody does, masks and attention stay those of transformers."""

    def begin(self, stack: str, cache: Any) -> None:
        """A forward pass of a stack begins."""

    def wants(self, site: Site) -> bool:
        """Whether to be told of this site's attention in this pass."""

    def see(self, seen: Seen) -> None:
        """One attention."""

    def end(self, stack: str, *, finished: bool) -> None:
        """The pass is over, or broke off."""


@runtime_checkable
class Quick(Protocol):
    """An observer that need not be told again what the layers of a pass have in common."""

    def see_alike(
        self, site: Site, terms: Terms, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None
    ) -> None:
        """One attention, wanted or not, that says what another of this pass said."""


@dataclass(eq=False, slots=True)
class User:
    """Somebody inside a `with` block."""

    sites: Sites
    observer: Observer | None
    change: Change | None
    dense: bool
    """Whether the weights themselves are asked for: the fallback, on purpose."""
    describes: bool = field(init=False)
    quick: "Quick | None" = field(init=False)
    """The observer, where it does nothing but look and need not be told things again."""

    def __post_init__(self) -> None:
        changes, observer = self.change is not None, self.observer
        self.describes = changes or (observer is not None and observer.describes)
        looks = self.describes and not changes and not self.dense and isinstance(observer, Quick)
        self.quick = observer if looks and isinstance(observer, Quick) else None


# Not frozen, as above: one a layer and watch.
@dataclass(eq=False, slots=True)
class Place:
    """A module that its users only look at."""

    base: nn.Module
    """Of its stack."""
    kind: str
    looking: list[tuple[Quick, Site]]


@dataclass(eq=False, slots=True)
class Users:
    """Everybody at work in one thread."""

    attending: dict[nn.Module, list[tuple[User, Site]]] = field(default_factory=dict)
    """By attention module, with what they call its place."""
    passing: dict[nn.Module, list[User]] = field(default_factory=dict)
    """By base of a stack."""
    passes: dict[nn.Module, Pass] = field(default_factory=dict)
    """The last pass of every base."""
    describing: int = 0
    """How many of them need frames."""
    places: dict[nn.Module, Place | None] = field(default_factory=dict)
    """By module, once it was asked for; None where more is done than looking."""
    interfaces: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    """What models call in this pass, by what they asked for."""

    def place(self, module: nn.Module) -> Place | None:
        """A module that is only looked at, once a pass."""
        if module in self.places:
            return self.places[module]
        looking: list[tuple[Quick, Site]] = []
        place = self.places[module] = None
        for user, site in self.attending.get(module, ()):
            if user.quick is None or site.stack in user.sites.loops:
                return None
            looking.append((user.quick, site))
        if looking:
            place = self.places[module] = Place(user.sites.bases[site.stack], site.kind, looking)
        return place

    def enter(self, user: User) -> None:
        """Somebody takes part from now on."""
        self.places.clear()
        self.interfaces.clear()
        self.describing += user.describes
        for module, site in user.sites.modules.items():
            self.attending.setdefault(module, []).append((user, site))
        for base in set(user.sites.bases.values()):
            self.passing.setdefault(base, []).append(user)

    def leave(self, user: User) -> None:
        """And no longer."""
        self.places.clear()
        self.interfaces.clear()
        self.describing -= user.describes
        for module, site in user.sites.modules.items():
            self.attending[module].remove((user, site))
            if not self.attending[module]:
                del self.attending[module]
        for base in set(user.sites.bases.values()):
            self.passing[base].remove(user)
            if not self.passing[base]:
                del self.passing[base]
                self.passes.pop(base, None)
