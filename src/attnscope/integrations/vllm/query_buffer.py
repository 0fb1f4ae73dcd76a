"""Queries that wait to be reduced: copies of rows of the query tensors of several steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnscope.integrations.vllm.reduction import AttentionLayer

PENDING_BYTES = 64 << 20
"""The largest size of the buffer, for all layers and requests together."""
MIN_PENDING = 64
"""Queries that the buffer holds at least."""


class QueryBuffer:
    """A buffer [L, capacity, H, D] for each group of layers."""

    def __init__(self, groups: Sequence[Sequence[AttentionLayer]]):
        self.groups = groups
        self.tensors: list[Tensor] = []
        """One for each group; empty before the dtype of queries is known."""
        self.used = 0
        """The number of rows that are in use or were released before the last compaction."""

    @property
    def capacity(self) -> int:
        """Rows that the buffer holds; 0 before it is allocated."""
        return self.tensors[0].shape[1] if self.tensors else 0

    def fits(self, rows: int) -> bool:
        """Whether so many more rows fit."""
        return self.used + rows <= self.capacity

    def allocate(self, like: Tensor) -> None:
        """Make the buffer for queries of this dtype and device, once."""
        if self.tensors:
            return
        sizes = [(len(group), group[0].heads, group[0].layout.size) for group in self.groups]
        per_row = sum(L * H * D for L, H, D in sizes) * like.element_size()
        capacity = max(MIN_PENDING, PENDING_BYTES // per_row)
        self.tensors = [like.new_empty(L, capacity, H, D) for L, H, D in sizes]

    def store(self, group: int, layer: int, at: int, rows: Tensor) -> None:
        """Copy rows [N, H, D] of one layer to row `at` and the following ones."""
        self.tensors[group][layer, at : at + len(rows)] = rows

    def compact(self, rows: Sequence[int]) -> dict[int, int]:
        """Keep only these rows, at the start; returns the new number of each."""
        order = sorted(rows)
        self.used = len(order)
        if order:
            index = torch.tensor(order, device=self.tensors[0].device)
            for tensor in self.tensors:
                tensor[:, : len(order)] = tensor.index_select(1, index)
        return {row: new for new, row in enumerate(order)}
