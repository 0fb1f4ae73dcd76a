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

    said: tuple[Any, ...]
    """The functions, their name, the mask and the kind of place: the very objects."""
    options: dict[str, Any]
    shapes: tuple[torch.Size, ...]
    """Of queries, keys and values."""
    dtype: torch.dtype
    device: torch.device
    frame: Geometry
    scale: float
    softcap: float | None
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None
    """Output and log-sum-exp for the queries, keys and values of another call that says the same;
    None where more is to be done."""

    def cover(
        self, said: tuple[Any, ...], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor
    ) -> bool:
        """Whether another call says the same."""
        plain, eager, name, mask, kind = self.said
        return (
            mask is said[3]
            and plain is said[0]
            and eager is said[1]
            and name == said[2]
            and kind == said[4]
            and self.shapes == (q.shape, k.shape, v.shape)
            and self.dtype is q.dtype
            and self.device == q.device
            and same(self.options, options)
        )


def same(some: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether options are the same objects, or equal words and numbers."""
    if len(some) != len(other):
        return False
    for name, value in some.items():
        also = other.get(name, some)
        if value is not also and (type(value) not in _SIMPLE or value != also):
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
    attentions: bool = False
    """Whether the caller wants weights returned."""
    biases: dict[Any, Any] = field(default_factory=dict)
    """What layers share of biases."""
    turns: Counter[str] = field(default_factory=Counter)
    """How often the modules of a stack attended in this pass."""
    last: dict[nn.Module, tuple[Any, Any]] = field(default_factory=dict)
    """Queries and keys of a module's last call, weakly held."""
    captured: set[nn.Module] = field(default_factory=set)
    """Modules whose weights were read, because they do not go through the interface."""
    ran: set[nn.Module] = field(default_factory=set)
    """Modules that a change is meant for and that were called."""
    changed: set[nn.Module] = field(default_factory=set)
    """Modules whose call was given to all changes."""
    terms: list[CallSpec] = field(default_factory=list)
    """What calls of this pass said; few."""
    check: Check | None = None
    """Of attention that is not intercepted; in the first pass of a model."""
    alike: dict[int, Any] = field(default_factory=dict)
    """By the identity of their mask: calls that say the same, and wait to be told."""

    def again(self, module: nn.Module, q: Tensor, k: Tensor) -> bool:
        """Whether a module attends with the very queries and keys of its last call: the same
        weights once more, for other values."""
        old = self.last.get(module)
        self.last[module] = ref(q), ref(k)
        return old is not None and old[0]() is q and old[1]() is k

    def let_go(self) -> None:
        """The pass is over: forget what was passed to its layers."""
        self.terms.clear()
        for alike in self.alike.values():
            alike.left.clear()
            alike.calls.clear()  # of a pass that broke off nobody is told
        self.alike.clear()

    @classmethod
    def of(cls, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> "ForwardPass":
        """Read the arguments of a call of the base of a stack."""
        named = {
            name: argument(base, name, args, kwargs) if args else kwargs.get(name)
            for name in ("past_key_values", "attention_mask", "input_ids", "output_attentions")
        }
        cache, mask, tokens, asked = named.values()
        config = getattr(base, "config", None)
        return cls(
            past=0 if cache is None else _length(cache),
            padding=mask if isinstance(mask, Tensor) and mask.ndim == 2 else None,
            tokens=tokens if isinstance(tokens, Tensor) and tokens.ndim == 2 else None,
            attentions=bool(
                getattr(config, "output_attentions", False) if asked is None else asked
            ),
        )


def _length(cache: Any) -> int | None:
    try:
        return int(cache.get_seq_length())
    except (AttributeError, IndexError, TypeError, ValueError):  # not a cache of this kind
        return None
