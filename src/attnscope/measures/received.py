"""Attention received by each key: its sum, and its average over the queries that come after it."""

import torch
from torch import Tensor

__all__ = ["average", "standard_error"]

NEIGHBOURS = 32


def average(later: Tensor, eligible_later: Tensor) -> Tensor:
    """Average attention weight [B, H, K]: nan (never 0) where no later query could look."""
    could = eligible_later[:, None]
    return torch.where(could > 0, later / could.clamp(min=1), torch.nan)


def standard_error(variance: Tensor | None, received: Tensor) -> Tensor:
    """The standard error of a sampled sum [B, H, K]; 0 where nothing was sampled.

    A key whose few heavy queries were all missed looks both low and certain. So its relative
    variance is taken to be at least the mean of its neighbours'.
    """
    if variance is None:
        return torch.zeros_like(received)
    relative = variance / received.square().clamp(min=1e-30)
    around = torch.nn.functional.avg_pool1d(
        relative, 2 * NEIGHBOURS + 1, stride=1, padding=NEIGHBOURS, count_include_pad=False
    )
    around = around.where(variance > 0, 0.0)  # keys with nothing sampled stay exact
    return torch.maximum(variance, around * received.square()).sqrt()
