"""The affine fit: are the attention outputs with an insertion an affine image of those without?"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Affine", "affine_fit"]


@dataclass(frozen=True, slots=True)
class Affine:
    """Least squares `new ≈ λ · old + σ`: one number λ, one vector σ for all tokens."""

    slope: float
    """λ"""
    shift: Tensor
    """σ, float64 [D]"""
    r2: float
    """Share of the variation of `new` around its mean that the fit explains."""
    tokens: int

    @property
    def sigma(self) -> float:
        """‖σ‖"""
        return float(self.shift.norm())


def affine_fit(old: Tensor, new: Tensor) -> Affine:
    """Fit the outputs of aligned tokens, [tokens, D] each, row by row twins.

    nan where it is not determined: fewer than two tokens, or outputs that do not vary.
    """
    old, new = old.double(), new.double()
    n = len(old)
    if n == 0:
        return Affine(torch.nan, old.new_full(old.shape[1:], torch.nan), torch.nan, 0)
    # Below this share of its size, variation is float64 rounding.
    least_old, least_new = (1e-24 * x.square().sum() for x in (old, new))
    mean_old, mean_new = old.mean(0), new.mean(0)
    old, new = old - mean_old, new - mean_new
    squares, all_of_new = old.square().sum(), new.square().sum()
    if not squares > least_old:
        return Affine(torch.nan, torch.full_like(mean_new, torch.nan), torch.nan, n)
    slope = (old * new).sum() / squares
    left = (new - slope * old).square().sum()
    r2 = float(1 - left / all_of_new) if all_of_new > least_new else torch.nan
    return Affine(float(slope), mean_new - slope * mean_old, r2, n)
