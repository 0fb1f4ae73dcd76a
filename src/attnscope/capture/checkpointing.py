"""Gradient checkpointing runs layers a second time, during the backward pass.

What was changed in the forward pass must be changed in the second run too, so the backward pass
must run inside the block: else it is an error, raised before any layer runs again.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.errors import ModelError


@contextmanager
def backward_inside(
    bases: Iterable[nn.Module], modules: Iterable[nn.Module], *, changes: bool
) -> Iterator[None]:
    """Raise in the backward pass of these bases if it runs after the block and computes layers
    again. `modules` are those inside them that the block is about; `changes` says whether the
    block changes their output, or only the operations that lead to it."""
    block = _Block(set(bases), changes)
    with ExitStack() as undo:
        for base in block.bases:
            undo.callback(base.register_forward_pre_hook(block.begin).remove)
            undo.callback(base.register_forward_hook(block.end).remove)
        for module in set(modules):
            undo.callback(module.register_forward_pre_hook(block.note_reentrant).remove)
        try:
            yield
        finally:
            block.open = False


class _Block:
    """Of one thread. A copy of a model, which keeps these hooks, is not concerned."""

    def __init__(self, bases: set[nn.Module], changes: bool):
        self.bases = bases
        self.changes = changes
        self.open = True
        self.thread = get_ident()
        self.grad = False
        """Whether the pass under way began with gradients."""
        self.recomputes = False
        """Whether layers of it will run again."""

    def __deepcopy__(self, memo: Any) -> "_Block":
        return self

    def applies_to(self, base: nn.Module) -> bool:
        return self.open and get_ident() == self.thread and base in self.bases

    def begin(self, base: nn.Module, args: Any) -> None:
        if self.applies_to(base):
            self.grad = torch.is_grad_enabled() and base.training
            self.recomputes = self.grad and _recomputes(base, self.changes)

    def note_reentrant(self, module: nn.Module, args: Any) -> None:
        # Reentrant checkpointing runs layers without gradients the first time.
        if get_ident() == self.thread and self.changes and self.grad:
            self.recomputes |= not torch.is_grad_enabled()

    def end(self, base: nn.Module, args: Any, output: Any) -> None:
        if self.applies_to(base):
            for tensor in _tensors(output) if self.recomputes else ():
                if tensor.requires_grad:
                    tensor.register_hook(self.check_open)  # type: ignore[no-untyped-call]
            self.grad = self.recomputes = False

    def check_open(self, _: Tensor) -> None:
        if not self.open:
            raise ModelError(
                "gradient checkpointing runs the layers again in the backward pass, and the "
                "attnscope block of the forward pass is closed; call backward() inside the with "
                "block, or model.gradient_checkpointing_disable()",
                code="backward-after-block",
            )


def _recomputes(base: nn.Module, changes: bool) -> bool:
    """Whether a module of transformers is checkpointed; where nothing is changed, so that saved
    tensors must be of the same operations (`use_reentrant=False`)."""
    for module in base.modules():
        if getattr(module, "gradient_checkpointing", False) and module.training:
            options = getattr(module._gradient_checkpointing_func, "keywords", {})
            if changes or not options.get("use_reentrant", True):
                return True
    return False


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
