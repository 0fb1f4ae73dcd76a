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

from attnscope.errors import ScopeError, check_int, is_int, unknown
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

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has a version counter of its own
        return SharedKeys, (self.leading(self.tensor.shape[2]),)

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
    """The counted rows of one call: as queries and keys, or as weights from the dense fallback."""

    positions: Tensor
    """int64 [B, M]: positions of the queries in the sequence; -1 for a row that does not count."""
    first_key: int
    """Position of key 0."""
    width: int
    """Number of keys of this call."""
    nbytes: int
    """Bytes that are stored for this call alone."""
    rows: KernelRows | None = None
    """The kernel input without keys, which are in `keys`."""
    keys: SharedKeys | None = None
    weights: Tensor | None = None
    """float32 [B, H, M, K]"""

    def exclude(self, sequences: Tensor) -> "StoredRows":
        """The rows without those of some sequences, bool [B]."""
        return replace(self, positions=self.positions.masked_fill(sequences[:, None], -1))

    @property
    def heads(self) -> int:
        """The number of query heads."""
        of = self.weights if self.rows is None else self.rows.q
        assert of is not None
        return of.shape[1]

    def kernel_rows(self) -> KernelRows:
        """The kernel input of rows that are stored as queries and keys."""
        assert self.rows is not None
        assert self.keys is not None
        return replace(self.rows, k=self.keys.leading(self.width))

    def weights_of(self, sequence: int, rows: slice, keys: int) -> Tensor:
        """float32 [H, rows, keys]: the weights of some rows of a sequence, for all keys."""
        if self.weights is not None:
            A = self.weights[sequence, :, rows]
        else:
            A = reference.weights(self.kernel_rows().select_rows(sequence, rows))[0][0]
        return pad(A.float(), (self.first_key, keys - self.first_key - A.shape[-1]))

    def reduce_per_query(self, request: PerQueryRequest, backend: str) -> PerQueryResult:
        """Compute a per-query request for these rows; key 0 is their first key."""
        if self.weights is not None:
            return of_weights(self.weights, request)
        return per_query_kernel(backend)(self.kernel_rows(), request)


def attention_row(
    kept: Sequence[StoredRows], position: int, sequence: int, keys: int
) -> Tensor | None:
    """float32 [H, keys]: the weights of one query, 0 on keys it does not see; None if it is not
    stored."""
    for each in kept:
        for m in (each.positions[sequence] == position).nonzero()[:, 0].tolist():
            return each.weights_of(sequence, slice(m, m + 1), keys)[:, 0]
    return None


MATRIX_BLOCK = 1 << 22
"""Weights that are computed at a time, in float64."""


def attention_matrix(
    kept: Sequence[StoredRows], sequence: int, keys: int, head: int | None
) -> Tensor:
    """float32 [H or 1, queries, keys]: the weights of all stored queries of a sequence."""
    parts: list[Tensor] = []
    for each in kept:
        heads, counts = each.heads, each.positions[sequence] >= 0
        if head is not None and not (is_int(head) and head < heads):
            raise unknown("head", head, range(heads))
        step = max(1, MATRIX_BLOCK // (heads * keys))
        for start in range(0, len(counts), step):
            rows = slice(start, start + step)
            if bool(counts[rows].any()):
                weights = each.weights_of(sequence, rows, keys)[:, counts[rows]]
                parts.append(weights if head is None else weights[head : head + 1].clone())
    return torch.cat(parts, 1)


def store_rows(
    stored: Sequence[StoredRows],
    rows: KernelRows,
    positions: Tensor,
    first_key: int,
    n_visible: int,
    *,
    copy: bool,
) -> StoredRows:
    """Store the rows of a call after those stored already.

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
                replace(added, bias=added.bias[..., :n_visible]) for added in rows.score_biases
            ),
        )
    # A tensor of inference mode does not count how often it was written to.
    k, q = k.clone() if copy or k.is_inference() else _compact_copy(k), _compact_copy(rows.q)
    keys, nbytes = SharedKeys(k), q.nbytes + k.nbytes
    before = stored[-1].keys if stored and stored[-1].first_key == first_key else None
    if before is not None and not before.changed:
        width = before.tensor.shape[2]
        if width <= k.shape[2] and torch.equal(before.tensor, k[:, :, :width]):
            nbytes -= before.tensor.nbytes
            before.replace_tensor(k)
            keys = before
    return StoredRows(
        positions=positions,
        first_key=first_key,
        width=k.shape[2],
        nbytes=nbytes,
        rows=replace(rows, q=q, k=k[:, :, :0], cache={}),
        keys=keys,
    )


def store_weights(A: Tensor, positions: Tensor, first_key: int) -> StoredRows:
    """Store the weights [B, H, M, K] of a call."""
    return StoredRows(
        positions=positions, first_key=first_key, width=A.shape[3], nbytes=A.nbytes, weights=A
    )


def _compact_copy(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its storage is more than twice as large."""
    return tensor if tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes else tensor.clone()


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
        first, width = each.first_key, each.width
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
    check_int("bin", bin, "how many positions a bin has", 1)
    which = positions.clamp(min=0) // bin
    return which, positions >= 0, int(which.max()) + 1


def bins_of(positions: Tensor, bin: int) -> Tensor:
    """int64 [B, bins]: the first position of each bin; -1 where no query is in it."""
    which, counts, n = _bins(positions, bin)
    counted = positions.new_zeros(len(positions), n).scatter_add_(1, which, counts.long())
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
