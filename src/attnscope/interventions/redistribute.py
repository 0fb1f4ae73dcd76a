"""Activations near zero, moved away from it at random.

Three numbers of each sequence determine which activations move and how far (`bounds`). They are
computed on the device of the activations, without waiting for it. The random amounts come from one
`torch.Generator` for each sequence. A sequence gets the same amounts alone and in any batch. A CPU
and a GPU draw different amounts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A standard deviation of normal values is this many times their median absolute deviation.
NORMAL = 1.4826
# The share of entries that is moved lies in here, unless it is given.
MIN_SHARE, MAX_SHARE = 0.02, 0.25
# Tokens whose amounts are drawn at once. On a GPU, the numbers that a generator draws depend on
# how many are drawn; blocks of one size are the same for texts of all lengths.
TOKENS = 32


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
    seeds: Sequence[int],
    real: Tensor | None = None,
    *,
    c: float = 0.25,
    p1: float = 85.0,
    share: float | None = None,
) -> Tensor:
    """Activations [B, T, W] after the move, with one seed for each sequence; `real` bool [B, T] is
    False at padding, which stays."""
    limits = bounds(a, real, c=c, p1=p1, share=share)
    return apply_shift(a, amounts(a, seeds, real), limits, real)


def amounts(a: Tensor, seeds: Sequence[int], real: Tensor | None) -> Tensor:
    """float32 [B, T, W], uniform in [0, 1): by the seed of the sequence, the index of a token among
    the real ones, and the activation."""
    B, T, W = a.shape
    drawn = torch.empty(B, T + -T % TOKENS, W, device=a.device)
    for each, seed in zip(drawn, seeds, strict=True):
        generator = torch.Generator(a.device).manual_seed(seed)
        for block in each.split(TOKENS):
            block.uniform_(generator=generator)
    if real is None:
        return drawn[:, :T]
    rank = (real.cumsum(1) - 1).clamp(min=0)
    return drawn.gather(1, rank[..., None].expand(a.shape))


def apply_shift(a: Tensor, amount: Tensor, limits: Bounds, real: Tensor | None = None) -> Tensor:
    """The move itself; `amount` float32 [B, T, W] is from [0, 1)."""
    near, high, low = (each[:, None, None] for each in (limits.near, limits.high, limits.low))
    values = a.float()
    moves = values.abs() <= near
    if real is not None:
        moves &= real[..., None]
    farthest = torch.where(values >= 0, high, low)
    return torch.where(moves, values + amount * farthest, values).to(a.dtype)


def bounds(
    a: Tensor,
    real: Tensor | None = None,
    *,
    c: float = 0.25,
    p1: float = 85.0,
    share: float | None = None,
) -> Bounds:
    """Which activations move, and how far, over the real tokens of each sequence. `c`, `p1` and
    `share` are those of `attnscope.arm`."""
    B, T, W = a.shape
    n = torch.full((B,), float(T * W), dtype=torch.float64, device=a.device)
    values = a.detach().float()
    if real is not None:  # padding comes last
        n = real.sum(1, dtype=torch.float64) * W
        values = values.masked_fill(~real[..., None], math.inf)
    values = values.reshape(B, -1).sort(1).values
    sizes = values.abs().sort(1).values
    if share is not None:
        count = (share * n).round()
    else:
        deviation = (sizes - _quantile(sizes, 0.5, n)[:, None]).abs().sort(1).values
        near = NORMAL * c * _quantile(deviation, 0.5, n)
        below = torch.searchsorted(sizes, near[:, None])[:, 0].double()
        count = torch.where(below < MIN_SHARE * n, (MIN_SHARE * n).round(), below)
        count = torch.where(below > MAX_SHARE * n, (MAX_SHARE * n).round(), count)
    return Bounds(
        near=_ranked(sizes, (count - 1).clamp(min=0)),
        high=_quantile(values, p1 / 100, n).clamp(min=0),
        low=values[:, 0].clamp(max=0),
    )


def _ranked(ordered: Tensor, at: Tensor) -> Tensor:
    """[B]: the number with `at` numbers before it, in each row of [B, numbers]."""
    return ordered.gather(1, at.long()[:, None])[:, 0]


def _quantile(ordered: Tensor, q: float, n: Tensor) -> Tensor:
    """float32 [B]: a quantile of the first n numbers of each row, interpolated linearly."""
    last = (n - 1).clamp(min=0)
    at = q * last
    low = at.floor()
    below, above = _ranked(ordered, low), _ranked(ordered, torch.minimum(low + 1, last))
    return below + (above - below) * (at - low).float()
