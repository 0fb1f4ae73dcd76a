"""Runs the passes of a compiled model through a graph of their own while hooks are open.

A graph that was compiled before the block has no hooks in it, so inside a block compiled functions
run uncompiled (`patches.UNCOMPILED`). The base model is then compiled once more, with attention as
one operator (`compiled_attention.py`). This graph belongs to a function of attnscope's own, so the
graphs of the model outside of the block are neither used nor changed.
"""

import re
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from functools import partial
from types import FrameType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
)
from torch.utils._pytree import tree_leaves

from attnscope.errors import AttnscopeWarning
from attnscope.interception import patches
from attnscope.interception.compiled_attention import running, traced_masks
from attnscope.interception.coverage import check_graph, is_checked
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.hooks import RegisteredHook, current
from attnscope.interception.pass_hooks import end_pass, start_pass
from attnscope.interception.sites import Sites
from attnscope.interception.wrappers import is_compiled


class _Compilation(NamedTuple):
    """How the user compiled the model."""

    backend: Any
    dynamic: bool | None


class _Graphs:
    """The compiled functions of one base model, by how the user compiled it."""

    def __init__(self) -> None:
        self.functions: list[tuple[_Compilation, Callable[..., Any]]] = []
        self.problem: str | None = None
        """Why the model cannot be compiled with attention as an operator."""

    def function(self, compilation: _Compilation) -> Callable[..., Any]:
        """The compiled pass; compiled when it is first called."""
        for known, function in self.functions:
            if known == compilation:
                return function
        # A new code object: graphs belong to code objects.
        traced = FunctionType(_traced_pass.__code__.replace(), globals(), "compiled_pass")
        backend = partial(_compile_graph, compilation.backend)
        function = torch.compile(
            traced, backend=backend, dynamic=compilation.dynamic, fullgraph=True
        )
        self.functions.append((compilation, function))
        return function


_graphs: WeakKeyDictionary[nn.Module, _Graphs] = WeakKeyDictionary()


