"""The attention output of the model, with the log-sum-exp of every row if an operator returns it.

Plain calls use the operator that sdpa would choose, in the form that also returns the log-sum-exp.
Masks that torch supports only as an n × n tensor (padding, windows, chunks, soft-caps) are
processed in tiles, so that the mask of one tile stays small.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnscope.kernels.autocast import without_autocast
from attnscope.kernels.call import AttentionCall, has_triton
from attnscope.kernels.rows import KernelRows
from attnscope.kernels.scores import (
    block_biases,
    block_mask,
    block_scores,
    key_blocks,
    masked_spans,
)
from attnscope.kernels.tile_plan import BoundedCache, Tile, balanced_step, make_tiles

# Queries of one tile: maximum, minimum, and the length below which texts are not split.
BLOCK, LEAST, UNCUT = 256, 64, 192
# Elements of the largest mask of a tile, and of the largest tile of scores for calls with a
# soft-cap, which fused kernels do not support.
MASK = 1 << 20
SCORES = 1 << 20

_MATH, _FLASH, _EFFICIENT, _CUDNN = 0, 1, 2, 3  # torch.nn.attention.SDPBackend
_NOTHING = torch.empty(0)
_FLASH_CPU = torch._scaled_dot_product_flash_attention_for_cpu

Operator = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From queries, keys and values to output and log-sum-exp."""


@without_autocast
def attend(
    call: AttentionCall, *, dropout: float = 0.0, need_lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, Q, E] and, unless there is dropout, the log-sum-exp [B, H, Q] in float32.

    A query without visible keys gets zeros, as from sdpa.
    """
    plain = call.softcap is None and call.sinks is None
    biased = call.key_bias is not None or call.distance_bias is not None
    fusable = call.visible.form != "interval" and plain and not biased and not call.score_biases
    if fusable and (dropout or not need_lse) and call.q.shape[-1] == call.v.shape[-1]:
        return _sdpa(call, dropout), None
    if fusable and not dropout:
        operator = _cached_operator(call)
        if operator is not None:
            return operator(call.q, call.k, call.v)
    if not dropout and not biased and _can_use_triton(call):
        return triton_attend(call)
    if plain:
        return _by_blocks(call, dropout)
    return _by_scores(call, dropout)


def bind_attention(
    call: AttentionCall,
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]:
    """`attend` for calls that differ from this one only in the values of q, k and v.

    Shapes, dtype and device must be equal, and gradients off.
    """
    unfused = call.softcap is not None or call.visible.form == "interval"
    operator = None if unfused else _cached_operator(call)
    if operator is not None:
        return operator
    bare = replace(call, q=_NOTHING, k=_NOTHING, v=_NOTHING)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        return attend(replace(bare, q=q, k=k, v=v))

    return run


def _can_use_triton(call: AttentionCall) -> bool:
    """Our Triton kernel has no backward pass."""
    if call.q.device.type != "cuda" or not has_triton():
        return False
    inputs = (call.q, call.k, call.v, call.key_bias, call.distance_bias)
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs))


def triton_attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by our Triton kernel, imported when first used."""
    from attnscope.kernels import triton

    return triton.attend(_rows_of(call), call.v)


def _sdpa(call: AttentionCall, dropout: float) -> Tensor:
    out: Tensor = F.scaled_dot_product_attention(
        call.q,
        call.k,
        call.v,
        dropout_p=dropout,
        is_causal=call.visible.form == "causal",
        scale=call.scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )
    return out


def _cached_operator(call: AttentionCall) -> Operator | None:
    """The operator that sdpa would choose, with the log-sum-exp; None if there is none.

    Cached: layers with the same mask use the same operator.
    """
    q, k, v = call.q, call.k, call.v
    needs_grad = q.requires_grad, k.requires_grad, v.requires_grad
    key = "operator", q.shape, k.shape, v.shape, q.dtype, q.device, needs_grad, call.scale
    if key not in call.visible.cache:
        call.visible.cache[key] = _select_operator(call, causal=call.visible.form == "causal")
    operator: Operator | None = call.visible.cache[key]
    return operator


