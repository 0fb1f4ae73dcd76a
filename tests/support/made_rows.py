"""Random rows of every kind that a kernel may get, for hypothesis."""

from dataclasses import fields, replace

import hypothesis.strategies as st
import torch

from attnscope.kernels import AttentionCall, AttentionSums, KernelRows, VisibleRanges
from attnscope.kernels.call import ScoreBias


@st.composite
def calls(
    draw: st.DrawFn, *, sizes: tuple[int, ...] = (2,), heads: tuple[int, ...] = (1, 2, 3, 4)
) -> AttentionCall:
    """A call of any kind: grouped, windowed, padded on both sides, soft-capped, with sinks."""
    B = draw(st.integers(1, 3))
    G = draw(st.sampled_from([n for n in (1, 2, 3) if n in heads]))
    H = G * draw(st.sampled_from([n for n in (1, 2, 4) if n in heads]))
    K = draw(st.integers(1, 70))
    Q = draw(st.integers(1, K))
    D = draw(st.sampled_from([4, 8, 12, 16, 20]))
    E = draw(st.sampled_from([4, 8, 16]))
    torch.manual_seed(draw(st.integers(0, 10_000)))
    self_key = torch.arange(K - Q, K).expand(B, Q)
    start, stop = torch.zeros(B, Q, dtype=torch.int64), torch.full((B, Q), K)
    if draw(st.booleans()):
        stop = self_key + 1
    if draw(st.booleans()):
        start = (self_key - draw(st.integers(0, K))).clamp(min=0)
    left = torch.randint(0, K // 2 + 1, (B, 1)) * draw(st.integers(0, 1))
    right = K - torch.randint(0, K // 2 + 1, (B, 1)) * draw(st.integers(0, 1))
    start = torch.maximum(start, left).clamp(max=K)
    stop = torch.maximum(torch.minimum(stop, right), start)
    real = torch.rand(B, K) < 0.8 if draw(st.booleans()) else None
    form = "interval"
    if real is None and not start.any() and (stop == K).all():
        form = "full"
    elif real is None and not start.any() and Q == K and torch.equal(stop, self_key + 1):
        form = "causal"
    return AttentionCall(
        layer=0,
        q=torch.randn(B, H, Q, D) * draw(st.sampled_from(sizes)),
        k=torch.randn(B, G, K, D),
        v=torch.randn(B, G, K, E),
        scale=draw(st.sampled_from([D**-0.5, 0.3])),
        visible=VisibleRanges(form=form, bounds=lambda: (start.int(), stop.int()), real=real),
        softcap=draw(st.sampled_from([None, 1.0, 20.0])),
        sinks=torch.randn(H) if draw(st.booleans()) else None,
        key_bias=torch.randn(draw(st.sampled_from([1, B])), H, K) if draw(st.booleans()) else None,
        distance_bias=torch.randn(H, 2 * draw(st.integers(0, 40)) + 1)
        if draw(st.booleans())
        else None,
        first=K - Q,
    )


def rows_of(call: AttentionCall) -> KernelRows:
    B, _, Q, _ = call.q.shape
    K = call.k.shape[2]
    return KernelRows(
        q=call.q,
        k=call.k,
        scale=call.scale,
        start=call.visible.start,
        stop=call.visible.stop,
        self_key=torch.arange(K - Q, K, dtype=torch.int32).expand(B, Q).contiguous(),
        real=call.visible.real,
        softcap=call.softcap,
        sinks=call.sinks,
        key_bias=call.key_bias,
        distance_bias=call.distance_bias,
        causal=call.visible.form == "causal",
    )


@st.composite
def selections(
    draw: st.DrawFn,
    *,
    sizes: tuple[int, ...] = (2, 2000),
    heads: tuple[int, ...] = (1, 2, 3, 4),
) -> KernelRows:
    """Rows in every legal combination (the docstring of `KernelRows` lists them): intervals or
    causal,
    the latter shifted and with or without bounds; holes; single rows; rows that see nothing;
    weighted, sampled in pairs, split into groups, linked."""
    rows = rows_of(draw(calls(sizes=sizes, heads=heads)))
    if draw(st.integers(0, 5)) == 5:
        rows = _cut_rows(rows, 1)
    if draw(st.booleans()):
        rows = _made_causal(rows, draw(st.integers(0, 70)), spelled=draw(st.booleans()))
    elif draw(st.booleans()):
        gone = torch.rand(rows.start.shape) < 0.5
        rows = replace(rows, stop=torch.where(gone, rows.start, rows.stop), causal=False)
    B, M = len(rows.q), rows.q.shape[2]
    if draw(st.booleans()):
        rows = replace(rows, weight=torch.rand(B, M) * 3)
    if draw(st.booleans()) and M > 1:
        rows = _cut_rows(rows, M - M % 2)
        if rows.weight is not None:
            rows = replace(rows, weight=rows.weight[:, ::2].repeat_interleave(2, 1).contiguous())
        rows = replace(rows, fpc=torch.rand(B, M // 2))
    if draw(st.booleans()):
        rows = replace(rows, group=torch.randint(-1, 3, (B, rows.q.shape[2])), groups=3)
    if draw(st.integers(0, 3)) == 3:
        rows = replace(rows, score_biases=_score_biases(rows))
    return replace(rows, max_logit=draw(st.booleans()))


def _cut_rows(rows: KernelRows, M: int) -> KernelRows:
    """The first M rows."""
    by_row = {name: getattr(rows, name) for name in ("start", "stop", "self_key", "weight")}
    make_tiles = {n: None if t is None else t[:, :M].contiguous() for n, t in by_row.items()}
    return replace(rows, q=rows.q[:, :, :M], **make_tiles)


def _made_causal(rows: KernelRows, diagonal_offset: int, *, spelled: bool) -> KernelRows:
    """The same queries in order, each with the keys up to its own; holes stay."""
    diagonal_offset = min(diagonal_offset, rows.k.shape[2] - rows.q.shape[2])
    rows = replace(
        rows,
        causal=True,
        diagonal_offset=diagonal_offset,
        start=None,
        stop=None,
        self_key=None,
        cache={},
    )
    return rows.with_bounds() if spelled else rows


def visible(rows: KernelRows) -> torch.Tensor:
    """bool [B, H, M, K]: which keys each row sees, after holes and links."""
    start, stop, _ = rows.bounds()
    (B, H, M), keys = rows.q.shape[:3], torch.arange(rows.k.shape[2])
    seen = (keys >= start[..., None]) & (keys < stop[..., None])
    if rows.real is not None:
        seen = seen & rows.real[:, None]
    seen = seen[:, None].expand(B, H, M, -1)
    for added_bias in rows.score_biases:
        hidden = added_bias.bias[:, :, None] == -torch.inf
        if added_bias.queries is not None:
            hidden = hidden & added_bias.queries[:, None, :, None]
        seen = seen & ~hidden
    return seen


def _score_biases(rows: KernelRows) -> tuple[ScoreBias, ...]:
    """One that steers all rows; two that hide keys, each from rows that still see another."""
    (B, H, M), K = rows.q.shape[:3], rows.k.shape[2]
    rows = replace(rows, score_biases=(ScoreBias(bias=torch.randn(1, H, K)),))
    for heads in (1, H):
        bias = torch.zeros(B, heads, K).masked_fill(torch.rand(B, heads, K) < 0.3, -torch.inf)
        hides = ScoreBias(bias=bias, queries=torch.ones(B, M, dtype=torch.bool))
        left = visible(replace(rows, score_biases=(*rows.score_biases, hides))).any(-1).all(1)
        queries = left & (torch.rand(B, M) < 0.7) if heads > 1 else left
        rows = replace(rows, score_biases=(*rows.score_biases, replace(hides, queries=queries)))
    return rows.score_biases


def seen_rows(rows: KernelRows) -> torch.Tensor:
    """bool [B, H, M]: the rows that see anything."""
    return visible(rows).any(-1)


TOLERANCE = 2e-5


def assert_same(got: AttentionSums, wanted: AttentionSums, rows: KernelRows) -> None:
    seen = seen_rows(rows)
    # Every row's entropy is rounded to float32 around 1, however small it is; the total adds them.
    counted = seen[:, 0].double() if rows.weight is None else seen[:, 0] * rows.weight.double()
    least = {"entropy": float(counted.sum(1).max())}
    for field in fields(AttentionSums):
        if field.name in (
            "lse_error",
            "score_bound",
        ):  # not of the definition, but of the arithmetic
            continue
        a, b = getattr(got, field.name), getattr(wanted, field.name)
        assert (a is None) == (b is None), field.name
        if a is not None:
            if field.name == "lse":  # a row that sees nothing has none
                a, b = a.where(seen, 0.0), b.where(seen, 0.0)
            a, b = a.double(), b.double()
            if field.name == "max_logit":  # of a head whose rows see nothing it is -inf
                assert torch.equal(a == -torch.inf, b == -torch.inf)
                a, b = (each.where(each > -torch.inf, 0.0) for each in (a, b))
            largest = float(b.abs().max()) if b.numel() else 1.0
            scale = max(1.0, largest, least.get(field.name, 1.0))
            torch.testing.assert_close(
                a, b, rtol=0, atol=TOLERANCE * scale, msg=lambda m, n=field.name: f"{n}: {m}"
            )
