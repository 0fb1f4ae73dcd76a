"""The affine fit: are attention outputs with an insertion an affine function of those without?

`affine` fits the layer's output after the output projection, `affine_heads` the concatenated
outputs of the heads before it. The projection mixes heads, so only one of the two may fit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import POSITIVE, Measure, Numbers


@dataclass(frozen=True, slots=True)
class Affine:
    """Least squares `new ≈ λ · old + σ`: one number λ, one vector σ for all tokens."""

    slope: float
    """λ"""
    shift: Tensor
    """σ, float64 [D]"""
    r2: float
    """Share of the variance of `new` that the fit explains."""
    tokens: int

    @property
    def sigma(self) -> float:
        """‖σ‖"""
        return float(self.shift.norm())


def affine_fit(old: Tensor, new: Tensor) -> Affine:
    """Fit the outputs of aligned tokens, [tokens, D] each, row by row aligned.

    nan if the fit is not determined: fewer than two tokens, or constant outputs.
    """
    import torch

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


def _reader(point: str) -> Callable[[Layer], Numbers]:
    def read(layer: Layer) -> Numbers:
        old, new = (
            tensors[point].float().cpu() for tensors in (layer.baseline.recorded, layer.recorded)
        )
        fits = []
        for row, aligned in enumerate(layer.baseline.aligned_position):
            at = np.flatnonzero(aligned >= 0)
            fits.append(affine_fit(old[row, aligned[at]], new[row, at]))
        value = np.array([[[fit.slope, fit.sigma, fit.r2]] for fit in fits])
        return Numbers(value, tokens=np.array([[[float(fit.tokens)]] for fit in fits]))

    return read


def _columns(prefix: str, what: str) -> dict[str, str]:
    return {
        f"{prefix}_lambda": f"λ of the least-squares fit `new ≈ λ · old + σ` on {what}",
        f"{prefix}_sigma": "‖σ‖ of the same fit",
        f"{prefix}_r2": "share of the variance that the fit explains",
    }


AFFINE = Measure(
    name="affine",
    range={"affine_sigma": POSITIVE, "affine_r2": (-math.inf, 1.0)},
    description="an affine fit of the layer's attention output, after the output projection",
    level="layer",
    needs=frozenset({"outputs"}),
    columns=_columns("affine", "the outputs of aligned tokens, after the output projection"),
    compares_to_base=True,
    function=_reader("outputs"),
)

AFFINE_HEADS = Measure(
    name="affine_heads",
    range={"affine_heads_sigma": POSITIVE, "affine_heads_r2": (-math.inf, 1.0)},
    description="an affine fit of the heads' concatenated outputs, before the output projection",
    level="layer",
    needs=frozenset({"heads"}),
    columns=_columns(
        "affine_heads", "the heads' outputs of aligned tokens, before the output projection"
    ),
    compares_to_base=True,
    function=_reader("heads"),
)
