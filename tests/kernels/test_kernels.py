"""Every kernel against the reference, over random shapes, masks, caps, sinks and selections."""

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings

from attnscope import kernels
from attnscope.kernels import (
    AttentionCall,
    KernelRows,
    VisibleRanges,
    kernel,
    reference,
    scores,
    streaming,
    tile_plan,
)
from attnscope.kernels import attend as attention
from attnscope.kernels.attend import attend
from attnscope.kernels.call import ScoreBias
from made_rows import TOLERANCE, assert_same, calls, rows_of, seen_rows, selections

KNOWN = ["lse known", "lse unknown", "parts of rows"]


def with_known_lse(rows: KernelRows, known: str) -> KernelRows:
    """These rows with what is known of their log-sum-exp, whole or cut to a part of their keys."""
    if known == "lse unknown":
        return rows
    lse = kernel("reference")(rows).lse.where(seen_rows(rows), 0.0)
    if known == "lse known":
        return replace(rows, lse=lse.float())
    given = kernels.exact_lse("reference")(replace(rows, lse=lse.float()))[0]
    torch.testing.assert_close(given, lse)
    rows = rows.with_bounds()
    start = rows.start + torch.randint(0, 5, rows.start.shape, dtype=torch.int32)
    stop = rows.stop - torch.randint(0, 5, rows.stop.shape, dtype=torch.int32)
    start = torch.minimum(start, rows.stop)
    parts = {"start": start, "stop": torch.maximum(start, stop), "causal": False}
    return replace(rows, lse=given, partial=True, **parts, diagonal_offset=0, cache={})


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("backend", ["streaming", "triton"])
def test_against_the_reference(backend: str, known: str) -> None:
    @settings(max_examples=100 if backend == "streaming" else 15, deadline=None)
    @given(selections(sizes=(2, 2000) if backend == "streaming" else (2,)))
    def check(rows: KernelRows) -> None:
        rows = with_known_lse(rows, known)
        assert_same(kernel(backend)(rows), kernel("reference")(rows), rows)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("known", KNOWN)
def test_triton_on_texts_of_many_tiles(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 × 16, so that short texts are cut like long ones."""
    triton = pytest.importorskip("attnscope.kernels.triton")
    small = 16, 16, {"num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(triton, "tile", lambda D, q, M: small)
    monkeypatch.setattr(triton, "row_tile", lambda D, q: small)

    # The interpreter is too slow to look for smaller examples of a failure.
    @settings(max_examples=25, deadline=None, phases=[Phase.generate])
    @given(selections(sizes=(2,), heads=(1, 2)))
    def check(rows: KernelRows) -> None:
        rows = with_known_lse(
            replace(rows, key_bias=None, distance_bias=None, score_biases=()), known
        )
        assert_same(triton.reduce(rows), kernel("reference")(rows), rows)

    check()


def test_a_layer_with_holes_does_not_use_the_tiles_of_one_without() -> None:
    """An intervention changes some layers, and all layers share a cache."""
    triton = pytest.importorskip("attnscope.kernels.triton")
    torch.manual_seed(0)
    B, H, M, D = 2, 2, 100, 8
    self_key = torch.arange(M, dtype=torch.int32).repeat(B, 1)
    plain = KernelRows(
        q=torch.randn(B, H, M, D),
        k=torch.randn(B, H, M, D),
        scale=0.3,
        start=torch.zeros_like(self_key),
        stop=self_key + 1,
        self_key=self_key,
    )
    real = torch.arange(M).expand(B, M) % 9 != 4
    for rows in (plain, replace(plain, real=real), plain):
        assert_same(triton.reduce(rows), kernel("reference")(rows), rows)


@pytest.fixture(params=["many tiles", "nothing kept"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes so small that short texts are split like long ones, along sequences, rows and heads."""
    for module, sizes in (
        (streaming, {"ELEMENTS": 256, "REFINED": 24}),
        (scores, {"LEAST": 2, "MOST": 8, "CHUNK": 2}),
        (attention, {"BLOCK": 8, "LEAST": 3, "UNCUT": 12, "MASK": 900, "SCORES": 900}),
    ):
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)
    if request.param == "nothing kept":
        monkeypatch.setattr(attention, "BoundedCache", lambda: tile_plan.BoundedCache(budget=0))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("known", KNOWN)