def _select_operator(call: AttentionCall, *, causal: bool) -> Operator | None:
    q, k, v, scale = call.q, call.k, call.v, call.scale
    if q.is_cpu:
        if q.shape[-1] == v.shape[-1] and q.dtype != torch.float64:  # whose lse is that wide too
            return partial(_FLASH_CPU, dropout_p=0.0, is_causal=causal, attn_mask=None, scale=scale)
        return partial(_flash_cpu, scale=scale, causal=causal)
    if not q.is_cuda:
        return None
    grouped = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)
    # Direct bindings: a call through `torch.ops` takes twice as long.
    chosen: Callable[..., Any]
    if choice == _CUDNN:
        chosen = torch._scaled_dot_product_cudnn_attention
        fixed: tuple[Any, ...] = (None, True, 0.0, causal)
    elif choice == _FLASH:
        if v.shape[-1] % 8:
            return partial(_flash_cuda, scale=scale, causal=causal)
        chosen, fixed = torch._scaled_dot_product_flash_attention, (0.0, causal)
    elif choice == _EFFICIENT and not grouped:
        chosen = torch._scaled_dot_product_efficient_attention
        fixed = (None, True, 0.0, causal)
    else:
        return None
    rows = q.shape[2]

    def operator(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        result = chosen(q, k, v, *fixed, scale=scale)
        out, lse = result[0], result[1]
        if lse.dim() == 4:  # cuDNN keeps a trailing dimension,
            lse = lse.squeeze(3)
        elif lse.shape[2] != rows:  # the memory-efficient kernel pads the rows
            lse = lse[..., :rows]
        return out, lse if lse.dtype == torch.float32 else lse.float()

    return operator


def _flash_cuda(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    E = v.shape[-1]
    wide = -(-E // 8) * 8  # the operator takes no other sizes; sdpa widens heads before it too
    q, k, v = _pad_head_dim(q, k, v, wide)
    out, lse, *_ = torch._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out if wide == E else out[..., :E], lse


def _pad_head_dim(q: Tensor, k: Tensor, v: Tensor, wide: int) -> tuple[Tensor, ...]:
    """Pad heads to one size with zeros, which change neither scores nor values."""
    return tuple(t if t.shape[-1] == wide else F.pad(t, (0, wide - t.shape[-1])) for t in (q, k, v))


def _flash_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    E = v.shape[-1]
    if q.shape[-1] != E:  # the operator wants one size
        q, k, v = _pad_head_dim(q, k, v, max(q.shape[-1], E))
    out, lse = _FLASH_CPU(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    out = out if out.shape[-1] == E else out[..., :E]
    return out, lse if lse.dtype == torch.float32 else lse.float()


def _by_blocks(call: AttentionCall, dropout: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """Plain attention for any visible ranges, tile by tile."""
    rows, (out, lse) = _rows_of(call), _empty(call)
    Q, K = call.q.shape[2], call.k.shape[2]
    per_group = call.q.shape[1] // call.k.shape[1]
    fused = call.q.device.type == "cpu" and not dropout
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (call.q, call.k, call.v))
    # Small tiles waste less on future keys; very short texts are one tile.
    step = Q if Q < UNCUT else max(LEAST, min(BLOCK, Q // 8))
    for tile in _tiles(rows, step, MASK // K):
        if tile.empty:
            continue
        index = tile.sequences, slice(None), tile.rows
        keys = tile.sequences, slice(None), slice(tile.low, tile.high)
        q, k, v = call.q[index], call.k[keys], call.v[keys]
        bias = _bias(rows, tile, q.dtype)
        if fused:
            if trains:  # as transformers does: so the gradients of grouped keys round as theirs
                k, v = (t.repeat_interleave(per_group, 1) for t in (k, v))
            out[index], lse[index] = _flash_cpu(q, k, v, call.scale, causal=False, bias=bias)
            continue
        k, v = (t.repeat_interleave(per_group, 1) for t in (k, v))
        bias = None if bias is None else bias.to(q.dtype)  # sdpa wants it so
        some = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=dropout, scale=call.scale
        )
        start, stop = (bound[tile.sequences, None, tile.rows, None] for bound in rows.bounds()[:2])
        out[index] = torch.where(stop > start, some, 0.0)
    return out, lse if fused else None


def _by_scores(call: AttentionCall, dropout: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """Attention with a soft-cap or sinks: explicit scores of a few rows at a time."""
    rows, (out, all_lse) = _rows_of(call), _empty(call)
    R = call.q.shape[1] // call.k.shape[1]
    if call.sinks is not None:
        all_lse += call.sinks.detach()[:, None]  # of rows without visible keys
    small = [[False] * call.k.shape[1]] * len(call.k)
    for tile, heads, keys in key_blocks(rows, small, SCORES):
        x = block_scores(rows, tile, heads, keys, -math.inf)
        lse = torch.logsumexp(x, -1, keepdim=True)
        if call.sinks is not None:
            lse = torch.logaddexp(lse, call.sinks[heads, None, None].to(x.dtype))
        p = torch.exp(x - lse.clamp(min=torch.finfo(torch.float32).min))
        p = F.dropout(p, dropout).to(call.v.dtype)
        B, H, T, K = p.shape
        groups = slice(heads.start // R, heads.stop // R)
        v = call.v[tile.sequences, groups, tile.low : tile.high]
        index = tile.sequences, heads, tile.rows
        out[index] = (p.view(B, H // R, R * T, K) @ v).view(B, H, T, -1)
        all_lse[index] = lse[..., 0].where(lse[..., 0] > -math.inf, 0.0).float()
    return out, None if dropout else all_lse


def _rows_of(call: AttentionCall) -> KernelRows:
    """All queries of a call; layers with the same mask share the bounds."""
    visible, Q = call.visible, call.q.shape[2]
    key = "self_key", call.first
    if key not in visible.cache:
        self_key = torch.arange(call.first, call.first + Q, device=call.q.device)
        visible.cache[key] = self_key.int().expand(len(call.q), -1)
    return KernelRows(
        q=call.q,
        k=call.k,
        scale=call.scale,
        start=visible.start,
        stop=visible.stop,
        self_key=visible.cache[key],
        real=visible.real,
        softcap=call.softcap,
        sinks=call.sinks,
        key_bias=call.key_bias,
        distance_bias=call.distance_bias,
        score_biases=call.score_biases,
        cache=visible.cache,
    )


def _empty(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Zero tensors for the output, in the memory order of models, and for its log-sum-exp."""
    B, H, Q, _ = call.q.shape
    out = call.q.new_zeros((B, Q, H, call.v.shape[-1])).transpose(1, 2)
    return out, call.q.new_zeros((B, H, Q), dtype=torch.float32)


def _tiles(rows: KernelRows, step: int, most: int) -> list[Tile]:
    """Tiles of up to `step` queries per sequence and `most` in total; cached for all layers."""
    key = "attend", step, most
    if key not in rows.cache:
        B, _, Q, _ = rows.q.shape
        step = min(step, Q)
        tiles = make_tiles(*rows.bounds(), balanced_step(B, most // step), step)
        rows.cache[key] = list(chain.from_iterable(tiles))
    result: list[Tile] = rows.cache[key]
    return result


def _bias(rows: KernelRows, tile: Tile, dtype: torch.dtype) -> Tensor | None:
    """The sum of mask and biases of a tile, broadcast to [sequences, heads, rows, keys]; None if
    there are none. A mask alone has the given dtype; biases are added in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    total = None
    if masked_spans(rows, tile):
        masks: BoundedCache = rows.cache.setdefault("masks", BoundedCache())
        key = tile, dtype
        total = masks.kept.get(key)
        if total is None:
            mask = block_mask(rows, tile, tile.low, tile.high, -math.inf)
            total = masks.keep(key, mask.to(dtype))
    for bias in block_biases(rows, tile, slice(None), -math.inf):
        total = bias.to(wide) if total is None else total.to(wide) + bias
    if total is None or total.shape[1] == 1:
        return total
    return total.expand(*rows.q[tile.sequences].shape[:2], *total.shape[2:])
