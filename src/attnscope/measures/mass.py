"""The mass of a class: the share of a query's attention that falls on keys of that class."""

import torch
from torch import Tensor

__all__ = ["lift", "mass"]


def mass(received: Tensor, class_ids: Tensor, n: int, count: Tensor) -> Tensor:
    """[B, H, n]: mean over the queries of their attention to each class; -1 is no class.

    nan for a sequence without queries.
    """
    B, H, K = received.shape
    slots = torch.where(class_ids < 0, n, class_ids)  # the slot past the end takes no class
    sums = received.new_zeros(B, H, n + 1)
    sums.scatter_add_(2, slots[:, None].expand(B, H, K), received)
    return sums[..., :n] / _or_nan(count)[:, None, None]


def lift(mass: Tensor, uniform: Tensor) -> Tensor:
    """Mass over the mass under even attention; nan for a class that no query could see."""
    return torch.where(uniform > 0, mass / uniform, torch.nan)


def _or_nan(count: Tensor) -> Tensor:
    return torch.where(count > 0, count, torch.nan)
