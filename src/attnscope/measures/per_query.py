"""Means over the queries of a number that each query has: entropy, self mass, distance …"""

import torch
from torch import Tensor

__all__ = ["distance", "mean_over_queries"]


def mean_over_queries(total: Tensor, count: Tensor) -> Tensor:
    """[B, H] sums over queries to means; nan for a sequence without queries."""
    return (total / torch.where(count > 0, count, torch.nan)[:, None]).float()


def distance(received: Tensor, positions: Tensor, count: Tensor, total: Tensor) -> Tensor:
    """Mean over queries of sum_j A[i, j] (i - j), from what the keys received.

    `positions` [B, H] is the sum over queries of their position times the mass of their row, and
    `total` [B, H] what all rows should add up to. The rows really add up to a hair less or more;
    the sum of positions is scaled by that hair, or long texts would turn it into whole tokens.
    """
    where = torch.arange(received.shape[-1], device=received.device, dtype=torch.float64)
    received = received.double()
    got = received.sum(-1)
    scaled = positions * torch.where(total > 0, got / total.clamp(min=1e-30), 1.0)
    return mean_over_queries(scaled - received @ where, count)
