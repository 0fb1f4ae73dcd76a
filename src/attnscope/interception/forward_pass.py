"""Holds the inputs of one forward pass of a stack, and the call specs that its layers share."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from attnscope.interception.arguments import argument
from attnscope.interception.captured_call import CallSpec
from attnscope.interception.coverage import Check


@dataclass(eq=False, slots=True, kw_only=True)
class ForwardPass:
    """The inputs of one forward pass of a stack, and the state of its layers' calls."""

    cache: Any = None
    """The KV cache; None without one."""
    past: int | None = None
    """Tokens in the KV cache before the pass; None if the cache does not report it."""
    mask: Any = None
    """The attention mask of the stack's own text, as it was passed."""
    tokens: Tensor | None = None
    """int [B, Q]: the input ids, also where pictures or sound replace the embeddings of some; None
    if the input was something else."""
    shape: tuple[int, int] = (0, 0)
    """Sequences, and tokens of each, of the input ids or embeddings; (0, 0) if unknown."""
    output_attentions: bool = False
    """Whether the caller requested attention weights."""
    trains: bool = False
    """Whether it runs in training and with gradients."""
    runs_again: bool = False
    """Whether the backward pass will run layers of it again (gradient checkpointing)."""
    biases: dict[Any, Any] = field(default_factory=dict)
    """Split biases that layers share."""
    loop_counts: Counter[str] = field(default_factory=Counter)
    """By stack: the number of attention calls so far in this pass."""
    last_qk: dict[nn.Module, tuple[Any, Any]] = field(default_factory=dict)
    """By module: weak references to the queries and keys of its last call."""
    captured: set[nn.Module] = field(default_factory=set)
    """Modules whose weights were read because they do not use the attention interface."""
    specs: list[CallSpec] = field(default_factory=list)
    """The call specs of this pass; few."""
    check: Check | None = None
    """The check for attention that is not intercepted; in the first pass of a model only."""

    @property
    def padding(self) -> Tensor | None:
        """[B, K], 0 at padding: the attention mask, if it has two dimensions."""
        return self.mask if isinstance(self.mask, Tensor) and self.mask.ndim == 2 else None

    def spec_for(
        self, signature: tuple[Any, ...], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor
    ) -> CallSpec | None:
        """The spec of an earlier layer of this pass that a call matches."""
        for spec in self.specs:
            if spec.matches(signature, options, q, k, v):
                return spec
        return None

    def is_repeat(self, module: nn.Module, q: Tensor, k: Tensor) -> bool:
        """Whether a module attends with the same q and k objects as in its last call.

        Such a call repeats the same weights for other values.
        """
        old = self.last_qk.get(module)
        self.last_qk[module] = ref(q), ref(k)
        return old is not None and old[0]() is q and old[1]() is k

    def intercepted(self) -> set[nn.Module]:
        """The modules whose attention was delivered."""
        return {*self.last_qk, *self.captured}

    def note_layer(self) -> None:
        """A layer runs. Reentrant checkpointing runs it without gradients the first time."""
        self.runs_again |= self.trains and not torch.is_grad_enabled()

    def stop_check(self) -> None:
        """Stop the check for attention that is not intercepted."""
        if self.check is not None:
            self.check.end()

    @classmethod
    def of(cls, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> "ForwardPass":
        """Read the arguments of a call of the base model of a stack."""
        names = "past_key_values", "attention_mask", "input_ids", "output_attentions"
        named = (argument(base, name, args, kwargs) for name in names)
        cache, mask, tokens, output_attentions = named
        inputs = tokens if tokens is not None else argument(base, "inputs_embeds", args, kwargs)
        known = isinstance(inputs, Tensor) and inputs.ndim > 1
        if output_attentions is None:
            output_attentions = getattr(getattr(base, "config", None), "output_attentions", False)
        return cls(
            cache=cache,
            past=0 if cache is None else _length(cache),
            mask=mask,
            tokens=tokens if isinstance(tokens, Tensor) and tokens.ndim == 2 else None,
            shape=(inputs.shape[0], inputs.shape[1]) if known else (0, 0),
            output_attentions=bool(output_attentions),
            trains=base.training and torch.is_grad_enabled(),
        )


def _length(cache: Any) -> int | None:
    try:
        return int(cache.get_seq_length())
    except (AttributeError, IndexError, TypeError, ValueError):  # not a cache of this kind
        return None
