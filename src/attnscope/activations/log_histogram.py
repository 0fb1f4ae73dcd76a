"""A log-binned histogram of fixed size: quantiles and the Gini coefficient with error bounds.

The relative width of each bin is `WIDTH`, on both sides of zero. So the relative error of a
quantile is at most `BOUND`, and the error of the Gini coefficient at most `GINI_BOUND`, for any
number of values.
"""

import math

import torch
from torch import Tensor

WIDTH = 0.02
BOUND = WIDTH
"""How far a quantile may be off, as a share of itself (it is the mean of its bin); or by
`SMALLEST`."""
GINI_BOUND = WIDTH / 4
"""How far the Gini coefficient may be off: what equal numbers within a bin leave out."""
SMALLEST, LARGEST = 2.0**-30, 2.0**30
"""Numbers closer to zero are counted as zero, larger ones as the largest."""
_STEP = math.log1p(WIDTH)
SIDE = math.ceil(math.log(LARGEST / SMALLEST) / _STEP)
"""Bins on each side of zero."""


class LogHistogram:
    """Histograms of several groups of numbers."""

    def __init__(self, groups: int, device: torch.device | str = "cpu"):
        self.counts = torch.zeros(groups, 2 * SIDE + 1, dtype=torch.float64, device=device)
        self.sums = torch.zeros_like(self.counts)
        """Of the numbers in each bin."""

    def add(self, numbers: Tensor, group: Tensor) -> None:
        """Numbers [rows, width], and the group of each row, int64 [rows]."""
        values = numbers.float()
        size = values.abs().clamp_(max=LARGEST)
        far = (size / SMALLEST).clamp_(min=1.0).log_().div_(_STEP).floor_().clamp_(max=SIDE - 1)
        bins = torch.where(size < SMALLEST, 0.0, (far + 1) * values.sign()).long() + SIDE
        index = (bins + group[:, None] * (2 * SIDE + 1)).flatten()
        flat = values.flatten().double()
        self.counts.view(-1).index_add_(0, index, torch.ones_like(flat))
        self.sums.view(-1).index_add_(0, index, flat)

    @property
    def count(self) -> Tensor:
        """float64 [groups]"""
        return self.counts.sum(1)

    def quantile(self, q: float, *, absolute: bool = False) -> Tensor:
        """float64 [groups]: the number below which this share lies; of sizes, if asked for."""
        counts, sums = self._fold() if absolute else (self.counts, self.sums)
        at = _bin_of_share(counts, q)
        inside = counts.gather(1, at)
        return (sums.gather(1, at) / inside.where(inside > 0, torch.nan))[:, 0]

    def deviation(self) -> Tensor:
        """float64 [groups]: the median distance of sizes from their median (MAD)."""
        counts, sums = self._fold()
        middle = self.quantile(0.5, absolute=True)
        centres = sums / counts.where(counts > 0, torch.nan)
        away = (centres - middle[:, None]).abs().nan_to_num(nan=math.inf)
        order = away.argsort(1)
        at = _bin_of_share(counts.gather(1, order), 0.5)
        return away.gather(1, order).gather(1, at)[:, 0]

    def gini(self) -> Tensor:
        """float64 [groups]: how unequal sizes are: 0 if all are equal, 1 if one has it all."""
        counts, sums = self._fold()
        n, total = counts.sum(1, keepdim=True), sums.sum(1, keepdim=True)
        before = sums.cumsum(1) - sums
        # Twice the area below the Lorenz curve, bin by bin.
        area = (counts / n * (2 * before + sums) / total).sum(1)
        return 1 - area

    def below(self, threshold: Tensor | float) -> Tensor:
        """float64 [groups]: the share of sizes below a number, to within the bin it lies in."""
        counts, sums = self._fold()
        centres = sums / counts.where(counts > 0, torch.nan)
        limit = torch.as_tensor(threshold, dtype=torch.float64, device=counts.device)
        return ((centres < limit.reshape(-1, 1)) * counts).sum(1) / counts.sum(1)

    def histogram(self, edges: Tensor) -> Tensor:
        """float64 [groups, edges - 1]: the shares between these, [edges] or [groups, edges], to
        within a bin each."""
        centres = self.sums / self.counts.where(self.counts > 0, torch.nan)
        edges = edges.to(centres).expand(len(centres), -1).contiguous()
        bins = edges.shape[1] - 1
        at = torch.searchsorted(edges, centres, right=True) - 1
        inside = (at >= 0) & (at < bins) & ~centres.isnan()
        shares = self.counts.new_zeros(len(centres), bins)
        shares.scatter_add_(1, at.clamp(0, bins - 1), self.counts.where(inside, 0.0))
        return shares / self.count[:, None]

    def _fold(self) -> tuple[Tensor, Tensor]:
        """Counts and sums of sizes, from zero on."""

        def fold(bins: Tensor, sign: int) -> Tensor:
            return torch.cat(
                [bins[:, SIDE : SIDE + 1], bins[:, SIDE + 1 :] + sign * bins[:, :SIDE].flip(1)], 1
            )

        return fold(self.counts, 1), fold(self.sums, -1)


def _bin_of_share(counts: Tensor, q: float) -> Tensor:
    """int64 [groups, 1]: the bin in which the q-th share is reached."""
    total = counts.cumsum(1)
    target = (q * (total[:, -1:] - 1)).floor() + 1
    return (total < target.clamp(min=1)).sum(1, keepdim=True).clamp(max=counts.shape[1] - 1)
