"""Holds the inputs of one forward pass of a stack, and the call specs that its layers share.

Most layers of a pass differ only in their tensors. `call_spec.py` interprets the other arguments
for the first layer, and `CallSpec` holds the result for the rest.
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
    """The signature of a call (all but its tensors), and how attnscope interprets it."""

    signature: tuple[Any, ...]
    """(original function, eager function, implementation, mask, site kind), as objects."""
    options: dict[str, Any]
    shapes: tuple[torch.Size, ...]
    """The shapes of queries, keys and values."""
    dtype: torch.dtype
    device: torch.device
    geometry: Geometry
    scale: float
    softcap: float | None
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None
    """(q, k, v) → (output, lse) for calls with this signature.

    None if such calls need dropout, gradients or autocast.
    """

    def matches(
        self, signature: tuple[Any, ...], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor
    ) -> bool:
        """Whether another call has the same signature, shapes, dtype and device."""
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
    """Whether options are the same objects, or equal strings and numbers."""
    if len(one) != len(other):
        return False
    for name, value in one.items():
        other_value = other.get(name, one)
        if value is not other_value and (type(value) not in _SIMPLE or value != other_value):
            return False
    return True


@dataclass(eq=False, slots=True, kw_only=True)
class ForwardPass:
    """The inputs of one forward pass of a stack, and the state of its layers' calls."""

    past: int | None = None
    """Tokens in the KV cache before the pass; None if the cache does not report it."""
    padding: Tensor | None = None
    """[B, K], 0 at padding: the 2-D attention mask of the stack's own text."""
    tokens: Tensor | None = None
    """int [B, Q]: the input ids; None if the input was something else."""
    output_attentions: bool = False
    """Whether the caller requested attention weights."""
    biases: dict[Any, Any] = field(default_factory=dict)
    """Split biases that layers share."""
    loop_counts: Counter[str] = field(default_factory=Counter)
    """By stack: the number of attention calls so far in this pass."""
    last_qk: dict[nn.Module, tuple[Any, Any]] = field(default_factory=dict)
    """By module: weak references to the queries and keys of its last call."""
    captured: set[nn.Module] = field(default_factory=set)
    """Modules whose weights were read because they do not use the attention interface."""
    ran: set[nn.Module] = field(default_factory=set)
    """Modules that ran and that a change must reach."""
    changed: set[nn.Module] = field(default_factory=set)
    """Modules whose call went through all changes."""
    specs: list[CallSpec] = field(default_factory=list)
    """The call specs of this pass; few."""
    check: Check | None = None
    """The check for attention that is not intercepted; in the first pass of a model only."""
    deferred_groups: dict[int, Any] = field(default_factory=dict)
    """By the id of their mask: calls with the same signature that are not delivered yet."""

    def is_repeat(self, module: nn.Module, q: Tensor, k: Tensor) -> bool:
        """Whether a module attends with the same q and k objects as in its last call.

        Such a call repeats the same weights for other values.
        """
        old = self.last_qk.get(module)
        self.last_qk[module] = ref(q), ref(k)
        return old is not None and old[0]() is q and old[1]() is k

    def clear(self) -> None:
        """Drop the arguments of the layers after the pass."""
        self.specs.clear()
        for group in self.deferred_groups.values():
            group.remaining.clear()
            group.calls.clear()  # calls of an aborted pass are not delivered
        self.deferred_groups.clear()

    @classmethod
    def of(cls, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> "ForwardPass":
        """Read the arguments of a call of the base model of a stack."""
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
