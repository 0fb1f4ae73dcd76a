"""Raises an error if a backward pass recomputes layers after their `with` block has ended.

Gradient checkpointing runs layers a second time during the backward pass. Interventions must apply
to that second run too, so the backward pass must run inside the block.
"""

from collections.abc import Iterable

from torch import nn

from attnscope.errors import ModelError
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.hooks import RegisteredHook


def runs_again(base: nn.Module, forward_pass: ForwardPass, hook: RegisteredHook) -> bool:
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


def check_open(blocks: Iterable[bool]) -> None:
    """Raise an error if one of these blocks has ended."""
    if not all(blocks):
        raise ModelError(
            "gradient checkpointing runs the layers again in the backward pass, but the "
            "attnscope block of the forward pass has ended; call backward() inside the with "
            "block, or call model.gradient_checkpointing_disable() first",
            code="backward-after-block",
        )
