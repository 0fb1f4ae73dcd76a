"""The seam to transformers: a stack of changes to a call, then attention, then observers.

Inside a `with`, the lookups of attention and mask functions in transformers go through here, for
the thread that opened the block. Whoever else calls a model gets what it always got: another
thread, a copy of the model, a tower beside the text. Any number of users share one seam; each
attention is computed once, and all see the same call, frame and log-sum-exp. The configuration
of a model is never touched, so it takes the paths it takes when nobody looks.

Must not know what is measured.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attnscope.capture import fallback, masks
from attnscope.capture.calls import ModelCall, agreed
from attnscope.capture.frame import Frame
from attnscope.capture.passes import Pass, Terms
from attnscope.capture.sites import Site, Sites, argument
from attnscope.errors import ModelError
from attnscope.kernels import AttentionCall
from attnscope.kernels.attend import attend

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
class _User:
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
class _Place:
    """A module that its users only look at."""

    base: nn.Module
    """Of its stack."""
    kind: str
    looking: list[tuple[Quick, Site]]


@dataclass(eq=False, slots=True)
class _Users:
    """Everybody at work in one thread."""

    attending: dict[nn.Module, list[tuple[_User, Site]]] = field(default_factory=dict)
    """By attention module, with what they call its place."""
    passing: dict[nn.Module, list[_User]] = field(default_factory=dict)
    """By base of a stack."""
    passes: dict[nn.Module, Pass] = field(default_factory=dict)
    """The last pass of every base."""
    describing: int = 0
    """How many of them need frames."""
    places: dict[nn.Module, _Place | None] = field(default_factory=dict)
    """By module, once it was asked for; None where more is done than looking."""
    interfaces: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    """What models call in this pass, by what they asked for."""

    def place(self, module: nn.Module) -> _Place | None:
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
            place = self.places[module] = _Place(user.sites.bases[site.stack], site.kind, looking)
        return place

    def enter(self, user: _User) -> None:
        self.places.clear()
        self.interfaces.clear()
        self.describing += user.describes
        for module, site in user.sites.modules.items():
            self.attending.setdefault(module, []).append((user, site))
        for base in set(user.sites.bases.values()):
            self.passing.setdefault(base, []).append(user)

    def leave(self, user: _User) -> None:
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


class _Here(threading.local):
    def __init__(self) -> None:
        self.users = _Users()


_here = _Here()
_NOTHING = nullcontext()
_everybody: list[_Users] = []


@contextmanager
def install(
    sites: Sites,
    *,
    observer: Observer | None = None,
    change: Change | None = None,
    dense: bool = False,
) -> Iterator[None]:
    """Take part in the attention of these sites, in this thread, inside a `with` block."""
    if change is not None and sites.bypassing:
        name = type(next(iter(sites.bypassing))).__name__
        raise ModelError(
            f"{name} does not go through the attention interface of transformers, so its attention "
            "can be measured and not changed"
        )
    user, users = _User(sites, observer, change, dense), _here.users
    with ExitStack() as undo:
        undo.enter_context(_shared("lookups", _take_over_lookups))
        for base in set(sites.bases.values()):
            undo.enter_context(_shared(base, partial(_mark_passes, base)))
        for module in sites.bypassing if user.describes else ():
            undo.enter_context(_shared(module, partial(_hook, module)))
        users.enter(user)
        undo.callback(users.leave, user)
        _everybody.append(users)
        undo.callback(_everybody.remove, users)
        yield


# What is done once for all users of all threads, and undone when the last one leaves.
_lock = threading.Lock()
_done: dict[Any, tuple[int, ExitStack]] = {}


@contextmanager
def _shared(key: Any, do: Callable[[], ExitStack]) -> Iterator[None]:
    with _lock:
        count, undo = _done[key] if key in _done else (0, do())
        _done[key] = count + 1, undo
    try:
        yield
    finally:
        with _lock:
            count, undo = _done.pop(key)
            if count > 1:
                _done[key] = count - 1, undo
            else:
                undo.close()


def _take_over_lookups() -> ExitStack:
    undo = ExitStack()
    # A compiled graph would not call us: compiled parts run as written while watched.
    undo.enter_context(torch.compiler.set_stance("force_eager"))
    undo.callback(setattr, AttentionInterface, "get_interface", AttentionInterface.get_interface)
    AttentionInterface.get_interface = _get_interface
    undo.callback(delattr, AttentionMaskInterface, "__getitem__")
    AttentionMaskInterface.__getitem__ = _get_mask_function
    return undo


_get_plain_interface = AttentionInterface.get_interface
_get_plain_mask_function = AttentionMaskInterface.__getitem__


def _get_interface(
    self: AttentionInterface, implementation: str, default: Callable[..., Any]
) -> Callable[..., Any]:
    users = _here.users
    known = users.interfaces.get((implementation, default))
    if known is not None:
        return known
    plain: Callable[..., Any] = _get_plain_interface(self, implementation, default)
    if not users.attending and torch._C._current_graph_task_id() == -1:
        return plain
    ours = partial(_attention, users, plain, default, implementation)
    if users.attending:
        users.interfaces[implementation, default] = ours
    return ours


def _get_mask_function(self: AttentionMaskInterface, implementation: str) -> Callable[..., Any]:
    plain: Callable[..., Any] = _get_plain_mask_function(self, implementation)
    if not _here.users.describing:
        return plain
    return partial(masks.describe, plain, implementation)


def _attention(
    users: _Users,
    plain: Callable[..., Any],
    eager: Callable[..., Any],
    implementation: str,
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What a model calls in place of its attention function."""
    place = users.place(module)
    if place is not None and len(args) == 4:
        out = _alike(users, place, plain, eager, implementation, module, *args, kwargs)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
    asked = ModelCall.read(plain, eager, implementation, module, args, kwargs)
    if not users.attending:  # gradient checkpointing attends again from a thread of torch's own
        users = next((some for some in _everybody if module in some.attending), users)
    here = users.attending.get(module)
    if here is None:
        return asked.plainly()
    given, here = _pass_of(users, here)
    wanting: list[tuple[Observer, Site]] = []
    describes = changes = dense = False
    again = given.again(module, asked.q, asked.k)
    for user, site in here:
        observer = user.observer
        if user.change is not None:
            changes = True
        if observer is not None and not again and observer.wants(site):
            wanting.append((observer, site))
            describes |= observer.describes
            dense |= user.dense
    if not describes and not any(user.describes for user, _ in here):
        for observer, site in wanting:
            observer.see(Seen(site=site, values=asked.v))
        return asked.plainly()
    asked.describe(here[0][1], given)
    call = _changed(here, asked) if changes else asked.call
    output, lse, weights = _attend(asked, call, need_lse=describes, dense=dense, seen=bool(wanting))
    with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
        for observer, site in wanting:
            observer.see(
                Seen(
                    site=site,
                    values=call.v,
                    frame=asked.frame,
                    call=call if weights is None else None,
                    lse=lse,
                    weights=weights,
                    terms=asked.terms if call is asked.call else None,
                    changed=call is not asked.call,
                    sinks=call.sinks is not None,
                )
            )
    return output


