"""Stores queries and keys after a pass (`keep=True`), so that single rows can be computed later.

The memory is that of a KV cache, n · d and never n². Keys are stored by reference if the cache does
not overwrite them. If a later pass has the same keys, both passes share a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import cache_utils

from attnscope.errors import InputError, ScopeError
from attnscope.kernels import (
    KernelRows,
    PerQueryRequest,
    PerQueryResult,
    per_query_kernel,
    reference,
)
from attnscope.kernels.one_row import of_weights


@dataclass(slots=True, eq=False)
class SharedKeys:
    """Keys [B, G, K, D] that several passes share; each uses the first ones."""

    tensor: Tensor
    version: int = field(init=False)
    """Version counter of the tensor when it was stored."""

    def __post_init__(self) -> None:
        self.replace_tensor(self.tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedKeys, (
            self.leading(self.tensor.shape[2]),
        )  # a copy has a version counter of its own

    def replace_tensor(self, tensor: Tensor) -> None:
        """Store these keys in place of the present ones, which are their first part."""
        self.tensor, self.version = tensor, _version(tensor)

    @property
    def changed(self) -> bool:
        """Whether the tensor was written to since."""
        return self.version != _version(self.tensor)

    def leading(self, width: int) -> Tensor:
        """The first keys; an error if the tensor was changed."""
        if self.changed:
            raise ScopeError(
                "the keys of the cache were changed in place after they were measured, so "
                "per-query results cannot be computed from them; read them before the change, or "
                "change a copy of the cache",
                code="keys-changed",
            )
        return self.tensor[:, :, :width]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoredRows:
    """The counted rows of one call."""

    positions: Tensor
    """int64 [B, M]: positions of the queries in the sequence; -1 for a row that does not count."""
    first_key: int
    """Position of key 0."""
    rows: KernelRows | None = None
    """The kernel input without keys, which are in `keys`."""
    keys: SharedKeys | None = None
    width: int = 0
    """Number of keys of this call."""
    weights: Tensor | None = None
    """float32 [B, H, M, K], from the dense fallback."""

    def exclude(self, sequences: Tensor) -> "StoredRows":
        """The rows without those of some sequences, bool [B]."""
        return replace(self, positions=self.positions.masked_fill(sequences[:, None], -1))

    def reduce_per_query(self, request: PerQueryRequest, backend: str) -> PerQueryResult:
        """Compute a per-query request for these rows; key 0 is their first key."""
        if self.weights is not None:
            return of_weights(self.weights, request)
        assert self.rows is not None
        assert self.keys is not None
        rows = replace(self.rows, k=self.keys.leading(self.width))
        return per_query_kernel(backend)(rows, request)


def attention_row(
    kept: Sequence[StoredRows], position: int, sequence: int, keys: int
) -> Tensor | None:
    """float32 [H, keys]: the weights of one query, 0 on keys it does not see; None if it is not
    stored."""
    for each in kept:
        for m in (each.positions[sequence] == position).nonzero()[:, 0].tolist():
            if each.weights is not None:
                A = each.weights[sequence, :, m]
            else:
                assert each.rows is not None
                assert each.keys is not None
                merged = replace(each.rows, k=each.keys.leading(each.width))
                A = reference.weights(merged.select_row(sequence, m))[0][0, :, 0]
            return pad(A.float(), (each.first_key, keys - each.first_key - A.shape[-1]))
    return None


def cache_overwrites(cache: Any) -> bool:
    """Whether the cache may overwrite keys later. A dynamic cache does not: it creates new
    tensors."""
    if cache is None:
        return False
    dynamic_layers = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    return type(cache) is not cache_utils.DynamicCache or any(
        type(layer) not in dynamic_layers for layer in cache.layers
    )


def store_rows(
    stored: Sequence[StoredRows],
    rows: KernelRows,
    positions: Tensor,
    first_key: int,
    n_visible: int,
    *,
    copy: bool,
) -> tuple[StoredRows, int]:
    """Store the rows of a call after those stored already; return them and their bytes.

    No row sees a key from `n_visible` on. `copy` the keys if the cache may overwrite them.
    """
    k, n_visible = rows.k, max(n_visible, 1)
    if not rows.causal and n_visible < k.shape[2]:
        k = k[:, :, :n_visible]
        rows = replace(
            rows,
            real=None if rows.real is None else rows.real[:, :n_visible],
            key_bias=None if rows.key_bias is None else rows.key_bias[..., :n_visible],
            score_biases=tuple(
                replace(added_bias, bias=added_bias.bias[..., :n_visible])
                for added_bias in rows.score_biases
            ),
        )
    # A tensor of inference mode does not count how often it was written to.
    k, q = k.clone() if copy or k.is_inference() else _compact_copy(k), _compact_copy(rows.q)
    keys, more = SharedKeys(k), _bytes(q) + _bytes(k)
    before = stored[-1].keys if stored and stored[-1].first_key == first_key else None
    if before is not None and not before.changed:
        width = before.tensor.shape[2]
        if width <= k.shape[2] and torch.equal(before.tensor, k[:, :, :width]):
            more -= _bytes(before.tensor)
            before.replace_tensor(k)
            keys = before
    alone = replace(rows, q=q, k=k[:, :, :0], cache={})
    kept = StoredRows(
        positions=positions, first_key=first_key, rows=alone, keys=keys, width=k.shape[2]
    )
    return kept, more


def store_weights(A: Tensor, positions: Tensor) -> tuple[StoredRows, int]:
    """Store the weights [B, H, M, K] of a call."""
    return StoredRows(positions=positions, first_key=0, weights=A), _bytes(A)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _compact_copy(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its storage is more than twice as large."""
    return tensor if tensor.untyped_storage().nbytes() <= 2 * _bytes(tensor) else tensor.clone()


