"""The seam to transformers: a stack of changes to a call, then attention, then observers.

Inside a `with`, the lookups of attention and mask functions in transformers go through here, for
the thread that opened the block. Whoever else calls a model gets what it always got: another
thread, a copy of the model, a tower beside the text. Any number of users share one seam; each
attention is computed once, and all see the same call, frame and log-sum-exp. The configuration
of a model is never touched, so it takes the paths it takes when nobody looks.

Must not know what is measured.
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
from attnscope.capture.call_spec import AttentionRequest, agreed
from attnscope.capture.coverage import Check, name_in
from attnscope.capture.forward_pass import CallSpec, ForwardPass, same
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
        self.users = HookRegistry()
        self.plain = False
        """Whether lookups give what transformers has."""

    @contextmanager
    def plainly(self) -> Iterator[None]:
        self.plain = True
        try:
            yield
        finally:
            self.plain = False


_here = _ThreadState()
_NOTHING = nullcontext()
_everybody: list[HookRegistry] = []


@contextmanager
def install(
    sites: Sites,
    *,
    observer: Observer | None = None,
    change: Change | None = None,
    layers: Collection[int] | None = None,
    dense: bool = False,
) -> Iterator[None]:
    """Take part in the attention of these sites, in this thread, inside a `with` block; `layers`
    are those that a change is meant for, all of them by default."""
    user, users = RegisteredHook(sites, observer, change, dense), _here.users
    if change is not None:
        user.meant = _meant(sites, layers)
    shared: list[tuple[Any, Callable[[], ExitStack]]] = [
        patches.UNCOMPILED,
        ("lookups", _take_over_lookups),
    ]
    shared += [(base, partial(_mark_passes, base)) for base in set(sites.bases.values())]
    shared += [(m, partial(_hook, m)) for m in (sites.hooked if user.describes else ())]
    for module in user.meant:
        base = sites.bases[sites.modules[module].stack]
        shared.append(((module, "runs"), partial(_note_runs, module, base)))
    taken = []
    try:
        for key, do in shared:
            patches.acquire(key, do)
            taken.append(key)
        users.enter(user)
        _everybody.append(users)
        try:
            yield
        finally:
            _everybody.remove(users)
            users.leave(user)
    finally:
        for key in reversed(taken):
            patches.release(key)


def _meant(sites: Sites, layers: Collection[int] | None) -> frozenset[nn.Module]:
    """The modules that a change of these layers must reach."""
    meant = frozenset(
        module
        for module, (stack, layer, kind) in sites.modules.items()
        if stack in sites.loops or layers is None or (layer in layers and kind == "self")
    )
    for module in meant & sites.bypassing:
        raise _not_applied(
            sites.model,
            module,
            "does not go through the attention interface of transformers, so its attention can be "
            "measured and not changed; choose other layers",
        )
    return meant


def _not_applied(model: nn.Module, module: nn.Module, reason: str) -> ModelError:
    name = name_in(model, module)
    return ModelError(
        f"{type(module).__name__} {reason} (module {name})",
        code="intervention-not-applied",
        module=name,
    )


def _take_over_lookups() -> ExitStack:
    undo = ExitStack()
    undo.callback(setattr, AttentionInterface, "get_interface", AttentionInterface.get_interface)
    AttentionInterface.get_interface = _get_interface
    for name, ours in (("get", _get_or_default), ("__getitem__", _get_item)):
        undo.callback(delattr, AttentionInterface, name)
        setattr(AttentionInterface, name, ours)
    undo.callback(delattr, AttentionMaskInterface, "__getitem__")
    AttentionMaskInterface.__getitem__ = _get_mask_function
    return undo


_get_plain_interface = AttentionInterface.get_interface
_get_plain_item = AttentionInterface.__getitem__
_get_plain_mask_function = AttentionMaskInterface.__getitem__


def _get_interface(
    self: AttentionInterface, implementation: str, default: Callable[..., Any]
) -> Callable[..., Any]:
    users = _here.users
    known: Callable[..., Any] | None = users.interfaces.get((implementation, default))
    if known is not None:
        return known
    with _here.plainly():
        plain = _get_plain_interface(self, implementation, default)
    ours: Callable[..., Any] = _ours(plain, default, implementation)
    return ours


def _get_or_default(self: AttentionInterface, implementation: str, default: Any = None) -> Any:
    """`ALL_ATTENTION_FUNCTIONS.get`, with which code of one's own may find its function."""
    try:
        plain = _get_plain_item(self, implementation)
    except KeyError:
        plain = default
    if _here.plain or plain is None:
        return plain
    return _ours(plain, default, implementation)


