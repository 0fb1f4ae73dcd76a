"""Random rows of every kind that a kernel may get, for hypothesis."""

from dataclasses import replace

import hypothesis.strategies as st
import torch

from attnscope.kernels import AttentionCall, Rows, Visible


@st.composite
def calls(draw: st.DrawFn, *, sizes: tuple[int, ...] = (2,)) -> AttentionCall:
    """A call of any kind: grouped, windowed, padded on both sides, soft-capped, with sinks."""
    B = draw(st.integers(1, 3))
    G = draw(st.sampled_from([1, 2, 3]))
    H = G * draw(st.sampled_from([1, 2, 4]))
    K = draw(st.integers(1, 70))
    Q = draw(st.integers(1, K))
    D = draw(st.sampled_from([4, 8, 12, 16, 20]))
    E = draw(st.sampled_from([4, 8, 16]))
    torch.manual_seed(draw(st.integers(0, 10_000)))
    own = torch.arange(K - Q, K).expand(B, Q)
    start, stop = torch.zeros(B, Q, dtype=torch.int64), torch.full((B, Q), K)
    if draw(st.booleans()):
        stop = own + 1
    if draw(st.booleans()):
        start = (own - draw(st.integers(0, K))).clamp(min=0)
    left = torch.randint(0, K // 2 + 1, (B, 1)) * draw(st.integers(0, 1))
    right = K - torch.randint(0, K // 2 + 1, (B, 1)) * draw(st.integers(0, 1))
    start = torch.maximum(start, left).clamp(max=K)
    stop = torch.maximum(torch.minimum(stop, right), start)
    real = torch.rand(B, K) < 0.8 if draw(st.booleans()) else None
    form = "interval"
    if real is None and not start.any() and (stop == K).all():
        form = "full"
    elif real is None and not start.any() and Q == K and torch.equal(stop, own + 1):
        form = "causal"
    return AttentionCall(
        layer=0,
        q=torch.randn(B, H, Q, D) * draw(st.sampled_from(sizes)),
        k=torch.randn(B, G, K, D),
        v=torch.randn(B, G, K, E),
        scale=draw(st.sampled_from([D**-0.5, 0.3])),
        visible=Visible(form=form, bounds=lambda: (start.int(), stop.int()), real=real),
        softcap=draw(st.sampled_from([None, 1.0, 20.0])),
        sinks=torch.randn(H) if draw(st.booleans()) else None,
        key_bias=torch.randn(draw(st.sampled_from([1, B])), H, K) if draw(st.booleans()) else None,
        distance_bias=torch.randn(H, 2 * draw(st.integers(0, 40)) + 1)
        if draw(st.booleans())
        else None,
        first=K - Q,
    )


def rows_of(call: AttentionCall) -> Rows:
    B, _, Q, _ = call.q.shape
    K = call.k.shape[2]
    return Rows(
        q=call.q,
        k=call.k,
        scale=call.scale,
        start=call.visible.start,
        stop=call.visible.stop,
        own=torch.arange(K - Q, K, dtype=torch.int32).expand(B, Q).contiguous(),
        real=call.visible.real,
        softcap=call.softcap,
        sinks=call.sinks,
        key_bias=call.key_bias,
        distance_bias=call.distance_bias,
        causal=call.visible.form == "causal",
    )


@st.composite
def selections(draw: st.DrawFn, *, sizes: tuple[int, ...] = (2, 2000)) -> Rows:
    """The rows of a call, some not counted, weighted, sampled in pairs or split into groups."""
    rows = rows_of(draw(calls(sizes=sizes)))
    B, M = rows.start.shape
    if draw(st.booleans()):
        gone = torch.rand(B, M) < 0.5
        rows = replace(rows, stop=torch.where(gone, rows.start, rows.stop), causal=False)
    if draw(st.booleans()):
        rows = replace(rows, weight=torch.rand(B, M) * 3, causal=False)
    if draw(st.booleans()) and M > 1:
        even = M - M % 2
        cut = {n: getattr(rows, n)[:, :even].contiguous() for n in ("start", "stop", "own")}
        weight = None
        if rows.weight is not None:
            weight = rows.weight[:, :even:2].repeat_interleave(2, 1).contiguous()
        shrink = torch.rand(B, even // 2)
        rows = replace(
            rows, q=rows.q[:, :, :even], **cut, weight=weight, shrink=shrink, causal=False
        )
    if draw(st.booleans()):
        rows = replace(rows, group=torch.randint(-1, 3, (B, rows.q.shape[2])), groups=3)
    return rows


def seen_rows(rows: Rows) -> torch.Tensor:
    keys = torch.arange(rows.k.shape[2])
    seen = (keys >= rows.start[..., None]) & (keys < rows.stop[..., None])
    if rows.real is not None:
        seen = seen & rows.real[:, None]
    return seen.any(-1)[:, None].expand(-1, rows.q.shape[1], -1)
