"""Activations near zero, moved away from it: which ones, how far, and by what chance.

Three numbers of a sequence say all but the chance (`bounds`); they are made on the activations'
device, padding included, without anything that has to wait for it. The chance is a hash of a
sequence's key and of where among its real tokens an activation stands: the same alone and in any
batch, on a CPU and on a GPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from attnscope.kernels.call import has_triton

# A standard deviation of normal values is this many times their median absolute deviation.
NORMAL = 1.4826
# The share of entries that is moved lies in here, unless it is given.
MIN_SHARE, MAX_SHARE = 0.02, 0.25

# Numbers of 16 bits from 0 on.
HALF = 1 << 15

# The counter-based generator Philox 4×32, ten rounds.
_MULTIPLY = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Bounds:
    """Of every sequence, float32 [B]."""

    near: Tensor
    """Activations no farther from zero than this move."""
    high: Tensor
    """The most that one from 0 on moves by; 0 or more."""
    low: Tensor
    """The most that one below 0 moves by; 0 or less."""


def redistribute(
    a: Tensor,
    keys: Tensor,
    real: Tensor | None = None,
    *,
    c: float = 0.25,
    p1: float = 85.0,
    share: float | None = None,
) -> Tensor:
    """Activations [B, T, W] after the move; `keys` int64 [B] are the chance of each sequence, and
    `real` bool [B, T] is False at padding, which stays."""
    limits = bounds(a, real, c=c, p1=p1, share=share)
    if a.is_cuda and has_triton():
        from attnscope.kernels import redistribute_jit

        return redistribute_jit.apply_shift(a, keys, real, limits)
    return apply_shift(a, philox_uniform(keys, real, a.shape), limits, real)


def apply_shift(a: Tensor, amount: Tensor, limits: Bounds, real: Tensor | None = None) -> Tensor:
    """The move itself; `amount` float32 [B, T, W] is from [0, 1)."""
    near, high, low = (each[:, None, None] for each in (limits.near, limits.high, limits.low))
    values = a.float()
    moves = values.abs() <= near
    if real is not None:
        moves &= real[..., None]
    score_bound = torch.where(values >= 0, high, low)
    return torch.where(moves, values + amount * score_bound, values).to(a.dtype)


def bounds(
    a: Tensor,
    real: Tensor | None = None,
    *,
    c: float = 0.25,
    p1: float = 85.0,
    share: float | None = None,
) -> Bounds:
    """What moves, and how far, over the real tokens of each sequence.

    c, p1, share
              as of `attnscope.arm`
    """
    B, T, W = a.shape
    if real is None:
        n = torch.full((B,), T * W, dtype=torch.float64, device=a.device)
    else:
        n = real.sum(1, dtype=torch.float64) * W
    order = (_Counted if a.element_size() == 2 else _Sorted)(a.detach(), real)
    if share is not None:
        count = (share * n).round()
    else:
        near = NORMAL * c * order.deviation(n)
        below = order.below(near)
        count = torch.where(below < MIN_SHARE * n, (MIN_SHARE * n).round(), below)
        count = torch.where(below > MAX_SHARE * n, (MAX_SHARE * n).round(), count)
    return Bounds(
        near=order.size((count - 1).clamp(min=0).long()),
        high=_quantile(order.value, p1 / 100, n).clamp(min=0),
        low=order.value(torch.zeros_like(n, dtype=torch.int64)).clamp(max=0),
    )


class _Sorted:
    """Activations [B, T, W] of real tokens in order, and their sizes."""

    def __init__(self, a: Tensor, real: Tensor | None):
        if real is not None:  # padding comes last
            a = a.masked_fill(~real[..., None], math.inf)
        self.values = a.reshape(len(a), -1).sort(1).values.float()
        self.sizes = self.values.abs().sort(1).values

    def value(self, at: Tensor) -> Tensor:
        """float32 [B]: the value with so many before it."""
        return self.values.gather(1, at[:, None])[:, 0]

    def size(self, at: Tensor) -> Tensor:
        """float32 [B]: the size with so many before it."""
        return self.sizes.gather(1, at[:, None])[:, 0]

    def below(self, limit: Tensor) -> Tensor:
        """float64 [B]: how many sizes are smaller."""
        return torch.searchsorted(self.sizes, limit[:, None])[:, 0].double()

    def deviation(self, n: Tensor) -> Tensor:
        """float32 [B]: the median distance of sizes from their median."""
        centre = _quantile(self.size, 0.5, n)
        away = (self.sizes - centre[:, None]).abs().sort(1).values
        return _quantile(lambda at: away.gather(1, at[:, None])[:, 0], 0.5, n)


class _Counted:
    """The same where values have 16 bits: there are few, so it is counted how often each occurs,
    and nothing as long as the text is sorted."""

    def __init__(self, a: Tensor, real: Tensor | None):
        self.table = _value_table(a.dtype, a.device)
        self.sizes = self.table[HALF:]
        self.cumulative = _histogram16(a, real).cumsum(1)
        """int64 [B, values]: how many are no larger."""
        smaller = torch.nn.functional.pad(self.cumulative, (1, 0))[:, :HALF].flip(1)
        self.cumulative_size = self.cumulative[:, HALF:] - smaller
        """int64 [B, sizes]: how many values are no farther from zero."""

    def value(self, at: Tensor) -> Tensor:
        return self.table[_rank(self.cumulative, at)]

    def size(self, at: Tensor) -> Tensor:
        return self.sizes[_rank(self.cumulative_size, at)]

    def below(self, limit: Tensor) -> Tensor:
        at = torch.searchsorted(self.sizes, limit)
        before = self.cumulative_size.gather(1, (at - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where(at > 0, before, 0).double()

    def deviation(self, n: Tensor) -> Tensor:
        centre = _quantile(self.size, 0.5, n)
        away, order = (self.sizes - centre[:, None]).abs().sort(1)
        histogram16 = self.cumulative_size.diff(
            dim=1, prepend=torch.zeros_like(self.cumulative_size[:, :1])
        )
        cumulative = histogram16.gather(1, order).cumsum(1)
        return _quantile(lambda at: away.gather(1, _rank(cumulative, at)[:, None])[:, 0], 0.5, n)


def _rank(cumulative: Tensor, at: Tensor) -> Tensor:
    """int64 [B]: the first that has more than `at` up to it, of [B, values]."""
    return torch.searchsorted(cumulative, at[:, None] + 1)[:, 0].clamp(max=cumulative.shape[1] - 1)


def _histogram16(a: Tensor, real: Tensor | None) -> Tensor:
    """int64 [B, 2 · HALF]: how often each number of 16 bits occurs, in order."""
    if a.is_cuda and has_triton():
        from attnscope.kernels import redistribute_jit

        return redistribute_jit.histogram16(a, real)
    bits = a.contiguous().view(torch.int16).long()
    index = torch.where(bits >= 0, HALF + bits, -1 - bits)
    index += 2 * HALF * torch.arange(len(a), device=a.device)[:, None, None]
    counted = index if real is None else index[real]
    return torch.bincount(counted.flatten(), minlength=2 * HALF * len(a)).view(len(a), -1)


@cache
def _value_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """float32 [2 · HALF]: every number of 16 bits, in order; those that are none count as
    infinite."""
    bits = torch.arange(HALF).to(torch.int16)
    sizes = bits.view(dtype).float().nan_to_num(nan=math.inf, posinf=math.inf)
    return torch.cat([-sizes.flip(0), sizes]).to(device)


def _quantile(ranked: Callable[[Tensor], Tensor], q: float, n: Tensor) -> Tensor:
    """float32 [B]: of n ranked numbers, interpolated between the two nearest."""
    at = q * (n - 1).clamp(min=0)
    low = at.floor()
    high = torch.minimum(low + 1, (n - 1).clamp(min=0))
    below, above = ranked(low.long()), ranked(high.long())
    return below + (above - below) * (at - low).float()


def philox_uniform(keys: Tensor, real: Tensor | None, shape: torch.Size) -> Tensor:
    """float32 [B, T, W], uniform in [0, 1): by the sequence's key, the place of a token among the
    real ones, and the activation. Four activations, a quarter of a row apart, share a hash."""
    B, T, W = shape
    quarter = -(-W // 4)
    order = torch.arange(T, device=keys.device).expand(B, T)
    rank = order if real is None else real.cumsum(1) - 1
    first = torch.arange(quarter, device=keys.device).expand(B, T, -1)
    words = _philox(keys[:, None, None], first, rank[..., None].expand_as(first) & _WORD)
    uniform = torch.cat([(word >> 8).float() for word in words], -1) * 2.0**-24
    return uniform[..., :W]


def _philox(key: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """Four words for every counter (first, second, 0, 0); int64 that hold 32 bits each."""
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    c0, c1 = first, second
    c2 = c3 = torch.zeros_like(first)
    for _ in range(_ROUNDS):
        one, other = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c2 = ((other >> 32) & _WORD) ^ c1 ^ k0, ((one >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = other & _WORD, one & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3