def _get_item(self: AttentionInterface, implementation: str) -> Any:
    """`ALL_ATTENTION_FUNCTIONS[…]`, likewise; it does not name the family's eager attention."""
    plain = _get_plain_item(self, implementation)
    return plain if _here.plain else _ours(plain, None, implementation)


def _ours(plain: Any, default: Any, implementation: str) -> Any:
    """What a model is given in place of the attention function it asked for."""
    users = _here.users
    if not users.here and torch._C._current_graph_task_id() == -1:
        return plain
    ours = partial(_attention, users, plain, default, implementation)
    if users.here and default is not None:
        users.interfaces[implementation, default] = ours
    return ours


def _get_mask_function(self: AttentionMaskInterface, implementation: str) -> Callable[..., Any]:
    plain: Callable[..., Any] = _get_plain_mask_function(self, implementation)
    if not _here.users.describing:
        return plain
    return partial(masks.describe, plain, implementation)


def _attention(
    users: HookRegistry,
    plain: Callable[..., Any],
    eager: Callable[..., Any] | None,
    implementation: str,
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What a model calls in place of its attention function."""
    eager = eager or _eager_of(module)
    asked = AttentionRequest.read(plain, eager, implementation, module, args, kwargs)
    task = torch._C._current_graph_task_id()
    if task != -1:  # gradient checkpointing attends again, in any thread
        users = next((some for some in tuple(_everybody) if some.task == task), users)
    here = users.attending(module)
    if not here:
        for check in users.checks():
            check.miss([module])
        return asked.plainly()
    given, here = _pass_of(users, here)
    wanting: list[tuple[Observer, Site]] = []
    describes = changes = dense = False
    _tell(given)
    again = given.again(module, *asked.passed[:2])
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
            observer.see(CapturedCall(site=site, values=asked.v))
        return asked.plainly()
    asked.describe(here[0][1], given)
    call = _changed(here, asked) if changes else asked.call
    if changes:
        given.changed.add(module)
    output, lse, weights = _attend(asked, call, need_lse=describes, dense=dense, seen=bool(wanting))
    with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
        for observer, site in wanting:
            observer.see(
                CapturedCall(
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
        if asked.terms is not None and lse is not None and not again and call is asked.call:
            _expect(users, given, here, asked, asked.terms)
    return output


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of a module's family, by the name that transformers gives it."""
    code = getattr(module.forward, "__globals__", {})
    found: Callable[..., Any] = code.get("eager_attention_forward", dense_fallback.eager_sdpa)
    return found


def _expect(
    users: HookRegistry,
    given: ForwardPass,
    here: list[tuple[RegisteredHook, Site]],
    asked: AttentionRequest,
    terms: CallSpec,
) -> None:
    """Let further layers that say the same go without being read, as many as may wait."""
    crowd = None if terms.attend is None else users.crowd(here)
    if crowd is None:
        return
    room, needed = sys.maxsize, False
    for user, site in here:
        assert user.quick is not None
        most, tensors = user.quick.waits(site, terms)
        room, needed = min(room, most), needed or tensors
    alike: DeferredGroup | None = given.alike.get(id(asked.mask))
    if alike is not None and alike.terms is terms:
        alike.left.pop(asked.module, None)
        alike.room = room
    elif alike is None and room > 0:
        looking = [(user.quick, user.sites.modules) for user, _ in here if user.quick is not None]
        left = crowd.copy() if needed else dict.fromkeys(crowd, False)
        for module in given.last:
            left.pop(module, None)
        if asked.implementation == "eager":
            left = {module: n for module, n in left.items() if agreed(module, asked.eager)}
        alike = given.alike[id(asked.mask)] = DeferredGroup(terms, left, room, looking)
        key = asked.implementation, asked.eager
        slow = users.interfaces.get(key)
        if slow is None:
            slow = partial(_attention, users, asked.plain, asked.eager, asked.implementation)
        users.interfaces[key] = _quick(alike, slow)


def _quick(alike: DeferredGroup, other: Callable[..., Any]) -> Callable[..., Any]:
    """What further layers call: of one that says what another said nothing is read again.

    Written out, because it is all that a layer adds to a pass of a small model.
    """
    terms, left = alike.terms, alike.left
    attend, known, options = terms.attend, terms.said[3], terms.options
    (q_shape, k_shape, v_shape), dtype, device = terms.shapes, terms.dtype, terms.device
    kind, is_autocast_enabled = device.type, torch.is_autocast_enabled
    assert attend is not None

    def attention(module: nn.Module, *args: Any, **given: Any) -> Any:
        if len(args) == 4:
            q, k, v, mask = args
            if (
                mask is known
                and module in left
                and q.shape == q_shape
                and k.shape == k_shape
                and v.shape == v_shape
                and q.dtype is dtype
                and q.device == device
                and not (q.requires_grad or k.requires_grad or v.requires_grad)
                and not is_autocast_enabled(kind)
                and len(alike.calls) < alike.room
                and same(options, given)
            ):
                out, lse = attend(q, k, v)
                if left.pop(module):
                    alike.calls.append((module, q, k, lse))
                else:
                    alike.calls.append((module, ref(q), ref(k), None))
                return out.transpose(1, 2).contiguous(), None
        return other(module, *args, **given)

    return attention


def _tell(given: ForwardPass) -> None:
    """Tell observers of calls that were made and not told yet, before a call that is read."""
    for alike in given.alike.values():
        for module, q, k, lse in alike.calls:
            given.last[module] = (q, k) if lse is None else (ref(q), ref(k))
        if alike.calls:
            alike.tell()


def _changed(here: list[tuple[RegisteredHook, Site]], asked: AttentionRequest) -> AttentionCall:
    """The call that is made instead of the one asked for."""
    call = asked.call
    for user, site in here:
        if user.change is not None:
            call = user.change(site, call, asked.frame)
    if call is not asked.call:
        asked.refuse_to_change()
    return call


def _attend(
    asked: AttentionRequest, call: AttentionCall, *, need_lse: bool, dense: bool, seen: bool
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
    users: HookRegistry, here: list[tuple[RegisteredHook, Site]], *, count: bool = True
) -> tuple[ForwardPass, list[tuple[RegisteredHook, Site]]]:
    """The pass in which a module attends, and what its users call its place in it: where modules
    are called again and again, each time the next layer."""
    (user, site), *_ = here
    given = users.passes.get(user.sites.bases[site.stack]) or ForwardPass()
    if count and site.stack in user.sites.loops:
        turn = given.turns[site.stack]
        given.turns[site.stack] = turn + 1
        here = [(user, Site(site.stack, turn)) for user, site in here]
    return given, here


def _hook(module: nn.Module) -> ExitStack:
    return dense_fallback.hook(
        module, _listens, _bypassed, _called, intercepted=_intercepted, name=_name
    )


def _name(module: nn.Module) -> str:
    """The name of a module in the model that is watched."""
    (user, _), *_ = _here.users.attending(module)
    return name_in(user.sites.model, module)


def _intercepted(module: nn.Module) -> bool:
    """Whether a module went through the interface in this pass."""
    users = _here.users
    given, _ = _pass_of(users, users.attending(module), count=False)
    return module in _captured(given)


def _captured(given: ForwardPass) -> set[nn.Module]:
    """The modules whose attention of this pass was measured or is about to be."""
    waiting = {call[0] for alike in given.alike.values() for call in alike.calls}
    return {*given.last, *given.captured, *waiting}


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
        dense_fallback.plain_sdpa,
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
    made: Tensor = output.transpose(1, 2)
    return made


def _listens(module: nn.Module) -> bool:
    """Whether anybody in this thread has an eye on a module that bypasses the interface."""
    return any(user.describes for user, _ in _here.users.attending(module))


def _bypassed(module: nn.Module, mask: Any, weights: Tensor, shown: Tensor) -> None:
    """The weights of a module that does not go through the interface."""
    users = _here.users
    given, here = _pass_of(users, users.attending(module))
    given.captured.add(module)
    wanting = [
        (user.observer, site)
        for user, site in here
        if user.observer is not None and user.describes and user.observer.wants(site)
    ]
    if wanting:
        frame = dense_fallback.frame(weights, mask, given, shown, cross=here[0][1].kind == "cross")
        for observer, site in wanting:
            observer.see(CapturedCall(site=site, frame=frame, weights=weights))


def _mark_passes(base: nn.Module) -> ExitStack:
    undo = ExitStack()

    # A copy of the model carries these for ever; functions, because methods would be copied too.
    def begin(this: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if this is base:
            _begin(base, args, kwargs)

    def end(this: nn.Module, args: Any, output: Any) -> None:
        if this is base:
            _end(base, finished=output is not None)
            if torch.is_grad_enabled():
                _mark_backward(_here.users, base, output)

    undo.callback(base.register_forward_pre_hook(begin, with_kwargs=True).remove)
    undo.callback(base.register_forward_hook(end, always_call=True).remove)
    return undo


def _mark_backward(users: HookRegistry, base: nn.Module, output: Any) -> None:
    """Note which backward pass comes to the outputs of a pass, before it comes to its layers:
    layers that are recomputed there belong to the thread of that pass."""
    if isinstance(output, Tensor) and output.requires_grad and users.passing(base):

        def mark(gradient: Tensor) -> None:
            users.task = torch._C._current_graph_task_id()

        output.register_hook(mark)  # type: ignore[no-untyped-call]
    elif isinstance(output, dict | tuple | list):
        for part in output.values() if isinstance(output, dict) else output:
            _mark_backward(users, base, part)


def _note_runs(module: nn.Module, base: nn.Module) -> ExitStack:
    """Note when a module that a change is meant for runs."""
    undo = ExitStack()

    def note(this: nn.Module, args: Any) -> None:
        given = _here.users.passes.get(base)
        if this is module and given is not None:
            given.ran.add(module)

    undo.callback(module.register_forward_pre_hook(note).remove)
    return undo


def _begin(base: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    users = _here.users
    passing = users.passing(base)
    if not passing:
        return
    cache = argument(base, "past_key_values", args, kwargs)
    users.stop_check(base)
    given = users.passes[base] = ForwardPass.of(base, args, kwargs)
    users.interfaces.clear()  # others may have been registered since
    unchecked = users.unchecked(base)
    if unchecked:
        given.check = Check(base, users.modules_of(base))
        given.check.begin()
    for observer, stack in passing:
        if observer is not None:
            observer.begin(stack, cache)


def given(base: nn.Module) -> ForwardPass:
    """What the last pass of a base was given, in this thread."""
    return _here.users.passes.get(base) or ForwardPass()


def _end(base: nn.Module, *, finished: bool) -> None:
    users = _here.users
    given, passing = users.passes.get(base), users.passing(base)
    told = False
    users.stop_check(base)
    try:
        if given is not None and finished:
            _refuse_missed(users, base, given)
            with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
                for alike in given.alike.values():
                    if alike.calls:
                        alike.tell()
        told = finished
    finally:  # what could not be told breaks a pass off too
        if given is not None:
            given.let_go()
        for observer, stack in passing:
            if observer is not None:
                observer.end(stack, finished=told)


def _refuse_missed(users: HookRegistry, base: nn.Module, given: ForwardPass) -> None:
    """Raise where a pass ran attention that was not intercepted, or not changed as was meant."""
    check, given.check = given.check, None
    if check is not None:
        captured = _captured(given)
        for sites, stack in users.unchecked(base):
            check.judge(sites, stack, captured)
    for user in users.here:
        missing = user.meant & given.ran - given.changed
        for module in (module for module in user.sites.modules if module in missing):
            raise _not_applied(
                user.sites.model,
                module,
                "ran its attention without the intervention; load the model with "
                "attn_implementation='sdpa', or choose other layers",
            )
