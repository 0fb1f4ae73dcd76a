"""Keys of several requests in pages made by hand, and the sums of each by the definition."""

from typing import Any

import torch
from torch import Tensor

from attnscope.kernels import AttentionSums, KernelRows, reference
from attnscope.kernels.triton_paged import PagedRows


def made_pages(
    requests: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    order: str = "tokens",
    **options: Any,
) -> tuple[PagedRows, list[KernelRows]]:
    """Requests by position and number of their queries: paged, and each with its keys in a row.

    Unused pages and the ends of last pages hold nan. With the order "sizes" the keys of a page lie
    dimension by dimension.
    """
    torch.manual_seed(len(requests))
    lengths = [position + rows for position, rows in requests]
    width = max(-(-length // page) for length in lengths)
    pages = 3 + sum(-(-length // page) for length in lengths)
    shape = (pages, kv_heads, page, size) if order == "tokens" else (pages, kv_heads, size, page)
    k = torch.full(shape, torch.nan, dtype=dtype)
    k = k if order == "tokens" else k.transpose(2, 3)
    shuffled = torch.randperm(pages).tolist()
    table = torch.full((len(requests), width), -1, dtype=torch.int32)
    rows = sum(count for _, count in requests)
    q = (torch.randn(rows, heads, size) * 2).to(dtype)
    dense, at = [], 0
    for r, (position, count) in enumerate(requests):
        keys = (torch.randn(lengths[r], kv_heads, size) * 2).to(dtype)
        for n in range(0, lengths[r], page):
            table[r, n // page] = chosen = shuffled.pop()
            part = keys[n : n + page].transpose(0, 1)
            k[chosen, :, : part.shape[1]] = part
        dense.append(_dense(q[at : at + count], keys, position, options))
        at += count
    counts = torch.tensor([count for _, count in requests], dtype=torch.int32)
    sinks = options.get("sinks")
    paged = PagedRows(
        q=q.to(device),
        k=k.to(device),
        table=table.to(device),
        first_row=(counts.cumsum(0) - counts).int().to(device),
        rows=counts.to(device),
        position=torch.tensor([at for at, _ in requests], dtype=torch.int32, device=device),
        most_rows=int(counts.max()),
        most_keys=max(lengths),
        scale=size**-0.5,
        **(options | {"sinks": None if sinks is None else sinks.to(device)}),
    )
    return paged, dense


def _dense(q: Tensor, keys: Tensor, position: int, options: dict[str, Any]) -> KernelRows:
    at = torch.arange(position, position + len(q), dtype=torch.int32)[None]
    window = options.get("window")
    return KernelRows(
        q=q.transpose(0, 1)[None],
        k=keys.transpose(0, 1)[None],
        scale=q.shape[2] ** -0.5,
        start=torch.zeros_like(at) if window is None else (at - window + 1).clamp(min=0),
        stop=at + 1,
        self_key=at,
        softcap=options.get("softcap"),
        sinks=options.get("sinks"),
    )


def compare(paged: tuple[AttentionSums, Tensor], dense: list[KernelRows], tolerance: float) -> None:
    """Compare the sums of every request with the definition."""
    sums, lse = paged
    at = 0
    for r, rows in enumerate(dense):
        of = reference.reduce(rows)
        K, M = rows.k.shape[2], rows.q.shape[2]
        for name in ("received", "received_later", "mass", "entropy", "self_mass"):
            value, other = getattr(sums, name)[r].cpu(), getattr(of, name)[0]
            value = value[..., :K] if name.startswith("received") else value
            torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)
        assert not bool(sums.received[r, :, K:].any())
        assert of.lse is not None
        value = lse[:, at : at + M].cpu()
        torch.testing.assert_close(value, of.lse[0].float(), rtol=tolerance, atol=tolerance)
        at += M