def _traced_pass(base: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    traced_masks.clear()
    output = base.forward(*args, **kwargs)
    traced_masks.clear()
    return output


def _compile_graph(backend: Any, graph: Any, inputs: Any) -> Any:
    """Compile a graph with the user's backend."""
    check_graph(graph, running.modules)
    if getattr(backend, "compiler_name", "") == "inductor":
        backend = copy(backend)
        backend.config = {**backend.config, "triton.cudagraphs": False}  # they replay no Python
    return backend(graph, inputs)


def route_passes(base: nn.Module, sites: Sites) -> ExitStack:
    """Have the calls of a base model go through `_run`; a copy of the model does not."""
    undo, inside = ExitStack(), _of_modules(base, sites)
    before = vars(base).get("_compiled_call_impl")

    def call(*args: Any, **kwargs: Any) -> Any:
        plain = before or base._call_impl
        if torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        hooks = [hook for hook, _ in current().hooks_of(base)]
        compilation = (_enclosing() or inside) if hooks else None
        if compilation is None:
            return plain(*args, **kwargs)
        problem = _problem(base, hooks, compilation, args, kwargs)
        if problem is None:
            return _run(base, hooks, compilation, args, kwargs)
        if problem:
            _warn(problem)
        return plain(*args, **kwargs)

    def restore() -> None:
        if vars(base).get("_compiled_call_impl") is not call:
            return  # other code compiled it inside the block
        if before is None:
            del base._compiled_call_impl
        else:
            base._compiled_call_impl = before

    base._compiled_call_impl = call
    undo.callback(restore)
    return undo


def _run(
    base: nn.Module,
    hooks: list[RegisteredHook],
    compilation: _Compilation,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Run a pass through its graph; it starts and ends outside of the graph."""
    graphs, output = _graphs.setdefault(base, _Graphs()), None
    function = graphs.function(compilation)
    modules = {
        id(module): module
        for hook in hooks
        for module, site in hook.sites.modules.items()
        if hook.sites.base_models[site.stack] is base
    }
    running.begin(modules)
    try:
        start_pass(base, args, kwargs)
        try:
            with patches.one_compiled_call():
                output = function(base, args, kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            # The graph is whole, so nothing of the pass has run.
            output = base.forward(*args, **kwargs)
            graphs.problem = _reason(error)
            _warn(graphs.problem)
        return output
    finally:
        running.begin({})
        end_pass(base, output)


def _problem(
    base: nn.Module,
    hooks: list[RegisteredHook],
    compilation: _Compilation,
    args: Any,
    kwargs: dict[str, Any],
) -> str | None:
    """Why a pass must run uncompiled; None if it need not, "" if that is no news to the user."""
    if base in _graphs and (known := _graphs[base].problem):
        return known
    if not all(hook.hook.in_graphs and not hook.dense for hook in hooks):
        return "this block needs more than its attention calls"
    if not all(_is_plain(hook, base) for hook in hooks):
        return "not all of its attention modules call the attention interface, once in a pass"
    if _has_other_hooks(base):
        return "other code has registered hooks of the base model"
    if base.training:
        return "it is in training mode"
    if torch.is_grad_enabled() and _needs_gradients(base, args, kwargs):
        return "gradients are recorded; run it under torch.no_grad()"
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return "autocast is on"
    forward_pass = ForwardPass.of(base, args, kwargs)
    if forward_pass.cache is not None:
        return "the pass has a KV cache"
    if forward_pass.output_attentions:
        return "the attention weights are requested"
    if getattr(compilation.backend, "compiler_name", "") == "cudagraphs":
        return "its backend captures CUDA graphs"
    stacks = [
        (hook.sites, stack)
        for hook in hooks
        for stack, other in hook.sites.base_models.items()
        if other is base and hook.needs_geometry
    ]
    # The first pass of a model is checked for attention that is not intercepted (coverage.py).
    return None if all(is_checked(*each) for each in stacks) else ""


def _is_plain(hook: RegisteredHook, base: nn.Module) -> bool:
    """Whether every attention module of a base model calls the attention interface, once."""
    sites = hook.sites
    stacks = {stack for stack, other in sites.base_models.items() if other is base}
    hooked = any(sites.modules[module].stack in stacks for module in sites.hooked)
    return not hooked and sites.split is None and not stacks & sites.shared_stacks.keys()


def _has_other_hooks(base: nn.Module) -> bool:
    """Whether a base model has hooks besides the two of `hook_forward_pass`."""
    ours = len(base._forward_pre_hooks) == len(base._forward_hooks) == 1
    backward = base._backward_hooks or base._backward_pre_hooks
    anywhere = nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    return not ours or bool(backward) or bool(anywhere)


def _needs_gradients(base: nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
    tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    return any(each.requires_grad for each in (*base.parameters(), *tensors))


def _enclosing() -> _Compilation | None:
    """How the innermost compiled function that is running here was compiled."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if is_compiled(frame.f_code):
            return _compilation_of(frame.f_locals)
        frame = frame.f_back
    return None


def _of_modules(base: nn.Module, sites: Sites) -> _Compilation | None:
    """How the first compiled module of a base model was compiled."""
    if not sites.compiled:
        return None
    parts = {*base.modules()}
    for module, function in sites.compiled.items():
        if module in parts:
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            return _compilation_of({name: cell.cell_contents for name, cell in cells})
    return None


def _compilation_of(names: dict[str, Any]) -> _Compilation:
    """From the variables of a function that `torch.compile` returned."""
    return _Compilation(eval_frame.innermost_backend(names["callback"]), names["self"]._dynamic)


def _reason(error: Exception) -> str:
    """Why a trace ended: the message of `traced_attention`, or the first line of torch's own."""
    if isinstance(error, FailOnRecompileLimitHit):
        return (
            "it was compiled for as many kinds of inputs as torch._dynamo.config.recompile_limit "
            f"allows ({torch._dynamo.config.recompile_limit}); dynamic=True needs fewer graphs"
        )
    text = str(error.inner_exception if isinstance(error, BackendCompilerFailed) else error)
    message = re.search(r"User-inserted graph break\. Message: (.*)", text)
    first_line = message[1] if message else text.strip().partition("\n")[0]
    return f"torch cannot compile it as one graph: {first_line}"


def _warn(problem: str) -> None:
    warnings.warn(  # Python shows this once
        f"this model is compiled; an attnscope block runs it uncompiled, because {problem}; so it "
        "is slower and its outputs are those of the uncompiled model",
        AttnscopeWarning,
        stacklevel=2,
    )