def reduce_per_query(
    kept: Sequence[StoredRows], request: PerQueryRequest, backend: str
) -> PerQueryResult:
    """Compute a per-query request for the rows of all passes; nan for rows that do not count.

    The keys of `request` are positions in the sequence.
    """
    results, at = [], 0
    for each in kept:
        rows = slice(at, at + each.positions.shape[1])
        at = rows.stop
        first = each.first_key
        width = each.width if each.weights is None else each.weights.shape[3]
        keys = None if request.keys is None else request.keys[:, rows] - first
        if keys is not None:  # later keys, and keys that a window dropped, have weight 0
            keys = keys.where(keys < width, -1)
        part = replace(
            request,
            shares=None if request.shares is None else request.shares[:, first : first + width],
            keys=keys,
            spans=None if request.spans is None else request.spans[:, rows] - first,
        )
        results.append(_mask_uncounted(each.reduce_per_query(part, backend), each))
    return _concat(results)


def _mask_uncounted(result: PerQueryResult, kept: StoredRows) -> PerQueryResult:
    """Set rows that do not count to nan (keys: -1), and number keys from the first of the text."""
    counts = kept.positions >= 0
    if result.top_key is not None:
        counted = (result.top_key >= 0) & counts[:, None, :, None]
        key = (result.top_key + kept.first_key).where(counted, -1)
        result = replace(result, top_key=key)
    if bool(counts.all()):
        return result
    blank: dict[str, Tensor] = {}
    for each in fields(PerQueryResult):
        value: Tensor | None = getattr(result, each.name)
        if value is not None and each.name != "top_key":
            shape = counts[:, None] if value.ndim == 3 else counts[:, None, :, None]
            blank[each.name] = value.where(shape, torch.nan)
    return replace(result, **blank)


def _concat(results: list[PerQueryResult]) -> PerQueryResult:
    if len(results) == 1:
        return results[0]
    merged: dict[str, Tensor] = {}
    for each in fields(PerQueryResult):
        parts = [value for result in results if (value := getattr(result, each.name)) is not None]
        if parts and each.name.startswith("top"):  # earlier steps may have fewer keys
            width = max(part.shape[3] for part in parts)
            fill = {"top_key": -1, "top_weight": 0.0}.get(each.name, torch.nan)
            parts = [pad(part, (0, width - part.shape[3]), value=fill) for part in parts]
        if parts:
            merged[each.name] = torch.cat(parts, 2)
    return PerQueryResult(**merged)


def _bins(positions: Tensor, bin: int) -> tuple[Tensor, Tensor, int]:
    """For each row, its bin and whether it counts; and how many bins there are."""
    if isinstance(bin, bool) or not isinstance(bin, int) or bin < 1:
        raise InputError(
            f"bin={bin!r} must be a whole number from 1: how many positions a bin has",
            code="bad-number",
            argument="bin",
            value=bin,
        )
    which = positions.clamp(min=0) // bin
    return which, positions >= 0, int(which.max()) + 1


def bins_of(positions: Tensor, bin: int) -> Tensor:
    """int64 [B, bins]: the first position of each bin; -1 where no query is in it."""
    which, counts, n = _bins(positions, bin)
    counted = torch.zeros(len(positions), n, dtype=torch.int64, device=positions.device)
    counted.scatter_add_(1, which, counts.long())
    first = torch.arange(n, device=positions.device) * bin
    return first.expand_as(counted).where(counted > 0, -1)


def binned(values: Tensor, positions: Tensor, bin: int) -> Tensor:
    """Means [B, H, bins, …] over the rows [B, H, M, …] of every `bin` positions that are numbers;
    nan where there are none."""
    which, counts, n = _bins(positions, bin)
    flat = values.double().flatten(3) if values.ndim > 3 else values.double()[..., None]
    counted = counts[:, None, :, None] & ~flat.isnan()
    parts = flat.where(counted, 0.0), counted.double()
    if torch.equal(positions, torch.arange(flat.shape[2], device=flat.device).expand_as(positions)):
        # All positions in order: neighbours form a bin, without a scatter.
        short = n * bin - flat.shape[2]
        total, number = (
            pad(part, (0, 0, 0, short)).view(*part.shape[:2], n, bin, -1).sum(3) for part in parts
        )
    else:
        index = which[:, None, :, None].expand_as(flat)
        shape = *flat.shape[:2], n, flat.shape[3]
        total, number = (flat.new_zeros(shape).scatter_add_(2, index, part) for part in parts)
    mean: Tensor = (total / number.where(number > 0, torch.nan)).float()
    return mean.view(*values.shape[:2], n, *values.shape[3:])
