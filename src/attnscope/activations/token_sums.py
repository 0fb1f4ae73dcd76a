"""Sums of the activations of every token of a pass, and a histogram by group.

Rows are added as the model computes them, per layer or per expert, and not stored.
"""

import torch
from torch import Tensor

from attnscope.activations.log_histogram import LogHistogram
from attnscope.errors import ModelError

FIELDS = ("width", "near", "large", "absolute", "squares", "sum", "largest")
"""Of every token: how many activations it has, how many of them are near zero and how many large,
the sums of their sizes, squares and selves, and the one that is farthest from zero."""
# Number of activations that are processed at a time.
CHUNK = 1 << 20
NEAR, NORMAL = 0.25, 1.4826


def epsilon(histogram: LogHistogram, c: float = NEAR) -> Tensor:
    """float64 [groups]: near zero is closer than 1.4826 · c times the median distance of sizes from
    their median, as in `arm`."""
    return NORMAL * c * histogram.deviation()


class TokenSums:
    """The activations of one layer in one pass."""

    def __init__(self, point: str, layer: int, group: Tensor, groups: int, device: torch.device):
        """`group` int64 [tokens of all sequences]: -1 for tokens that do not count."""
        self.point, self.layer = point, layer
        self.group = group.to(device)
        self.histogram = LogHistogram(groups, device)
        self.tokens = torch.zeros(len(group), len(FIELDS), dtype=torch.float64, device=device)
        self.peak = torch.full((len(group),), -1, dtype=torch.int64, device=device)
        """Which of a token's activations is the farthest from zero."""

    def add(self, rows: Tensor, which: Tensor, near: Tensor | None, large: Tensor | None) -> None:
        """Rows of activations [rows, width], of these tokens, int64 [rows].

        `near` and `large` [groups] are the sizes below and above which they are counted as such.
        """
        kept = self.group[which] >= 0
        rows, which = rows.detach()[kept], which[kept]
        self._check_nan(rows)
        step = max(1, CHUNK // rows.shape[1])
        for at in range(0, len(rows), step):
            some, of = rows[at : at + step], which[at : at + step]
            group = self.group[of]
            self.histogram.add(some, group)
            self._count(some.double(), of, group, near, large)

    def _check_nan(self, rows: Tensor) -> None:
        if not bool(rows.isnan().any()):
            return
        count = int(rows.isnan().sum())
        raise ModelError(
            f"{count} of {rows.numel()} activations of layer {self.layer} ({self.point!r}) are "
            "NaN, so they have no statistics; load the model in float32 or bfloat16, or choose "
            "layers before this one",
            code="nan-activations",
            point=self.point,
            layer=self.layer,
            count=count,
        )

    def _count(
        self,
        values: Tensor,
        of: Tensor,
        group: Tensor,
        near: Tensor | None,
        large: Tensor | None,
    ) -> None:
        size = values.abs()
        none = torch.full_like(values[:, 0], torch.nan)
        peak, where = size.max(1)
        sums = torch.stack(
            [
                torch.full_like(none, values.shape[1]),
                none if near is None else (size < near[group, None]).sum(1).double(),
                none if large is None else (size > large[group, None]).sum(1).double(),
                size.sum(1),
                values.square().sum(1),
                values.sum(1),
            ],
            1,
        )
        self.tokens[:, :-1].index_add_(0, of, sums)
        extreme = values.gather(1, where[:, None])[:, 0]
        before = self.tokens[:, -1].abs()
        most = before.scatter_reduce(0, of, peak, "amax")  # a token may occur several times
        better = (peak == most[of]) & (peak > before[of])
        self.tokens[of[better], -1] = extreme[better]
        self.peak[of[better]] = where[better]
