"""Raises an error if a backward pass recomputes layers after their `with` block has ended.

Gradient checkpointing runs layers a second time during the backward pass. Interventions must apply
to that second run too, so the backward pass must run inside the block.
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
    """Raise an error if the backward pass of these bases recomputes layers after the block.

    `modules` are the attention modules inside the bases. `changes` is True if the block changes
    their output, and False if it changes only the operations that compute it.
    """
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
    """The state of one block, for the thread that opened it. Copies of the model are ignored."""

    def __init__(self, bases: set[nn.Module], changes: bool):
        self.bases = bases
        self.changes = changes
        self.open = True
        self.thread = get_ident()
        self.grad = False
        """Whether the current forward pass started with gradients."""
        self.recomputes = False
        """Whether the backward pass will run layers of it again."""

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
                "gradient checkpointing runs the layers again in the backward pass, but the "
                "attnscope block of the forward pass has ended; call backward() inside the with "
                "block, or call model.gradient_checkpointing_disable() first",
                code="backward-after-block",
            )


def _recomputes(base: nn.Module, changes: bool) -> bool:
    """Whether the backward pass will recompute layers in a way that needs the open block.

    Without changes this holds for `use_reentrant=False` only: it compares the saved tensors.
    """
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
