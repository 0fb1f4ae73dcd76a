"""The same promises on a real GPU: Triton compiled, not interpreted.

PYTHONPATH=src python -m pytest tests/gpu -m gpu
"""

from dataclasses import replace

import pytest
import torch
import transformers as hf

import attnscope
from attnscope.kernels import AttentionCall, KernelRows, VisibleRanges, kernel, reference
from attnscope.kernels.attend import attend
from families import STREAMED, VOCABULARY, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# B, H, G, Q, K, D, E, causal, window, softcap, sinks
CASES = [
    (2, 8, 2, 700, 700, 128, 128, True, None, None, False),
    (1, 4, 2, 16448, 16448, 128, 128, True, None, None, False),
    (1, 2, 2, 16400, 16400, 64, 64, True, None, None, False),
    (2, 4, 4, 300, 300, 64, 64, True, 100, None, True),
    (1, 4, 2, 257, 257, 128, 128, False, None, None, False),
    (1, 4, 1, 130, 500, 96, 96, True, None, 30.0, False),
    (1, 2, 2, 400, 400, 256, 256, True, 64, 50.0, False),
    (1, 4, 4, 333, 333, 192, 128, True, None, None, False),
    (1, 4, 2, 1, 900, 128, 128, True, None, None, False),
    (1, 4, 4, 300, 300, 36, 36, True, None, None, False),  # no multiple of eight
    (1, 4, 2, 300, 300, 20, 20, True, None, None, False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_against_float64(case: tuple, dtype: torch.dtype) -> None:
    B, H, G, Q, K, D, E, causal, window, softcap, sinks = case
    q = torch.randn(B, Q, H, D, device="cuda", dtype=dtype).transpose(1, 2)
    k = torch.randn(B, K, G, D, device="cuda", dtype=dtype).transpose(1, 2)
    v = torch.randn(B, K, G, E, device="cuda", dtype=dtype).transpose(1, 2)
    own = torch.arange(K - Q, K, device="cuda").expand(B, Q)
    stop = own + 1 if causal else torch.full_like(own, K)
    start = (own - window + 1).clamp(min=0) if window else torch.zeros_like(own)
    form = "interval"
    if not window:
        form = "full" if not causal or Q == 1 else ("causal" if Q == K else "interval")
    bounds = start.int().contiguous(), stop.int().contiguous()
    taken = torch.randn(H, device="cuda") if sinks else None
    call = AttentionCall(
        layer=0,
        q=q,
        k=k,
        v=v,
        scale=D**-0.5,
        visible=VisibleRanges(form=form, bounds=lambda: bounds),  # type: ignore[arg-type]
        softcap=softcap,
        sinks=taken,
    )
    rows = KernelRows(
        q=q,
        k=k,
        scale=call.scale,
        start=bounds[0],
        stop=bounds[1],
        self_key=own.int().contiguous(),
        softcap=softcap,
        sinks=taken,
        causal=form == "causal",
    )
    wanted = reference.reduce(rows)
    A, _, _ = reference.weights(rows)
    out, given = attend(call)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-3
    exact = A @ v.double().repeat_interleave(H // G, 1)
    rounding = 1e-4 if dtype == torch.float32 else 2e-2  # the output is stored in 16 bits
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=rounding)
    for known in (None, given):
        got = kernel("triton")(replace(rows, lse=known))
        for name in ("received", "received_later", "mass", "entropy", "self_mass"):
            a, b = getattr(got, name), getattr(wanted, name)
            off = ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
            assert off < tolerance, (name, off)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", sorted(STREAMED))
@torch.no_grad()
def test_families_agree_with_the_cpu(name: str, padding: str | None) -> None:
    model = build(name, "eager" if name in ("gemma2", "gpt-oss") else None)
    ids = torch.randint(5, 97, (3, 23))
    real = torch.ones_like(ids)
    for row, size in ((1, 6), (2, 11)):
        if padding == "left":
            real[row, :size] = 0
        if padding == "right":
            real[row, 23 - size :] = 0
    with attnscope.watch(model) as cpu:
        model(ids, attention_mask=real)
    model.cuda()
    with attnscope.watch(model) as gpu:
        model(ids.cuda(), attention_mask=real.cuda())
    assert gpu.backend == "triton"
    for layer in cpu.layers:
        for what in (
            "received",
            "average",
            "entropy",
            "distance",
            "self_mass",
            "learned_sink_mass",
        ):
            a, b = getattr(gpu, what)(layer).cpu(), getattr(cpu, what)(layer)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5, equal_nan=True)


@torch.no_grad()
def test_a_model_spread_over_devices() -> None:
    from accelerate import dispatch_model

    model = build("qwen2")
    ids = torch.randint(5, 97, (2, 23))
    real = torch.ones_like(ids)
    real[0, :5] = 0
    with attnscope.watch(model) as whole:
        model(ids, attention_mask=real)
    places = {f"model.layers.{i}": "cpu" if i == 1 else 0 for i in range(3)}
    rest = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    model = dispatch_model(model, device_map={**places, **dict.fromkeys(rest, 0)}, main_device=0)
    with attnscope.watch(model) as spread:
        model(ids.cuda(), attention_mask=real.cuda())
    for layer in whole.layers:
        torch.testing.assert_close(
            spread.received(layer).cpu(), whole.received(layer), rtol=0, atol=2e-5
        )


@torch.no_grad()
def test_a_sample_of_queries_says_how_far_off_it_is() -> None:
    model = build("qwen2").cuda()
    model.config.max_position_embeddings = 4096
    ids = torch.randint(5, 97, (1, 2048), device="cuda")
    with attnscope.watch(model) as exact:
        model(ids)
    with attnscope.watch(model, queries="sample:64") as sample:
        model(ids)
    for layer in exact.layers:
        off = (sample.received(layer) - exact.received(layer)).abs()
        allowed = 3 * sample.received_error(layer) + 1e-4 * exact.received(layer)
        assert (off <= allowed).float().mean() > 0.95


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt2", "bert"])
@torch.no_grad()
def test_interventions_agree_with_the_cpu(name: str) -> None:
    """Links in the Triton kernel: padded, for some queries and heads, nested."""
    model = build(name)
    ids = torch.randint(5, 97, (2, 23))
    real = torch.ones_like(ids)
    real[1, 17:] = 0
    keys = torch.arange(23).expand(2, -1) % 5 == 3
    some = torch.arange(23).expand(2, -1) % 4 == 0

    def outputs(device: str) -> torch.Tensor:
        given = {"input_ids": ids.to(device), "attention_mask": real.to(device)}
        with attnscope.knockout(model, keys=keys, queries=some, heads=[1]):
            with attnscope.steer(model, keys=~keys, factor=3.0), attnscope.watch(model) as scope:
                output = model(**given)[0][real.bool().to(device)]
            mass = scope.received(0).cpu()
        return torch.cat([output.flatten().cpu(), mass.flatten()])

    wanted = outputs("cpu")
    model.cuda()
    torch.testing.assert_close(outputs("cuda"), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_arm_draws_the_same_amounts_alone_and_in_a_batch() -> None:
    model = build("qwen2").cuda()
    ids = torch.randint(5, 97, (2, 70), device="cuda")
    real = torch.ones_like(ids)
    real[1, 23:] = 0
    with attnscope.arm(model, seed=[1, 2]):
        together = model(input_ids=ids, attention_mask=real).logits[1, :23]
    with attnscope.arm(model, seed=2):
        alone = model(input_ids=ids[1:, :23]).logits[0]
    plain = model(input_ids=ids[1:, :23]).logits[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(alone, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_masses_of_single_queries_against_float64(case: tuple, dtype: torch.dtype) -> None:
    B, H, G, Q, K, D, _, causal, window, softcap, _ = case
    q = torch.randn(B, Q, H, D, device="cuda", dtype=dtype).transpose(1, 2)
    k = torch.randn(B, K, G, D, device="cuda", dtype=dtype).transpose(1, 2)
    classes = torch.randint(-1, 8, (B, K), device="cuda")
    few = torch.zeros(B, K, dtype=torch.bool)
    few[:, K - Q :: 61] = True
    asked = {"causal": causal, "window": window, "softcap": softcap}
    if not causal and Q != K:
        pytest.skip("the keys are another text's")
    got = attnscope.from_tensors(q, k, **asked, backend="triton")
    wanted = attnscope.from_tensors(q, k, **asked, queries=few, backend="reference")
    at = wanted.query_positions(0)[0] - (K - Q)
    off = (got.rows(0, classes, 8)[:, :, at] - wanted.rows(0, classes, 8)).abs().max()
    assert float(off) < 1e-5


@pytest.mark.parametrize("new", [0, 5], ids=["pass", "generate"])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("queries", ["all", "last", "predicts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_layers_measured_together_against_float64(
    dtype: torch.dtype, queries: str, padding: str | None, new: int
) -> None:
    """Pending layers are read in place; one length twice, with a compiled program."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    model = hf.LlamaForCausalLM(config).eval().to(dtype).cuda()
    for tokens in (150, 37, 150):
        ids = torch.randint(5, VOCABULARY, (3, tokens), device="cuda")
        real = torch.ones_like(ids)
        if padding:
            real[1, :9] = 0
        scopes = []
        for settings in ({"backend": "reference"}, {}):
            with attnscope.watch(model, queries=queries, **settings) as scope:
                if new:
                    more = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new}
                    model.generate(input_ids=ids, attention_mask=real, **more)
                else:
                    model(input_ids=ids, attention_mask=real if padding else None)
            scopes.append(scope)
        wanted, got = scopes
        for layer in wanted.layers:
            for what in ("received", "average", "entropy", "self_mass", "first_token", "distance"):
                one, other = getattr(got, what)(layer), getattr(wanted, what)(layer)
                torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5, equal_nan=True)
