"""`Hook`: what receives and rewrites attention calls, and the hooks that are open in a thread."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnscope.interception.captured_call import CapturedCall
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.geometry import Geometry
from attnscope.interception.sites import Site, Sites
from attnscope.kernels import AttentionCall


class Hook:
    """Receives the attention calls of a model, and may rewrite them. Override what you need.

    The calls of one forward pass of a stack come in order, between `begin` and `end`.
    """

    needs_geometry = True
    """Whether `on_call` needs the spec and the log-sum-exp.

    If no hook does, masks and attention are those of transformers.
    """
    needs_scores = False
    """Whether `on_call` needs the largest score of each query where only weights are known."""
    keeps_values = True
    """Whether it may read the values of a call after `on_call` has returned."""
    in_graphs = False
    """Whether it needs attention calls alone, so that a compiled model may stay compiled."""
    changes_layers = False
    """Whether layers compute something else inside the block; always so if it rewrites calls."""

    def begin(self, stack: str, forward_pass: ForwardPass) -> None:
        """Called when a forward pass of a stack starts, with its inputs."""

    def wants(self, site: Site) -> bool:
        """Whether `on_call` gets the call of this site in this pass."""
        return True

    def rewrite_call(self, site: Site, call: AttentionCall, geometry: Geometry) -> AttentionCall:
        """The call that runs in place of the model's own."""
        return call

    def on_call(self, captured: CapturedCall) -> None:
        """Called after each attention call."""

    def end(self, stack: str, *, finished: bool) -> None:
        """Called at the end of the pass; `finished` is False if it raised an error."""


@dataclass(eq=False, slots=True)
class RegisteredHook:
    """The hook of one open `with` block."""

    sites: Sites
    hook: Hook
    dense: bool = False
    """Whether to compute the full weights (`backend="eager-fallback"`)."""
    required: frozenset[nn.Module] = frozenset()
    """The modules whose calls the hook must rewrite; empty if it rewrites none."""
    rewrites: bool = field(init=False)
    listens: bool = field(init=False)
    """Whether it receives or rewrites calls."""
    needs_geometry: bool = field(init=False)
    changes_layers: bool = field(init=False)

    def __post_init__(self) -> None:
        kind = type(self.hook)
        self.rewrites = kind.rewrite_call is not Hook.rewrite_call
        self.listens = self.rewrites or kind.on_call is not Hook.on_call
        self.needs_geometry = self.rewrites or (self.listens and self.hook.needs_geometry)
        self.changes_layers = self.rewrites or self.hook.changes_layers


class Listeners(NamedTuple):
    """The hooks of one attention module."""

    hooks: list[tuple[RegisteredHook, Site]]
    """Each hook, with its site for the module."""
    base: nn.Module
    """The base model whose forward pass runs the module."""
    needs_geometry: bool
    rewrites: bool
    can_match: bool
    """Whether a call may be interpreted by the spec of an earlier layer, without parsing it."""
    keeps_values: bool
    """Whether a hook may read the values of a call after it."""


@dataclass(eq=False, slots=True)
class HookRegistry:
    """The open hooks of one thread."""

    hooks: list[RegisteredHook] = field(default_factory=list)
    passes: dict[nn.Module, ForwardPass] = field(default_factory=dict)
    """By base model: its last forward pass."""
    outer_ids: dict[nn.Module, Tensor] = field(default_factory=dict)
    """By base model: the token ids of the running model around it that has towers."""
    backward_task: int = -1
    """The id of the last backward pass that reached outputs of this thread's passes."""
    interfaces: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    """By (implementation, eager function): the attention function that models get in this pass."""
    _listeners: dict[nn.Module, Listeners | None] = field(default_factory=dict)

    def listeners(self, module: nn.Module) -> Listeners | None:
        """The hooks of a module; None if it has none."""
        try:
            return self._listeners[module]
        except KeyError:
            pass
        sites = ((hook, hook.sites.modules.get(module)) for hook in self.hooks if hook.listens)
        hooks = [(hook, site) for hook, site in sites if site is not None]
        listeners = None
        if hooks:
            needs_geometry = any(hook.needs_geometry for hook, _ in hooks)
            rewrites = any(hook.rewrites for hook, _ in hooks)
            shared = any(site.stack in hook.sites.shared_stacks for hook, site in hooks)
            dense = any(hook.dense for hook, _ in hooks)
            listeners = Listeners(
                hooks,
                hooks[0][0].sites.base_models[hooks[0][1].stack],
                needs_geometry,
                rewrites,
                needs_geometry and not (rewrites or shared or dense),
                any(hook.hook.keeps_values for hook, _ in hooks),
            )
        self._listeners[module] = listeners
        return listeners

    def pass_of(self, listeners: Listeners) -> ForwardPass:
        """The running forward pass of a module with these hooks."""
        return self.passes.get(listeners.base) or ForwardPass()

    def hooks_of(self, base: nn.Module) -> list[tuple[RegisteredHook, str]]:
        """The hooks whose stacks run in a call of this base model, with the stack."""
        return [
            (hook, stack)
            for hook in self.hooks
            for stack, other in hook.sites.base_models.items()
            if other is base
        ]

    def add(self, hook: RegisteredHook) -> None:
        """Add a hook at the start of its block."""
        self.interfaces.clear()
        self._listeners.clear()
        self.hooks.append(hook)
        _in_use.append(self)

    def remove(self, hook: RegisteredHook) -> None:
        """Remove a hook at the end of its block."""
        self.interfaces.clear()
        self._listeners.clear()
        self.hooks.remove(hook)
        _in_use.remove(self)
        for base in hook.sites.base_models.values():
            if not self.hooks_of(base) and (forward_pass := self.passes.pop(base, None)):
                forward_pass.stop_check()


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.registry = HookRegistry()


_local = _ThreadState()
_in_use: list[HookRegistry] = []
"""The registries of all threads that have open hooks, once for each hook."""


def current() -> HookRegistry:
    """The open hooks of this thread.

    In a backward pass, those of the thread that ran its forward pass: gradient checkpointing runs
    layers again in any thread.
    """
    task = torch._C._current_graph_task_id()
    if task == -1:
        return _local.registry
    others = (other for other in tuple(_in_use) if other.backward_task == task)
    return next(others, _local.registry)
