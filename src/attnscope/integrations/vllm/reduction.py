"""Reduces rows of attention whose keys lie in pages of a KV cache.

Dimensions: L layers · H query heads · G KV heads · M rows · K keys · D size of a query or key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from attnscope import kernels
from attnscope.integrations.vllm.pages import PageLayout
from attnscope.kernels import AttentionSums, KernelRows, reference
from attnscope.scope.conservation import compare_unseen, received_unseen
from attnscope.scope.sums import BY_KEY, add_sink, at_position, sink_weights, stack_sums

STACKED_BYTES = 64 << 20
"""Keys of several layers are copied side by side up to this many bytes, and one layer always."""
ROW_BLOCK = 1 << 22
"""Weights that are computed at a time."""
# The exponentials of a row stay finite if no score exceeds its offset by more than this.
REACH = 80.0


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionLayer:
    """What an attention layer does besides its tensors."""

    name: str
    """Its name in vLLM."""
    layer: int
    heads: int
    kv_heads: int
    scale: float
    layout: PageLayout
    softcap: float | None = None
    window: int | None = None
    """Number of keys a query sees, its own included; None without a sliding window."""
    slopes: Tensor | None = None
    """float32 [H]: the slopes of ALiBi."""
    sinks: Tensor | None = None
    """[H]: learned sink scores."""

    @property
    def group_key(self) -> tuple[Any, ...]:
        """Layers with the same key can be reduced together."""
        slopes = None if self.slopes is None else tuple(self.slopes.tolist())
        sinks = None if self.sinks is None else self.name
        sizes = self.heads, self.kv_heads, self.layout.size
        return (*sizes, self.scale, self.softcap, self.window, slopes, sinks)


def group_layers(layers: Sequence[AttentionLayer]) -> list[list[AttentionLayer]]:
    """The layers in groups that can be reduced together."""
    groups: dict[Any, list[AttentionLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.group_key, []).append(layer)
    return list(groups.values())


@dataclass(eq=False, kw_only=True)
class Rows:
    """Some queries of one request."""

    index: Tensor
    """int64 [M], on the device: rows of the query tensor."""
    positions: Tensor
    """int64 [M], on the CPU, ascending: positions of the queries in the sequence."""
    pages: Callable[[str], Tensor]
    """The block table of the request in a layer, by the name of the layer: int [pages]."""
    classes: Tensor | None = None
    """int64 [M], on the CPU: the class of each query, -1 for none."""

    @property
    def contiguous(self) -> bool:
        """Whether no position is left out."""
        return int(self.positions[-1] - self.positions[0]) + 1 == len(self.positions)

    def extent(self, window: int | None, page: int) -> tuple[int, int]:
        """First and one past last key that any row sees; the first one begins a page."""
        first = 0 if window is None else max(0, int(self.positions[0]) - window + 1)
        return first - first % page, int(self.positions[-1]) + 1


def reduce_rows(
    group: Sequence[AttentionLayer],
    q: Tensor,
    caches: Sequence[Tensor],
    rows: Rows,
    backend: str,
    n_classes: int = 0,
) -> AttentionSums:
    """The sums over some queries of a request [L, …], from queries [L, T, H, D] and KV caches.

    Key 0 is at position 0.
    """
    first, _ = rows.extent(group[0].window, caches[0].shape[2])
    parts = []
    for inputs in kernel_inputs(group, q, caches, rows, n_classes):
        if backend == "streaming":
            inputs = with_offsets(inputs)
        sums = compare_unseen(inputs, kernels.kernel(backend)(inputs))
        if inputs.sinks is not None:
            assert sums.lse is not None
            add_sink(sums, sink_weights(inputs.sinks, sums.lse), rows.positions[None])
        # vLLM's attention gives no log-sum-exp to compare with.
        parts.append(replace(at_position(sums, first), lse_error=None))
    return stack_sums(parts)


def reduces_pages(layers: Sequence[AttentionLayer], q: Tensor, cache: Tensor, backend: str) -> bool:
    """Whether the paged kernel can reduce these layers."""
    if backend != "triton" or layers[0].slopes is not None:
        return False
    from attnscope.kernels import triton_paged

    return triton_paged.supports(q[0], layers[0].layout.view(cache))


def reduce_pages(
    group: Sequence[AttentionLayer], q: Tensor, caches: Sequence[Tensor], requests: Sequence[Rows]
) -> list[AttentionSums]:
    """The sums of queries of several requests, one launch for each layer.

    Every request has contiguous queries. The arguments are those of `reduce_rows`.
    """
    from attnscope.kernels import triton_paged

    device, page = q.device, caches[0].shape[2]
    counts = torch.tensor([len(rows.positions) for rows in requests], dtype=torch.int32)
    first = torch.tensor([int(rows.positions[0]) for rows in requests], dtype=torch.int32)
    keys: list[int] = (first + counts).tolist()
    chosen = q.index_select(1, torch.cat([rows.index for rows in requests]))
    starts = (counts.cumsum(0) - counts).int()
    unseen = _unseen(first, first + counts, group[0].window, max(keys)).to(device)
    parts: list[list[AttentionSums]] = [[] for _ in requests]
    for layer, of_layer, cache in zip(group, chosen, caches, strict=True):
        view = layer.layout.view(cache)
        assert view is not None
        tables = [rows.pages(layer.name)[: -(-max(keys) // page)] for rows in requests]
        sums, lse = triton_paged.reduce(
            triton_paged.PagedRows(
                q=of_layer,
                k=view,
                table=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).int(),
                first_row=starts.to(device, non_blocking=True),
                rows=counts.to(device, non_blocking=True),
                position=first.to(device, non_blocking=True),
                most_rows=int(counts.max()),
                most_keys=max(keys),
                scale=layer.scale,
                softcap=layer.softcap,
                sinks=layer.sinks,
                window=layer.window,
            )
        )
        sums = received_unseen(sums, unseen)
        for r, (rows, some) in enumerate(
            zip(requests, torch.split(lse, counts.tolist(), 1), strict=True)
        ):
            one = _of_request(sums, r, keys[r])
            if layer.sinks is not None:
                add_sink(one, sink_weights(layer.sinks, some[None]), rows.positions[None])
            parts[r].append(one)
    return [stack_sums(layers) for layers in parts]


def _unseen(first: Tensor, stop: Tensor, window: int | None, keys: int) -> Tensor:
    """bool [R, 1, keys]: the keys that no query of a request sees."""
    order = torch.arange(keys)
    unseen = order >= stop[:, None]
    if window is not None:
        unseen |= order < first[:, None] - window + 1
    return unseen[:, None]


def _of_request(sums: AttentionSums, r: int, keys: int) -> AttentionSums:
    """The sums of one of several requests, over its keys."""
    parts: dict[str, Any] = {}
    for each in fields(AttentionSums):
        value = getattr(sums, each.name)
        if value is not None:
            by_key = each.name in BY_KEY
            parts[each.name] = value[r : r + 1, ..., :keys].clone() if by_key else value[r : r + 1]
    return AttentionSums(**parts)


def row_weights(
    group: Sequence[AttentionLayer], q: Tensor, caches: Sequence[Tensor], rows: Rows
) -> Tensor:
    """float32 [L, H, M, K]: the attention rows of some queries, 0 on keys that they do not see."""
    first, last = rows.extent(group[0].window, caches[0].shape[2])
    M, step = len(rows.positions), max(1, ROW_BLOCK // (group[0].heads * (last - first)))
    weights = q.new_zeros(len(group), group[0].heads, M, last, dtype=torch.float32)
    for at, layer in enumerate(group):
        inputs = kernel_inputs([layer], q[at : at + 1], caches[at : at + 1], rows, 0)[0]
        for m in range(0, M, step):  # the definition computes in float64
            some = slice(m, m + step)
            weights[at, :, some, first:] = reference.weights(inputs.select_rows(0, some))[0][0]
    return weights


def kernel_inputs(
    group: Sequence[AttentionLayer],
    q: Tensor,
    caches: Sequence[Tensor],
    rows: Rows,
    n_classes: int,
) -> "list[KernelRows]":
    """The rows as the kernels take them, several layers stacked along the batch."""
    layer, page = group[0], caches[0].shape[2]
    first, last = rows.extent(layer.window, page)
    size = (last - first) * layer.kv_heads * layer.layout.size * q.element_size()
    step = max(1, STACKED_BYTES // max(1, size))
    return [
        _stacked(group[at : at + step], q[at : at + step], caches[at : at + step], rows, n_classes)
        for at in range(0, len(group), step)
    ]


def _stacked(
    layers: Sequence[AttentionLayer],
    q: Tensor,
    caches: Sequence[Tensor],
    rows: Rows,
    n_classes: int,
) -> KernelRows:
    layer, page, L = layers[0], caches[0].shape[2], len(layers)
    first, last = rows.extent(layer.window, page)
    keys = []
    for each, cache in zip(layers, caches, strict=True):
        pages = rows.pages(each.name)[first // page : -(-last // page)]
        keys.append(each.layout.read(cache, pages)[:, : last - first].to(q.dtype))
    device, positions = q.device, rows.positions
    bounds: dict[str, Any] = {}
    if layer.window is None and rows.contiguous:
        bounds = {"causal": True, "diagonal_offset": int(positions[0])}
    else:
        low = 0 if layer.window is None else (positions - layer.window + 1).clamp(min=0) - first
        start = torch.zeros_like(positions) + low
        values = {"start": start, "stop": positions + 1 - first, "self_key": positions - first}
        bounds = {
            name: value.int().to(device).repeat(L, 1).contiguous() for name, value in values.items()
        }
    key_bias = None
    if layer.slopes is not None:
        order = torch.arange(first, last, device=device, dtype=torch.float32)
        key_bias = (layer.slopes.to(device)[:, None] * order)[None]
    group = None if rows.classes is None else rows.classes.to(device).repeat(L, 1)
    return KernelRows(
        q=q.index_select(1, rows.index).transpose(1, 2),
        k=torch.stack(keys) if L > 1 else keys[0][None],
        scale=layer.scale,
        softcap=layer.softcap,
        sinks=layer.sinks,
        key_bias=key_bias,
        group=group,
        groups=0 if group is None else n_classes,
        **bounds,
    )


def with_offsets(rows: KernelRows) -> KernelRows:
    """The rows with an offset of each row in place of its log-sum-exp, if scores allow it.

    The streaming kernels divide each row by its own sum, so any offset near the largest score
    does. A lower bound of the log-sum-exp is the score of the own key or of the first visible
    one. The product of norms is an upper bound of the scores. Without an offset the compiled CPU
    kernel cannot run.
    """
    biased = rows.key_bias is not None or rows.softcap is not None
    if rows.q.device.type != "cpu" or rows.lse is not None or biased:
        return rows
    B, H, M, D = rows.q.shape
    G = rows.k.shape[1]
    q = rows.q.float().reshape(B, G, H // G, M, D)
    of_first, of_own = (
        (q * keys.float()[:, :, None]).sum(-1) * rows.scale for keys in _first_and_own_keys(rows)
    )
    offset = torch.maximum(of_first, of_own).reshape(B, H, M)
    if rows.sinks is not None:
        offset = torch.maximum(offset, rows.sinks.float()[:, None])
    largest = rows.k.float().norm(dim=-1).amax(-1)[:, :, None, None] * abs(rows.scale)
    bound = (q.norm(dim=-1) * largest).reshape(B, H, M)
    if not bool((bound - offset <= REACH).all()):  # also where a number is not finite
        return rows
    return replace(rows, lse=offset)


def _first_and_own_keys(rows: KernelRows) -> tuple[Tensor, Tensor]:
    """[B, G, M or 1, D]: the first visible key of each row, and the key of its own token."""
    M, D = rows.q.shape[2:]
    G, K = rows.k.shape[1:3]
    if rows.causal:  # without the copies of `gather`
        return rows.k[:, :, :1], rows.k[:, :, rows.diagonal_offset : rows.diagonal_offset + M]
    start, _, self_key = rows.bounds()

    def keys(at: Tensor) -> Tensor:
        index = at.long().clamp(0, K - 1)[:, None, :, None].expand(-1, G, -1, D)
        return rows.k.gather(2, index)

    return keys(start), keys(self_key)