def _alike(
    users: _Users,
    place: _Place,
    plain: Callable[..., Any],
    eager: Callable[..., Any],
    implementation: str,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    options: dict[str, Any],
) -> Tensor | None:
    """Attention of a layer that says what another of its pass said: none of that is read again.
    None for all others."""
    given = users.passes.get(place.base)
    if given is None or q.requires_grad or module in given.last:
        return None
    said = plain, eager, implementation, mask, place.kind
    for terms in given.terms:
        if terms.attend is not None and terms.cover(said, options, q, k, v):
            break
    else:
        return None
    if implementation == "eager" and not agreed(module, eager):
        return None
    given.again(module, q, k)
    out, lse = terms.attend(q, k, v)
    for observer, site in place.looking:
        observer.see_alike(site, terms, q, k, v, lse)
    return out


def _changed(here: list[tuple[_User, Site]], asked: ModelCall) -> AttentionCall:
    """The call that is made instead of the one asked for."""
    call = asked.call
    for user, site in here:
        if user.change is not None:
            call = user.change(site, call, asked.frame)
    if call is not asked.call:
        asked.refuse_to_change()
    return call


def _attend(
    asked: ModelCall, call: AttentionCall, *, need_lse: bool, dense: bool, seen: bool
) -> tuple[Any, Tensor | None, Tensor | None]:
    """What the attention function returns; the log-sum-exp of its rows, or the weights where
    nothing smaller tells what was done and somebody has `seen` it."""
    changed = call is not asked.call
    if not dense and not asked.needs_weights(call):
        out, lse = attend(call, dropout=asked.dropout, need_lse=need_lse)
        if changed or asked.agrees(out):
            return (out.transpose(1, 2).contiguous(), None), lse, None
    if not changed and not seen:
        return asked.plainly(), None, None
    output, weights = asked.densely(call)
    return output, None, weights


