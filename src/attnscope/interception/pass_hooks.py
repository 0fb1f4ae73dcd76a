"""Starts and ends the forward passes of watched models.

Gradient checkpointing runs layers a second time during the backward pass. Interventions must apply
to that second run too, so the backward pass must run inside the block.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attnscope.errors import ModelError
from attnscope.interception.arguments import argument
from attnscope.interception.coverage import start_check
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.hooks import HookRegistry, RegisteredHook, current


def hook_forward_pass(base: nn.Module) -> ExitStack:
    """Hook the start and the end of the calls of a base model."""
    undo = ExitStack()

    # A copy of the model keeps these hooks. Functions, because methods would be copied too.
    def begin(this: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if this is base:
            start_pass(base, args, kwargs)

    def end(this: nn.Module, args: Any, output: Any) -> None:
        if this is base:
            end_pass(base, output)

    undo.callback(base.register_forward_pre_hook(begin, with_kwargs=True).remove)
    undo.callback(base.register_forward_hook(end, always_call=True).remove)
    return undo


def hook_outer_model(outer: nn.Module, base: nn.Module) -> ExitStack:
    """Keep the token ids of a model that gives its base model embeddings in their place."""
    undo = ExitStack()

    def begin(this: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if this is outer and isinstance(ids := argument(outer, "input_ids", args, kwargs), Tensor):
            current().outer_ids[base] = ids

    def end(this: nn.Module, args: Any, output: Any) -> None:
        if this is outer:
            current().outer_ids.pop(base, None)

    undo.callback(outer.register_forward_pre_hook(begin, with_kwargs=True).remove)
    undo.callback(outer.register_forward_hook(end, always_call=True).remove)
    return undo


def start_pass(base: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Start a forward pass of a base model."""
    registry = current()
    hooks = registry.hooks_of(base)
    if not hooks:
        return
    forward_pass = registry.passes[base] = ForwardPass.of(base, args, kwargs)
    ids = registry.outer_ids.get(base)
    if forward_pass.tokens is None and ids is not None and ids.shape == forward_pass.shape:
        forward_pass.tokens = ids
    registry.interfaces.clear()  # other functions may be registered since the last pass
    stacks = [(registered.sites, stack) for registered, stack in hooks if registered.needs_geometry]
    forward_pass.check = start_check(base, stacks)
    for registered, stack in hooks:
        registered.hook.begin(stack, forward_pass)


def end_pass(base: nn.Module, output: Any) -> None:
    """Finish a forward pass; `output` is None if it raised an error."""
    registry = current()
    forward_pass, hooks = registry.passes.get(base), registry.hooks_of(base)
    complete = False
    try:
        if forward_pass is not None:
            forward_pass.stop_check()
            check, forward_pass.check = forward_pass.check, None
            forward_pass.specs.clear()  # they hold masks and arguments of the layers
            if check is not None and output is not None:
                check.raise_if_missed(forward_pass.intercepted())
        complete = output is not None
    finally:
        for registered, stack in hooks:
            registered.hook.end(stack, finished=complete)
    if forward_pass is not None and torch.is_grad_enabled():
        _follow_backward(registry, base, forward_pass, output)


def _follow_backward(
    registry: HookRegistry, base: nn.Module, forward_pass: ForwardPass, output: Any
) -> None:
    """Note the backward pass that reaches these outputs, and check that blocks are still open.

    Layers that it runs again belong to the thread of this forward pass.
    """
    needed = [hook for hook, _ in registry.hooks_of(base) if _runs_again(base, forward_pass, hook)]

    def on_backward(gradient: Tensor) -> None:
        registry.backward_task = torch._C._current_graph_task_id()
        _check_open(hook in registry.hooks for hook in needed)

    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(on_backward)  # type: ignore[no-untyped-call]


def _runs_again(base: nn.Module, forward_pass: ForwardPass, hook: RegisteredHook) -> bool:
    """Whether the backward pass of a forward pass will run layers again, and needs this hook.

    A hook that changes nothing is needed for `use_reentrant=False` only: it compares the saved
    tensors.
    """
    if not forward_pass.trains:
        return False
    if hook.changes_layers and forward_pass.runs_again:
        return True
    for module in base.modules():
        if getattr(module, "gradient_checkpointing", False) and module.training:
            options = getattr(module._gradient_checkpointing_func, "keywords", {})
            if hook.changes_layers or not options.get("use_reentrant", True):
                return True
    return False


def _check_open(blocks: Iterable[bool]) -> None:
    """Raise an error if one of these blocks has ended."""
    if not all(blocks):
        raise ModelError(
            "gradient checkpointing runs the layers again in the backward pass, but the "
            "attnscope block of the forward pass has ended; call backward() inside the with "
            "block, or call model.gradient_checkpointing_disable() first",
            code="backward-after-block",
        )
