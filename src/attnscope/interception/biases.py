"""Splits score biases into parts that kernels support, and builds additive masks.

Kernels support a bias by key and a bias by distance. Eager attention takes one additive mask.
"""

import math
from typing import Any

import torch
from torch import Tensor

from attnscope.interception.geometry import Geometry
from attnscope.interception.masks import MASK_THRESHOLD, mask_floor
from attnscope.kernels import AttentionCall
from attnscope.kernels.call import distance_index, total_score_bias


def split_biases(biases: list[Tensor], geometry: Geometry, H: int) -> dict[str, Any]:
    """Biases [B or 1, H or 1, Q or 1, K] as the arguments of an `AttentionCall`."""
    by_key: list[Tensor] = []
    by_distance: list[Tensor] = []
    visible = geometry.visibility()
    biases = [bias[..., : geometry.keys] for bias in biases]
    for bias in biases:
        if _ambiguous_mask(bias):
            return {"bias": _total(biases)}
        column = _by_key(bias, visible)
        table = None if column is not None else _by_distance(bias, visible, geometry)
        if column is not None:
            by_key.append(column.expand(-1, H, -1))
        elif table is not None and not by_distance:
            by_distance.append(table.expand(H, -1))
        else:
            return {"bias": _total(biases)}
    kwargs: dict[str, Any] = {}
    if by_key:
        kwargs["key_bias"] = _total(by_key)
    if by_distance:
        kwargs["distance_bias"] = by_distance[0]
    return kwargs


def _ambiguous_mask(bias: Tensor) -> bool:
    """Whether a bias hides keys with values that a large score could outweigh."""
    return bool(((bias <= MASK_THRESHOLD) & (bias > mask_floor(bias))).any())


def _by_key(bias: Tensor, visible: Tensor) -> Tensor | None:
    """[B or 1, H or 1, K], if every query that sees a key adds the same bias to its score.

    `bias` is [B or 1, H or 1, Q or 1, K], `visible` bool [B, H or 1, Q, K].
    None if queries differ.
    """
    if bias.shape[2] == 1:
        return bias[:, :, 0]
    column = bias.masked_fill(~visible, -math.inf).amax(2)
    equal = (bias == column[:, :, None]) | ~visible
    return column.masked_fill(column == -math.inf, 0.0) if bool(equal.all()) else None


def _by_distance(bias: Tensor, visible: Tensor, geometry: Geometry) -> Tensor | None:
    """[H or 1, 2 N + 1], if the bias depends on the distance alone; else None.

    Entry `N + d` is the bias at `d` tokens back.
    """
    if geometry.cross:
        return None
    H, N = bias.shape[1], geometry.keys + geometry.queries
    position = geometry.self_keys().to(bias.device)
    index = position[:, None] - torch.arange(geometry.keys, device=bias.device) + N
    table = torch.full((H, 2 * N + 1), -math.inf, dtype=bias.dtype, device=bias.device)
    visible_bias = bias.masked_fill(~visible, -math.inf).amax(0)
    if visible_bias.shape[0] != H:  # heads differ in the keys that they see
        return None
    table.scatter_reduce_(1, index.flatten().expand(H, -1), visible_bias.flatten(1), "amax")
    equal = (bias == table[:, index]) | ~visible
    return table.masked_fill(table == -math.inf, 0.0) if bool(equal.all()) else None


def _total(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def total_bias(call: AttentionCall, geometry: Geometry) -> Tensor | None:
    """[B or 1, H or 1, Q, K]: the sum of all biases of a call; None if it has none."""
    biases = [] if call.bias is None else [call.bias]
    if call.key_bias is not None:
        biases.append(call.key_bias[:, :, None])
    if call.distance_bias is not None:
        position = torch.arange(geometry.queries, device=call.q.device) + call.first
        index = distance_index(position, 0, call.k.shape[2], call.distance_bias.shape[1])
        biases.append(call.distance_bias[None, :, index])
    everything = slice(None)
    linked = total_score_bias(call.score_biases, everything, everything, everything, everything)
    if linked is not None:
        biases.append(linked)
    return _total(biases) if biases else None


def additive_mask(call: AttentionCall, geometry: Geometry, *, last: bool = False) -> Tensor:
    """[B, 1 or H, Q, K]: the additive mask for eager attention; `last` gives its last row only."""
    order = torch.arange(call.k.shape[2], device=call.q.device)
    rows = slice(-1, None) if last else slice(None)
    start, stop = call.visible.start[:, rows, None], call.visible.stop[:, rows, None]
    visible = (order >= start) & (order < stop)
    if call.visible.real is not None:
        visible = visible & call.visible.real[:, None]
    visible = visible[:, None]
    if geometry.gap_mask is not None:
        visible = visible & geometry.gap_mask[:, :, rows]
    mask_floor = torch.finfo(call.q.dtype).min
    return torch.zeros(visible.shape, dtype=call.q.dtype, device=visible.device).masked_fill(
        ~visible, mask_floor
    )
