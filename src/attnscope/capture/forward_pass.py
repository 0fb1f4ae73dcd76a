"""One forward pass of a stack: what it was given, and what its layers' calls have in common.

Most layers of a pass differ by their tensors alone. What their other arguments mean is worked out
for the first of them (`calls.py`) and kept here for the rest. Must not know what that meaning is.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from attnscope.capture.coverage import Check
from attnscope.capture.geometry import Geometry
from attnscope.capture.sites import argument

_SIMPLE = (float, int, bool, str)


@dataclass(slots=True, eq=False, kw_only=True)
class CallSpec:
    """What a call says beside its tensors, and what that was found to mean."""

    signature: tuple[Any, ...]
    """The functions, their name, the mask and the kind of place: the very objects."""
    options: dict[str, Any]
    shapes: tuple[torch.Size, ...]
    """Of queries, keys and values."""
    dtype: torch.dtype
    device: torch.device
    geometry: Geometry
    scale: float
    softcap: float | None
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None
    """Output and log-sum-exp for the queries, keys and values of another call that says the same;
    None where more is to be done."""

    def matches(
        self, signature: tuple[Any, ...], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor
    ) -> bool:
        """Whether another call says the same."""
        original, eager, name, mask, kind = self.signature
        return (
            mask is signature[3]
            and original is signature[0]
            and eager is signature[1]
            and name == signature[2]
            and kind == signature[4]
            and self.shapes == (q.shape, k.shape, v.shape)
            and self.dtype is q.dtype
            and self.device == q.device
            and same_options(self.options, options)
        )


def same_options(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether options are the same objects, or equal words and numbers."""
    if len(one) != len(other):
        return False
    for name, value in one.items():
        other_value = other.get(name, one)
        if value is not other_value and (type(value) not in _SIMPLE or value != other_value):
            return False
    return True


@dataclass(eq=False, slots=True, kw_only=True)
class ForwardPass:
    """What a forward pass of a stack was given."""

    past: int | None = None
    """Tokens in its cache; None where there is no telling."""
    padding: Tensor | None = None
    """[B, K], 0 at padding, on the CPU: the mask of the stack's own text."""
    tokens: Tensor | None = None
    """int [B, Q]: the ids it was fed; None where it was fed something else."""
    output_attentions: bool = False
    """Whether the caller wants weights returned."""
    biases: dict[Any, Any] = field(default_factory=dict)
    """What layers share of biases."""
    loop_counts: Counter[str] = field(default_factory=Counter)
    """How often the modules of a stack attended in this pass."""
    last_qk: dict[nn.Module, tuple[Any, Any]] = field(default_factory=dict)
    """Queries and keys of a module's last call, weakly held."""
    captured: set[nn.Module] = field(default_factory=set)
    """Modules whose weights were read, because they do not go through the interface."""
    ran: set[nn.Module] = field(default_factory=set)
    """Modules that a change is meant for and that were called."""
    changed: set[nn.Module] = field(default_factory=set)
    """Modules whose call was given to all changes."""
    specs: list[CallSpec] = field(default_factory=list)
    """What calls of this pass said; few."""
    check: Check | None = None
    """Of attention that is not intercepted; in the first pass of a model."""
    deferred_groups: dict[int, Any] = field(default_factory=dict)
    """By the identity of their mask: calls that say the same, and wait to be told."""

    def is_repeat(self, module: nn.Module, q: Tensor, k: Tensor) -> bool:
        """Whether a module attends with the very queries and keys of its last call: the same
        weights once more, for other values."""
        old = self.last_qk.get(module)
        self.last_qk[module] = ref(q), ref(k)
        return old is not None and old[0]() is q and old[1]() is k

    def clear(self) -> None:
        """The pass is over: forget what was passed to its layers."""
        self.specs.clear()
        for group in self.deferred_groups.values():
            group.remaining.clear()
            group.calls.clear()  # of a pass that broke off nobody is told
        self.deferred_groups.clear()

    @classmethod
    def of(cls, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> "ForwardPass":
        """Read the arguments of a call of the base of a stack."""
        named = {
            name: argument(base, name, args, kwargs) if args else kwargs.get(name)
            for name in ("past_key_values", "attention_mask", "input_ids", "output_attentions")
        }
        cache, mask, tokens, output_attentions = named.values()
        config = getattr(base, "config", None)
        return cls(
            past=0 if cache is None else _length(cache),
            padding=mask if isinstance(mask, Tensor) and mask.ndim == 2 else None,
            tokens=tokens if isinstance(tokens, Tensor) and tokens.ndim == 2 else None,
            output_attentions=bool(
                getattr(config, "output_attentions", False)
                if output_attentions is None
                else output_attentions
            ),
        )


def _length(cache: Any) -> int | None:
    try:
        return int(cache.get_seq_length())
    except (AttributeError, IndexError, TypeError, ValueError):  # not a cache of this kind
        return None