def test_texts_of_many_tiles(known: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(selections())
    def check(rows: KernelRows) -> None:
        rows = with_known_lse(rows, known)
        wanted = kernel("reference")(rows)
        assert_same(kernel("streaming")(rows), wanted, rows)
        assert_same(kernel("streaming")(rows), wanted, rows)  # another layer, the same plan

    check()


@pytest.mark.usefixtures("small")
def test_output_of_texts_of_many_tiles() -> None:
    check_output("torch", 100)


def test_a_plan_is_not_taken_for_other_rows() -> None:
    """Rows that share a cache and differ in what they count."""
    torch.manual_seed(0)
    stop = torch.arange(1, 9, dtype=torch.int32)[None]
    rows = KernelRows(
        q=torch.randn(1, 2, 8, 4),
        k=torch.randn(1, 1, 8, 4),
        scale=0.5,
        start=torch.zeros_like(stop),
        stop=stop,
        self_key=stop - 1,
    )
    kernel("streaming")(rows)
    other = replace(rows, stop=torch.where(stop > 4, stop, 0), cache=rows.cache)
    assert_same(kernel("streaming")(other), kernel("reference")(other), other)


@pytest.mark.parametrize("backend", ["streaming", "triton"])
def test_a_head_that_leaves_all_to_its_sink(backend: str) -> None:
    """What is left for the keys rounds to nothing, or to less: still numbers, and not negative."""
    torch.manual_seed(0)
    self_key = torch.arange(6, dtype=torch.int32).repeat(16, 1)
    rows = KernelRows(
        q=torch.randn(16, 2, 6, 4) + 9,
        k=torch.randn(16, 1, 6, 4) - 9,
        scale=0.5,
        start=torch.zeros_like(self_key),
        stop=self_key + 1,
        self_key=self_key,
        sinks=torch.tensor([1.4682, 1.0857]),
        weight=torch.rand(16, 6) * 3,
    )
    rows = with_known_lse(rows, "lse known")
    got = kernel(backend)(rows)
    assert_same(got, kernel("reference")(rows), rows)
    assert (got.received >= 0).all()


@pytest.mark.parametrize("where", ["torch", "triton"])
def test_output_and_log_sum_exp(where: str) -> None:
    check_output(where, 100 if where == "torch" else 20)


def score_biases_of(call: AttentionCall) -> tuple[ScoreBias, ...]:
    """One that steers all rows, and one that hides keys from rows that still see another."""
    (B, H, Q), K = call.q.shape[:3], call.k.shape[2]
    start, stop = call.visible.start[..., None], call.visible.stop[..., None]
    hidden = torch.rand(B, 1, K) < 0.3
    left = (torch.arange(K) >= start) & (torch.arange(K) < stop) & ~hidden
    if call.visible.real is not None:
        left &= call.visible.real[:, None]
    hides = torch.zeros(B, H, K).masked_fill(hidden & (torch.rand(B, H, 1) < 0.5), -torch.inf)
    return (
        ScoreBias(bias=torch.randn(1, H, K)),
        ScoreBias(bias=hides, queries=left.any(-1) & (torch.rand(B, Q) < 0.5)),
    )


def check_output(where: str, examples: int) -> None:
    from attnscope.kernels import reference

    @settings(max_examples=examples, deadline=None)
    @given(calls())
    def check(call: AttentionCall) -> None:
        if where == "triton":
            call = replace(call, key_bias=None, distance_bias=None)
        call = replace(call, score_biases=score_biases_of(call) if len(call.q) > 1 else ())
        rows = replace(rows_of(call), score_biases=call.score_biases)
        A, _, lse = reference.weights(rows)
        out, got = attend(call) if where == "torch" else attention.triton_attend(call)
        v = call.v.double().repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
        torch.testing.assert_close(out.double(), A @ v, rtol=0, atol=TOLERANCE)
        assert got is not None
        seen = seen_rows(rows)
        torch.testing.assert_close(
            got.double().where(seen, 0.0), lse.where(seen, 0.0), rtol=0, atol=TOLERANCE
        )

    check()


def test_output_where_every_score_is_far_below_zero() -> None:
    """Scores of −160,000: their rows are not taken for rows that see nothing."""
    from attnscope.kernels.attend import triton_attend

    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, 1, 8, 16) + 200,
        torch.randn(1, 1, 8, 16) - 200,
        torch.randn(1, 1, 8, 16),
    )
    start, stop = torch.zeros(1, 8, dtype=torch.int32), torch.arange(1, 9, dtype=torch.int32)[None]
    visible = VisibleRanges(form="interval", bounds=lambda: (start, stop))
    out, lse = triton_attend(AttentionCall(layer=0, q=q, k=k, v=v, scale=0.25, visible=visible))
    rows = KernelRows(q=q, k=k, scale=0.25, start=start, stop=stop, self_key=stop - 1)
    A, _, wanted = reference.weights(rows)
    assert wanted.max() < -100_000
    torch.testing.assert_close(lse.double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.double(), A @ v.double(), rtol=0, atol=0.1)  # float32 scores