def _pass_of(
    users: _Users, here: list[tuple[_User, Site]]
) -> tuple[Pass, list[tuple[_User, Site]]]:
    """The pass in which a module attends, and what its users call its place in it: where modules
    are called again and again, each time the next layer."""
    (user, site), *_ = here
    given = users.passes.get(user.sites.bases[site.stack]) or Pass()
    if site.stack in user.sites.loops:
        turn = given.turns[site.stack]
        given.turns[site.stack] = turn + 1
        here = [(user, Site(site.stack, turn)) for user, site in here]
    return given, here


def _hook(module: nn.Module) -> ExitStack:
    return fallback.hook(module, _listens, _bypassed, _called)


def _called(
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
    """What a module calls in place of torch's sdpa, where it does so by itself; the names are
    torch's."""
    output, _ = _attention(
        _here.users,
        fallback.plain_sdpa,
        fallback.eager_sdpa,
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
    made: Tensor = output.transpose(1, 2)
    return made


def _listens(module: nn.Module) -> bool:
    """Whether anybody in this thread has an eye on a module that bypasses the interface."""
    return any(user.describes for user, _ in _here.users.attending.get(module, ()))


def _bypassed(module: nn.Module, mask: Any, weights: Tensor, shown: Tensor) -> None:
    """The weights of a module that does not go through the interface."""
    users = _here.users
    given, here = _pass_of(users, users.attending[module])
    wanting = [
        (user.observer, site)
        for user, site in here
        if user.observer is not None and user.describes and user.observer.wants(site)
    ]
    if wanting:
        frame = fallback.frame(weights, mask, given, shown, cross=here[0][1].kind == "cross")
        for observer, site in wanting:
            observer.see(Seen(site=site, frame=frame, weights=weights))


def _mark_passes(base: nn.Module) -> ExitStack:
    undo = ExitStack()

    # A copy of the model carries these for ever; functions, because methods would be copied too.
    def begin(this: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if this is base:
            _begin(base, args, kwargs)

    def end(this: nn.Module, args: Any, output: Any) -> None:
        if this is base:
            _end(base, finished=output is not None)

    undo.callback(base.register_forward_pre_hook(begin, with_kwargs=True).remove)
    undo.callback(base.register_forward_hook(end, always_call=True).remove)
    return undo


def _begin(base: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    users = _here.users
    if base not in users.passing:
        return
    cache = argument(base, "past_key_values", args, kwargs)
    users.passes[base] = Pass.of(base, args, kwargs)
    users.interfaces.clear()  # others may have been registered since
    for user in list(users.passing[base]):
        for stack in _stacks(user, base):
            if user.observer is not None:
                user.observer.begin(stack, cache)


def given(base: nn.Module) -> Pass:
    """What the last pass of a base was given, in this thread."""
    return _here.users.passes.get(base) or Pass()


def _end(base: nn.Module, *, finished: bool) -> None:
    if base in _here.users.passes:
        _here.users.passes[base].let_go()
    for user in list(_here.users.passing.get(base, ())):
        for stack in _stacks(user, base):
            if user.observer is not None:
                user.observer.end(stack, finished=finished)


def _stacks(user: _User, base: nn.Module) -> list[str]:
    return [stack for stack, other in user.sites.bases.items() if other is base]
