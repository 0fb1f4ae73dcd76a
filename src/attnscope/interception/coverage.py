"""Checks that every attention call of a forward pass was intercepted.

In the first pass of a model, `Check` finds the attention that torch runs: its fused functions, and
every softmax of a product of two activations. A call that was not intercepted is an error that
names the module.
"""

import sys
from contextlib import ExitStack
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from attnscope.errors import ModelError
from attnscope.interception.families import MODALITY_TOWERS
from attnscope.interception.sites import Sites
from attnscope.interception.stacks import in_pooling_head

PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"}
_SOFTMAX = {"softmax", "_softmax", "_safe_softmax", "log_softmax"}
_FUSED = {
    "flex_attention",
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
}
# The results of these functions are neither attention scores nor attention weights.
_PROJECTIONS = {"linear", "mm", "addmm", "conv1d", "conv2d", "layer_norm", "rms_norm"}
_SLICES = {"cat", "concat", "pad", "__getitem__"}
_CALL = nn.Module._call_impl.__code__


# By model: (structure, stack) of the stacks whose attention was all intercepted in a pass.
_checked: WeakKeyDictionary[nn.Module, set[tuple[int, str]]] = WeakKeyDictionary()


def is_checked(sites: Sites, stack: str) -> bool:
    """Whether a pass of this stack was checked since the model last changed its structure."""
    return (sites.structure, stack) in _checked.get(sites.model, ())


class Check:
    """Finds the attention calls of one forward pass of a base model, until `end`."""

    def __init__(self, base: nn.Module, stacks: list[tuple[Sites, str]]):
        self.base = base
        self.unchecked = [each for each in stacks if not is_checked(*each)]
        """The (sites, stack) that no pass was checked of."""
        self.missed: list[nn.Module] = []
        """The innermost module of every attention call that was not intercepted."""
        self.ran: list[nn.Module] = []
        """The attention modules whose forward was called."""
        self._undo = ExitStack()
        modules = {
            module
            for sites, _ in stacks
            for module, site in sites.modules.items()
            if sites.base_models[site.stack] is base
        }
        for module in modules:
            hook = module.register_forward_pre_hook(self._record_run)
            self._undo.callback(hook.remove)
        self._undo.enter_context(_AttentionCounter(self))

    def end(self) -> None:
        """Stop the check after the pass, also if the pass raised an error."""
        self._undo.close()

    def add_missed(self, chain: list[nn.Module]) -> None:
        """Record a call that was not intercepted; `chain` holds its modules, innermost first."""
        if chain:
            self.missed.append(chain[0])

    def _record_run(self, module: nn.Module, args: Any) -> None:
        self.ran.append(module)

    def raise_if_missed(self, captured: set[nn.Module]) -> None:
        """Raise an error for the first attention call that was not intercepted, if any."""
        not_captured = [module for module in self.ran if module not in captured]
        for sites, stack in self.unchecked:
            for module in (*self.missed, *not_captured):
                name = name_in(sites.model, module)
                if not MODALITY_TOWERS.search(name) and not in_pooling_head(sites.model, name):
                    raise _error(name, module)
            _checked.setdefault(sites.model, set()).add((sites.structure, stack))


def start_check(base: nn.Module, stacks: list[tuple[Sites, str]]) -> Check | None:
    """Start to check a pass; None if a pass of each of these stacks was checked before."""
    return None if all(is_checked(*each) for each in stacks) else Check(base, stacks)


def check_graph(graph: Any, modules: dict[int, nn.Module]) -> None:
    """Raise an error if a traced graph has attention that is not attnscope's operator.

    A model may choose another function when it is traced. `modules` are the attention modules of
    the pass, by id.
    """
    names, intercepted = set(), set()
    for node in graph.graph.nodes:
        target = node.target
        if target is torch.ops.attnscope.attend:
            intercepted.add(node.args[-1])
        elif node.op in ("call_function", "call_method"):
            names.add(target if isinstance(target, str) else getattr(target, "__name__", ""))
    other = {name for name in names if _is_fused(name)}
    if modules.keys() - intercepted:
        other |= names & _SOFTMAX
    if other:
        raise ModelError(
            f"its graph calls {', '.join(sorted(other))}, which attnscope cannot intercept",
            code="attention-not-captured",
            functions=sorted(other),
        )


def _is_fused(name: str) -> bool:
    """Whether a function of torch of this name computes attention."""
    return name in _FUSED or "scaled_dot_product" in name or "flash_att" in name


def name_in(model: nn.Module, module: nn.Module) -> str:
    """The name of a module in the model, or the name of its class if it is not in the model."""
    names = (name for name, other in model.named_modules() if other is module)
    return next(names, type(module).__name__)


def _error(name: str, module: nn.Module) -> ModelError:
    return ModelError(
        f"{name} ({type(module).__name__}) runs attention that attnscope cannot intercept, so its "
        "layer would be missing from the results; its forward must call "
        "ALL_ATTENTION_FUNCTIONS.get_interface, as the models of transformers do",
        code="attention-not-captured",
        module=name,
    )


class _AttentionCounter(TorchFunctionMode):
    """Finds attention among the torch functions that a pass calls.

    A softmax belongs to attention if its argument comes from a product of two activations.
    Routers, output heads and pooling multiply by a parameter instead.
    """

    def __init__(self, check: Check):
        super().__init__()
        self.check = check
        self.constants: Any = WeakIdKeyDictionary()
        """Parameters, buffers, and tensors computed from these alone."""
        self.products: Any = WeakIdKeyDictionary()
        """Products of two activations, and tensors computed from these."""
        for tensor in (*check.base.parameters(), *check.base.buffers()):
            self.constants[tensor] = True

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").split(".")[0]
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if inputs and (
            (_is_fused(name) and inputs[0] not in self.constants)
            or (name in _SOFTMAX and inputs[0] in self.products)
        ):
            chain = modules_around(self.check.base)
            if chain is not None:
                self.check.add_missed(chain)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.ndim and inputs:
            self._propagate(name, inputs, result)
        return result

    def _propagate(self, name: str, inputs: list[Tensor], result: Tensor) -> None:
        if all(tensor in self.constants for tensor in inputs):
            self.constants[result] = True
        elif name in PRODUCTS:
            if result.ndim >= 3 and not any(tensor in self.constants for tensor in inputs[-2:]):
                self.products[result] = True
        elif name not in _PROJECTIONS:
            size = result.numel()
            if any(
                tensor in self.products and (name in _SLICES or tensor.numel() <= size)
                for tensor in inputs
            ):
                self.products[result] = True


def modules_around(base: nn.Module | None = None) -> list[nn.Module] | None:
    """The modules below the base whose forward is running, innermost first.

    None if attnscope itself called the caller's caller.
    """
    chain: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _CALL:
            module = frame.f_locals["self"]
            if module is base:
                break
            chain.append(module)
        elif not chain and frame.f_globals.get("__name__", "").startswith("attnscope."):
            return None
        frame = frame.f_back
    return chain