@pytest.mark.parametrize("size", [20, 24])
def test_flash_attention_is_given_heads_of_a_size_it_takes(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA it takes multiples of eight alone; here the CPU's stands in for it."""

    def strict(q, k, v, dropout, causal, *, scale):  # type: ignore[no-untyped-def]
        assert q.shape[-1] % 8 == k.shape[-1] % 8 == v.shape[-1] % 8 == 0
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout, causal, scale=scale
        )
        return out, lse, None

    monkeypatch.setattr(torch, "_scaled_dot_product_flash_attention", strict)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, size) for _ in range(3))
    got = attention._flash_cuda(q, k, v, 0.3, causal=True)
    wanted = attention._flash_cpu(q, k, v, 0.3, causal=True)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def odd(dtype: torch.dtype, D: int, E: int) -> AttentionCall:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 9, size).to(dtype) for size in (D, D, E))
    start = torch.zeros(2, 9, dtype=torch.int32)
    stop = torch.arange(1, 10, dtype=torch.int32).expand(2, 9).contiguous()
    visible = VisibleRanges(form="causal", bounds=lambda: (start, stop))
    return AttentionCall(layer=0, q=q, k=k, v=v, scale=D**-0.5, visible=visible)


@pytest.mark.parametrize("D", [4, 12, 20])
def test_triton_on_odd_sizes_of_heads(D: int) -> None:
    call = odd(torch.float16, D, D)
    rows = rows_of(call)
    A, _, lse = reference.weights(rows)
    out, got = attention.triton_attend(call)
    torch.testing.assert_close(out.double(), A @ call.v.double(), rtol=0, atol=1e-2)
    torch.testing.assert_close(got.double(), lse, rtol=0, atol=TOLERANCE)
    rows = replace(rows, lse=got)
    assert_same(kernel("triton")(rows), kernel("reference")(rows), rows)


@pytest.mark.parametrize("only", [None, 5], ids=["all", "one"])
@pytest.mark.parametrize("mask", ["causal", "window", "holes"])
def test_layers_that_lie_apart(mask: str, only: int | None) -> None:
    """As laid side by side, to the bit; and refused where they do not lie alike."""
    triton = pytest.importorskip("attnscope.kernels.triton")
    L, B, H, G, Q, D = 3, 2, 4, 2, 40, 16
    torch.manual_seed(0)
    q = [torch.randn(B, Q, H, D).transpose(1, 2) for _ in range(L)]
    k = [torch.randn(B, Q, G, D).transpose(1, 2) for _ in range(L)]
    self_key = torch.arange(Q, dtype=torch.int32).expand(B, Q)
    causal = mask != "window"
    start = torch.zeros_like(self_key) if causal else (self_key - 6).clamp(min=0)
    real = torch.arange(Q).expand(B, Q) % 7 != 2 if mask == "holes" else None
    bounds = {
        "scale": 0.3,
        "start": start,
        "stop": self_key + 1,
        "self_key": self_key,
        "real": real,
    }
    lse = [reference.reduce(KernelRows(q=q[n], k=k[n], **bounds)).lse.float() for n in range(L)]
    some = slice(None) if only is None else slice(only, only + 1)
    first = KernelRows(q=q[0][:, :, some], k=k[0], scale=0.3, lse=lse[0][:, :, some], real=real)
    if causal:
        first = replace(first, causal=True, diagonal_offset=only or 0)
    else:
        rows = {name: bounds[name][:, some].contiguous() for name in ("start", "stop", "self_key")}
        first = replace(first, **rows)
    got = triton.reduce_layers(first, q, k, lse, only or 0)
    for n in range(L):
        wanted = triton.reduce(replace(first, q=q[n][:, :, some], k=k[n], lse=lse[n][:, :, some]))
        for name in ("received", "received_later", "mass", "entropy", "self_mass"):
            one, other = getattr(got, name)[n * B : (n + 1) * B], getattr(wanted, name)
            assert torch.equal(one, other), name
        dense = reference.reduce(replace(first, q=q[n][:, :, some], k=k[n], lse=None))
        torch.testing.assert_close(wanted.received, dense.received, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            wanted.received_later, dense.received_later, rtol=1e-5, atol=1e-5
        )
    apart = [q[0], q[1].contiguous(), q[2]]
    assert triton.reduce_layers(first, apart, k, lse, only or 0) is None
