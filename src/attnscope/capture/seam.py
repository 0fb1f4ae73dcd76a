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
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from attnscope.capture import fallback, masks
from attnscope.capture.calls import Asked, Pass
from attnscope.capture.frame import Frame
from attnscope.capture.sites import Site, Sites, argument
from attnscope.errors import ModelError
from attnscope.kernels import AttentionCall
from attnscope.kernels.attend import attend

__all__ = ["Change", "Observer", "Seen", "given", "install"]

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


@dataclass(frozen=True, eq=False, slots=True)
class _User:
    """Somebody inside a `with` block."""

    sites: Sites
    observer: Observer | None
    change: Change | None
    dense: bool
    """Whether the weights themselves are asked for: the fallback, on purpose."""

    @property
    def describes(self) -> bool:
        return self.change is not None or (self.observer is not None and self.observer.describes)


@dataclass(eq=False, slots=True)
class _Users:
    """Everybody at work in one thread."""

    attending: dict[nn.Module, list[_User]] = field(default_factory=dict)
    """By attention module."""
    passing: dict[nn.Module, list[_User]] = field(default_factory=dict)
    """By base of a stack."""
    passes: dict[nn.Module, Pass] = field(default_factory=dict)
    """The last pass of every base."""
    describing: int = 0
    """How many of them need frames."""

    def enter(self, user: _User) -> None:
        self.describing += user.describes
        for module in user.sites.modules:
            self.attending.setdefault(module, []).append(user)
        for base in set(user.sites.bases.values()):
            self.passing.setdefault(base, []).append(user)

    def leave(self, user: _User) -> None:
        self.describing -= user.describes
        for table in (self.attending, self.passing):
            for module in [module for module, users in table.items() if user in users]:
                table[module].remove(user)
                if not table[module]:
                    del table[module]
                    self.passes.pop(module, None)


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
            undo.enter_context(_shared(module, partial(fallback.hook, module, _listens, _bypassed)))
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
    plain: Callable[..., Any] = _get_plain_interface(self, implementation, default)
    users = _here.users
    if not users.attending and torch._C._current_graph_task_id() == -1:
        return plain
    return partial(_attention, users, plain, default, implementation)


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
    asked = Asked.read(plain, eager, implementation, module, args, kwargs)
    if not users.attending:  # gradient checkpointing attends again from a thread of torch's own
        users = next((some for some in _everybody if module in some.attending), users)
    here = users.attending.get(module)
    if here is None:
        return asked.plainly()
    base = here[0].sites.bases[here[0].sites.modules[module].stack]
    given = users.passes.get(base) or Pass()
    places = _places(here, module, given)
    wanting: list[tuple[Observer, Site]] = []
    describes = dense = False
    if not given.again(module, asked.q, asked.k):
        for user, site in zip(here, places, strict=True):
            if user.observer is not None and user.observer.wants(site):
                wanting.append((user.observer, site))
                describes |= user.observer.describes
                dense |= user.dense
    if not describes and not any(user.describes for user in here):
        for observer, site in wanting:
            observer.see(Seen(site=site, values=asked.v))
        return asked.plainly()
    asked.describe(places[0], given)
    call, frame = asked.call, asked.frame
    for user, site in zip(here, places, strict=True):
        if user.change is not None:
            call = user.change(site, call, frame)
    changed = call is not asked.call
    if changed:
        asked.refuse_to_change()
    dense = asked.needs_weights(call) or dense
    lse = weights = None
    if not dense:
        out, lse = attend(call, dropout=asked.dropout, need_lse=describes)
        dense = not changed and not asked.agrees(out)
    if dense and not changed and not wanting:
        return asked.plainly()
    if dense:
        output, weights = asked.densely(call)
        lse = None
    else:
        output = out.transpose(1, 2).contiguous(), None
    with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
        for observer, site in wanting:
            observer.see(
                Seen(
                    site=site,
                    values=call.v,
                    frame=frame,
                    call=None if dense else call,
                    lse=lse,
                    weights=weights,
                    changed=changed,
                    sinks=call.sinks is not None,
                )
            )
    return output


def _places(users: list[_User], module: nn.Module, given: Pass) -> list[Site]:
    """What each of them calls the place of this attention."""
    stack = users[0].sites.modules[module].stack
    turn = given.turns[stack]
    given.turns[stack] = turn + 1
    return [user.sites.site(module, turn) for user in users]


def _listens(module: nn.Module) -> bool:
    """Whether anybody in this thread has an eye on a module that bypasses the interface."""
    return any(user.describes for user in _here.users.attending.get(module, ()))


def _bypassed(module: nn.Module, mask: Any, weights: Tensor) -> None:
    """The weights of a module that does not go through the interface."""
    users = _here.users
    here = users.attending[module]
    base = here[0].sites.bases[here[0].sites.modules[module].stack]
    given = users.passes.get(base) or Pass()
    places = _places(here, module, given)
    wanting = [
        (user.observer, site)
        for user, site in zip(here, places, strict=True)
        if user.observer is not None and user.describes and user.observer.wants(site)
    ]
    if wanting:
        frame = fallback.frame(weights, mask, given, cross=places[0].kind == "cross")
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
    for user in list(users.passing[base]):
        for stack in _stacks(user, base):
            if user.observer is not None:
                user.observer.begin(stack, cache)


def given(base: nn.Module) -> Pass:
    """What the last pass of a base was given, in this thread."""
    return _here.users.passes.get(base) or Pass()


def _end(base: nn.Module, *, finished: bool) -> None:
    for user in list(_here.users.passing.get(base, ())):
        for stack in _stacks(user, base):
            if user.observer is not None:
                user.observer.end(stack, finished=finished)


def _stacks(user: _User, base: nn.Module) -> list[str]:
    return [stack for stack, other in user.sites.bases.items() if other is base]
