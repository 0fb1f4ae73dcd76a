"""The model's own attention output, with the log-sum-exp of every row where it comes for free.

Whatever torch would have run for plain sdpa is run here too, through the operator that also
returns the log-sum-exp; masks that torch can only take as an n × n tensor (padding, windows,
chunks, soft-caps) are walked in blocks of queries instead.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from attnscope.kernels.call import AttentionCall, Visible, has_triton

__all__ = ["attend"]

# Queries of one block, and the largest block of scores made when a soft-cap forbids fused kernels.
BLOCK = 256
SCORES = 1 << 20

_MATH, _FLASH, _EFFICIENT, _CUDNN = 0, 1, 2, 3  # torch.nn.attention.SDPBackend


def attend(
    call: AttentionCall, *, dropout: float = 0.0, need_lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, Q, E] and, unless there is dropout, the log-sum-exp [B, H, Q] in float32.

    A query that sees nothing gets zeros, as it does from sdpa.
    """
    known = call.visible.form != "interval" and call.softcap is None and call.sinks is None
    causal = call.visible.form == "causal"
    if known and (dropout or not need_lse) and call.q.shape[-1] == call.v.shape[-1]:
        return _sdpa(call, dropout, causal=causal), None
    if known and not dropout:
        fused = _fused(call, causal=causal)
        if fused is not None:
            return fused
    if not dropout and _triton_runs(call):
        return triton_attend(call)
    if call.softcap is None and call.sinks is None:
        return _by_blocks(call, dropout)
    return _by_scores(call, dropout)


def _triton_runs(call: AttentionCall) -> bool:
    """Our Triton kernel has no backward pass."""
    if call.q.device.type != "cuda" or not has_triton():
        return False
    inputs = (call.q, call.k, call.v)
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs))


def triton_attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by our Triton kernel, imported when first used."""
    from attnscope.kernels import triton

    return triton.attend(call)


def _sdpa(call: AttentionCall, dropout: float, *, causal: bool) -> Tensor:
    out: Tensor = F.scaled_dot_product_attention(
        call.q,
        call.k,
        call.v,
        dropout_p=dropout,
        is_causal=causal,
        scale=call.scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )
    return out


def _fused(call: AttentionCall, *, causal: bool) -> tuple[Tensor, Tensor] | None:
    """Output and log-sum-exp by the operator plain sdpa would choose; None where there is none."""
    q, k, v, scale = call.q, call.k, call.v, call.scale
    if q.device.type == "cpu":
        return _flash_cpu(q, k, v, scale, causal=causal)
    if q.device.type != "cuda":
        return None
    grouped = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)
    ops = torch.ops.aten
    if choice == _CUDNN:
        result = ops._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
    elif choice == _FLASH:
        result = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    elif choice == _EFFICIENT and not grouped:
        result = ops._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
    else:
        return None
    # cuDNN keeps a trailing dimension, the memory-efficient kernel pads the rows.
    return result[0], result[1].flatten(2)[..., : q.shape[2]]


def _flash_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    D, E = q.shape[-1], v.shape[-1]
    if D != E:  # the operator wants one size; zeros change neither scores nor values
        wide = max(D, E)
        q, k, v = F.pad(q, (0, wide - D)), F.pad(k, (0, wide - D)), F.pad(v, (0, wide - E))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out[..., :E], lse


def _by_blocks(call: AttentionCall, dropout: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """Plain attention under any visibility, a block of queries at a time."""
    outs, lses = [], []
    per_group = call.q.shape[1] // call.k.shape[1]
    for b in range(call.q.shape[0]):
        row_outs, row_lses = [], []
        for rows, low, high, bias in _blocks(call.visible, b, BLOCK):
            q = call.q[b : b + 1, :, rows]
            if high == low:
                row_outs.append(q.new_zeros((*q.shape[:3], call.v.shape[-1])))
                row_lses.append(q.new_zeros(q.shape[:3], dtype=torch.float32))
                continue
            k = call.k[b : b + 1, :, low:high]
            v = call.v[b : b + 1, :, low:high]
            added = None if bias is None else bias.to(q.dtype)[None, None]
            if q.device.type == "cpu" and not dropout:
                out, lse = _flash_cpu(q, k, v, call.scale, causal=False, bias=added)
                row_lses.append(lse)
            else:
                k, v = (t.repeat_interleave(per_group, 1) for t in (k, v))
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=added, dropout_p=dropout, scale=call.scale
                )
                out = torch.where(_seen(call.visible, b, rows), out, 0.0)
            row_outs.append(out)
        outs.append(torch.cat(row_outs, 2))
        lses.append(torch.cat(row_lses, 2) if row_lses else None)
    out = torch.cat(outs)
    known = [lse for lse in lses if lse is not None and lse.shape[-1] == call.q.shape[2]]
    return out, torch.cat(known) if len(known) == len(lses) else None


def _by_scores(call: AttentionCall, dropout: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """Attention with a soft-cap or sinks: the scores of a few rows at a time, spelled out."""
    per_group = call.q.shape[1] // call.k.shape[1]
    step = max(1, min(BLOCK, SCORES // (call.q.shape[1] * call.k.shape[2])))
    outs, lses = [], []
    for b in range(call.q.shape[0]):
        k, v = (t[b].repeat_interleave(per_group, 0) for t in (call.k, call.v))
        row_outs, row_lses = [], []
        for rows, low, high, bias in _blocks(call.visible, b, step):
            x = (call.q[b, :, rows] @ k[:, low:high].transpose(1, 2)).float() * call.scale
            if call.softcap is not None:
                x = call.softcap * torch.tanh(x / call.softcap)
            if bias is not None:
                x = x + bias
            lse = torch.logsumexp(x, -1, keepdim=True)
            if call.sinks is not None:
                lse = torch.logaddexp(lse, call.sinks.float()[:, None, None])
            p = torch.exp(x - lse.clamp(min=torch.finfo(torch.float32).min))
            p = F.dropout(p, dropout)
            row_outs.append(p.to(v.dtype) @ v[:, low:high])
            row_lses.append(lse[..., 0])
        outs.append(torch.cat(row_outs, 1))
        lses.append(torch.cat(row_lses, 1))
    return torch.stack(outs), None if dropout else torch.stack(lses)


def _blocks(
    visible: Visible, b: int, step: int
) -> list[tuple[slice, int, int, Tensor | None]]:
    """Blocks of queries, the keys any of them sees, and an additive mask where they differ."""
    starts, stops = visible.start[b].tolist(), visible.stop[b].tolist()
    blocks: list[tuple[slice, int, int, Tensor | None]] = []
    for first in range(0, len(starts), step):
        rows = slice(first, min(first + step, len(starts)))
        pairs = list(zip(starts[rows], stops[rows], strict=True))
        seeing = [pair for pair in pairs if pair[1] > pair[0]]
        if not seeing:
            blocks.append((rows, 0, 0, None))
            continue
        low, high = min(s for s, _ in seeing), max(e for _, e in seeing)
        bias = None
        if visible.real is not None or len(set(pairs)) > 1:
            keys = torch.arange(low, high, device=visible.start.device)
            seen = (keys >= visible.start[b, rows, None]) & (keys < visible.stop[b, rows, None])
            if visible.real is not None:
                seen &= visible.real[b, low:high]
            bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -math.inf)
        blocks.append((rows, low, high, bias))
    return blocks


def _seen(visible: Visible, b: int, rows: slice) -> Tensor:
    """bool [1, 1, rows, 1]: whether a query sees anything at all."""
    return (visible.stop[b, rows] > visible.start[b, rows])[None, None, :, None]
