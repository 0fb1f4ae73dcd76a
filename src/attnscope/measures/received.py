"""Attention received by each key: its sum, and its average over the queries that come after it."""

import torch
from torch import Tensor

__all__ = ["average", "standard_error"]


def average(later: Tensor, eligible_later: Tensor) -> Tensor:
    """Average attention weight [B, H, K]: nan (never 0) where no later query could look."""
    could = eligible_later[:, None]
    return torch.where(could > 0, later / could.clamp(min=1), torch.nan)


def standard_error(variance: Tensor | None, like: Tensor) -> Tensor:
    """The standard error of a sampled sum; 0 where nothing was sampled."""
    return torch.zeros_like(like) if variance is None else variance.clamp(min=0).sqrt()
