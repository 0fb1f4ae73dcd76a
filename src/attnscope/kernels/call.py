"""An attention call: its tensors, how scores follow from them, and which keys a query sees.

Names of dimensions in all kernels:
    B batch · H query heads · G key/value heads (H = G · R) · Q queries · K keys
    D size of a query or key · E size of a value · M counted queries (rows)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

LOG2E = math.log2(math.e)  # exp2 is the fastest exponential
# Scores that may be larger than this are computed in float64. Most heads of trained models stay
# below it. The biases of a few heads give scores of hundreds to tens of thousands, where float32
# rounds away the digits that decide a weight.
LARGE = 128.0
# Up to this many rows, the CPU computes products in float64: it costs little.
SINGLE = 8
# Devices without float64, which the kernels use for sums.
WITHOUT_FLOAT64 = {"mps"}

Form = Literal["causal", "full", "interval"]


@dataclass(eq=False, kw_only=True)
class VisibleRanges:
    """The keys each query sees: the real keys `j` with `start[b, i] <= j < stop[b, i]`.

    All supported masks are such intervals (causal, windowed, chunked, packed, padded on either
    side), so two integers per query replace an n × n mask.
    """

    form: Form
    """The mask argument of a fused kernel: "causal" and "full" need no mask tensor."""
    bounds: Callable[[], tuple[Tensor, Tensor]]
    """Computes `start` and `stop` on first use."""
    real: Tensor | None = None
    """bool [B, K]: False at padding; None unless padding lies inside the intervals."""
    cache: dict[Any, Any] = field(default_factory=dict)
    """Cache of values that depend on the intervals alone; shared by layers."""

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        return self.bounds()

    @property
    def start(self) -> Tensor:
        """int32 [B, Q], first visible key."""
        return self._bounds[0]

    @property
    def stop(self) -> Tensor:
        """int32 [B, Q], one past the last visible key; equal to `start` if no key is visible."""
        return self._bounds[1]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreBias:
    """A bias that an intervention adds to the scores of some queries, keys and heads."""

    bias: Tensor
    """float32 [B or 1, H or 1, K], added after scale, soft-cap and the model's biases; -inf
    hides a key. A row with visible keys must keep at least one."""
    queries: Tensor | None = None
    """bool [B, Q]: the queries that get the bias; None for all. In `KernelRows`: [B, M], the
    rows."""


# Not frozen: the constructor of a frozen dataclass takes as long as a small layer. No field of
# these types is changed after construction.
@dataclass(slots=True, eq=False, kw_only=True)
class ScoreSpec:
    """How scores follow from queries and keys, and which keys each query sees."""

    scale: float
    """Factor of the dot products; nan if only the weights are known."""
    visible: VisibleRanges
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    sinks: Tensor | None = None
    """[H], a learned sink: a score per head in the softmax without a key."""
    key_bias: Tensor | None = None
    """[B or 1, H, K], added to every query's score of a key, after scale and soft-cap (ALiBi)."""
    distance_bias: Tensor | None = None
    """[H, 2 N + 1], added likewise: entry `N + d` at distance `d = self_key - key`. The first and
    last entries also apply to larger distances (relative positions of T5)."""
    score_biases: tuple[ScoreBias, ...] = ()

    @property
    def biased(self) -> bool:
        """Whether the scores have a bias."""
        return not (self.key_bias is None and self.distance_bias is None and not self.score_biases)


@dataclass(slots=True, eq=False, kw_only=True)
class AttentionCall(ScoreSpec):
    """One attention call: one layer in one forward pass."""

    layer: int
    q: Tensor
    """[B, H, Q, D]"""
    k: Tensor
    """[B, G, K, D]"""
    v: Tensor
    """[B, G, K, E]"""
    first: int = 0
    """Index of query 0 among the keys, for `distance_bias`; the other queries follow it."""
    bias: Tensor | None = None
    """[B or 1, H or 1, Q, K], added likewise. Kernels do not support it: the call runs densely."""


def distance_index(self_key: Tensor, left: int, right: int, size: int) -> Tensor:
    """int64 [..., keys]: index into a `distance_bias` of this size, from `self_key` [...] to the
    keys `left … right`."""
    keys = torch.arange(left, right, device=self_key.device)
    return (self_key[..., None].long() - keys + size // 2).clamp_(0, size - 1)


def total_score_bias(
    score_biases: tuple[ScoreBias, ...], sequences: slice, heads: slice, rows: slice, keys: slice
) -> Tensor | None:
    """float32, broadcast to [sequences, heads, rows, keys]: the sum of all score biases."""
    total = None
    for added_bias in score_biases:
        some = sequences if len(added_bias.bias) > 1 else slice(None)
        bias = added_bias.bias[
            some, heads if added_bias.bias.shape[1] > 1 else slice(None), None, keys
        ]
        if added_bias.queries is not None:
            bias = torch.where(added_bias.queries[sequences, None, rows, None], bias, 0.0)
        total = bias if total is None else total + bias
    return total


@cache
def has_triton() -> bool:
    """Whether the Triton kernels can be imported."""
    return find_spec("triton") is not None
