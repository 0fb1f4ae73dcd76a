"""What `watch` promises about itself: the model left as it was, queries, caches, clear errors."""

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers import masking_utils

import attnscope
import oracle
from attnscope.errors import ConservationError, InputError, ModelError, ScopeError
from attnscope.interception import masks
from attnscope.interception.captured_call import CapturedCall
from attnscope.scope import reduce, watch_hook
from families import VOCABULARY, build
from pending_share import watching
from support_errors import raises

B, N = 2, 17


def tokens(batch: int = B, length: int = N) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (batch, length))


def eager_weights(name: str, ids: torch.Tensor, **more: Any) -> dict[int, torch.Tensor]:
    with torch.no_grad():
        out = build(name, "eager")(ids, output_attentions=True, **more)
    return dict(enumerate(out.attentions))


def state(model: torch.nn.Module) -> tuple[Any, ...]:
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), sorted(m.__dict__))
        for m in model.modules()
    ]
    registered = [
        sorted(hf.AttentionInterface._global_mapping),
        sorted(hf.AttentionMaskInterface._global_mapping),
    ]
    return model.config.to_dict(), model.config._attn_implementation, hooks, registered


# --- the model is left as it was -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2", "falcon", "gptj", "gemma3"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    model, ids = build(name), tokens()
    before = state(model)
    with attnscope.watch(model):
        model(ids)
        assert state(model) != before
    assert state(model) == before


@pytest.mark.parametrize("name", ["qwen2", "falcon", "gptj"])
def test_also_after_an_exception(name: str) -> None:
    model, ids = build(name), tokens()
    before = state(model)
    with pytest.raises(ZeroDivisionError), attnscope.watch(model):  # noqa: PT012
        model(ids)
        _ = 1 / 0
    with pytest.raises(IndexError), attnscope.watch(model):
        model(ids + 10_000)
    assert state(model) == before
    with attnscope.watch(model) as scope:
        model(ids)
    assert scope.received(0).shape == (B, 4, N)


def test_a_pass_that_breaks_off_leaves_nothing_to_read() -> None:
    model = build("qwen2")
    with attnscope.watch(model) as scope:
        model(tokens())
        hook = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens())
        hook.remove()
        with raises(ScopeError, "pass-unfinished"):
            scope.received(0)


@pytest.mark.parametrize("name", ["bert", "qwen2"])
def test_a_watched_model_can_be_forgotten(name: str) -> None:
    model = build(name)
    with attnscope.watch(model):
        model(tokens())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_caches_do_not_pile_up() -> None:
    model, caches = build("qwen2"), []
    with attnscope.watch(model):
        for _ in range(3):
            past = hf.DynamicCache(config=model.config)
            caches.append(weakref.ref(past))
            model(tokens(), past_key_values=past)
            del past
        gc.collect()
        assert sum(cache() is not None for cache in caches) == 1


# --- which queries, which layers -----------------------------------------------------------------


@torch.no_grad()
def test_last_and_mask_on_a_padded_batch() -> None:
    model, ids = build("qwen2"), tokens()
    real = torch.ones_like(ids)
    real[1, -5:] = 0
    rows = real.bool()
    weights = eager_weights("qwen2", ids, attention_mask=real)
    last = torch.zeros_like(rows)
    last[0, N - 1] = last[1, N - 6] = True
    some = torch.rand(B, N) < 0.4
    some[:, 3] = True
    for queries, counted in (("last", last), (some, some & rows), (~some, ~some & rows)):
        with attnscope.watch(model, queries=queries) as scope:
            model(ids, attention_mask=real)
        oracle.compare(scope, weights, rows, counted, 1e-5)


@torch.no_grad()
def test_layers_restrict() -> None:
    model, ids = build("qwen2"), tokens()
    with attnscope.watch(model) as everything:
        model(ids)
    with attnscope.watch(model, layers=[2, 0]) as some:
        model(ids)
    assert some.layers == [0, 2]
    assert torch.equal(some.received(2), everything.received(2))
    with raises(InputError, "unknown-layer", value=1, known=[0, 2]):
        some.received(1)


@torch.no_grad()
def test_a_new_sequence_forgets_the_one_before() -> None:
    model, first, second = build("qwen2"), tokens(), tokens(3, 9)
    with attnscope.watch(model) as alone:
        model(second)
    with attnscope.watch(model) as scope:
        model(first)
        model(second)
    assert torch.equal(scope.received(1), alone.received(1))


@torch.no_grad()
def test_classes_mass_lift_and_flow() -> None:
    model, ids = build("qwen2"), tokens()
    classes = torch.randint(-1, 3, (B, N))
    weights = eager_weights("qwen2", ids)
    with attnscope.watch(model, classes=classes) as scope:
        model(ids)
    counted = np.ones(N, dtype=bool)
    for layer, A in weights.items():
        for b in range(B):
            for h in range(4):
                dense, kinds = A[b, h].double().numpy(), classes[b].numpy()
                got = scope.mass(layer, classes, 3)[b, h].numpy()
                np.testing.assert_allclose(
                    got, oracle.mass(dense, counted, kinds, 3), rtol=0, atol=1e-5
                )
                np.testing.assert_allclose(
                    scope.flow(layer)[b, h].numpy(),
                    oracle.flow(dense, counted, kinds, 3),
                    rtol=0,
                    atol=1e-5,
                )
                even = np.tril(np.ones((N, N))) / np.arange(1, N + 1)[:, None]
                np.testing.assert_allclose(
                    scope.lift(layer, classes, 3)[b, h].numpy(),
                    got / oracle.mass(even, counted, kinds, 3),
                    rtol=1e-4,
                )


@pytest.mark.slow
def test_sampling_is_unbiased_and_knows_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnscope.scope import query_selection

    monkeypatch.setattr(query_selection, "NEAR", 16)
    model, ids = build("qwen2"), tokens(1, 600)
    with torch.no_grad():
        with attnscope.watch(model) as exact:
            model(ids)
        classes = torch.arange(600)[None] // 150
        average, mass = exact.average(1), exact.mass(1, classes, 4)
        estimates, errors, inside, entropy = [], [], [], []
        averages, masses = [], []
        for seed in range(60):
            with attnscope.watch(model, queries="sample:100", seed=seed) as scope:
                model(ids)
            off = scope.received(1) - exact.received(1)
            estimates.append(off)
            errors.append(scope.received_error(1))
            inside.append((off.abs() <= 3 * errors[-1] + 1e-4).float().mean().item())
            entropy.append((scope.entropy(1) - exact.entropy(1)) / scope.entropy_error(1))
            off = (scope.average(1) - average)[..., :-1]
            averages.append(off.abs() <= 3 * scope.average_error(1)[..., :-1] + 1e-5)
            off = scope.mass(1, classes, 4) - mass
            masses.append(off.abs() <= scope.mass_error(1, classes, 4) + 1e-5)
    bias = torch.stack(estimates).mean(0)
    spread = torch.stack(estimates).std(0)
    # The mean of 60 draws of each key lies within 4.5 of its own standard errors of 0.
    assert (bias.abs() <= 4.5 * spread / 60**0.5 + 1e-4).float().mean() > 0.995
    assert np.mean(inside) > 0.98
    assert torch.stack(averages).float().mean() > 0.98
    # An upper bound: of an exact standard error a third would lie outside.
    assert torch.stack(masses).float().mean() > 0.95
    assert scope.mass_error(1, classes, 4).max() < 0.2
    assert not exact.average_error(1)[..., :-1].any()
    assert not exact.mass_error(1, classes, 4).any()
    z = torch.stack(entropy)
    assert z.abs().mean() < 1.3
    assert z.mean().abs() < 0.5
    torch.testing.assert_close(scope.eligible(1), exact.eligible(1))
    assert torch.equal(scope.count(1), exact.count(1))


def test_a_small_text_is_counted_not_sampled() -> None:
    model, ids = build("qwen2"), tokens()
    with attnscope.watch(model, queries="sample:64") as scope:
        model(ids)
    with attnscope.watch(model) as exact:
        model(ids)
    assert torch.equal(scope.received(0), exact.received(0))
    assert not scope.received_error(0).any()


# --- backends, dtypes, gradients -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma2", "gpt-oss", "bert"])
@pytest.mark.parametrize("backend", ["reference", "triton", "eager-fallback"])
@torch.no_grad()
def test_backends_agree(backend: str, name: str) -> None:
    model, ids = build(name), tokens()
    real = torch.ones_like(ids)
    real[0, :4] = 0
    with attnscope.watch(model) as streamed:
        model(ids, attention_mask=real)
    with attnscope.watch(model, backend=backend) as scope:
        model(ids, attention_mask=real)
    assert scope.backend == backend
    for layer in scope.layers:
        for what in (
            "received",
            "average",
            "entropy",
            "self_mass",
            "distance",
            "learned_sink_mass",
        ):
            torch.testing.assert_close(
                getattr(scope, what)(layer),
                getattr(streamed, what)(layer),
                rtol=1e-5,
                atol=1e-5,
                equal_nan=True,
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_dtypes(dtype: torch.dtype) -> None:
    model, ids = build("qwen2").to(dtype), tokens()
    plain = model(ids).logits
    with attnscope.watch(model) as scope:
        assert torch.equal(model(ids).logits, plain)
    with attnscope.watch(model, backend="reference") as exact:
        model(ids)
    assert scope.received(0).dtype == torch.float32
    # In 16 bits torch's CPU attention takes a quick exponential: its log-sum-exp is good to 1e-4.
    close = 1e-5 if dtype == torch.float64 else 2e-4
    for layer in scope.layers:
        torch.testing.assert_close(
            scope.received(layer), exact.received(layer), rtol=close, atol=1e-6
        )


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma2", "gpt-oss", "falcon", "gptj"])
def test_gradients_flow_as_without_us(name: str) -> None:
    model, ids = build(name), tokens()

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(ids).logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    plain = gradient()
    with attnscope.watch(model) as scope:
        watched = gradient()
    torch.testing.assert_close(watched, plain, rtol=1e-3, atol=1e-6)
    assert not scope.received(0).requires_grad


def test_gradient_checkpointing_counts_once() -> None:
    model, ids = build("qwen2"), tokens()
    with attnscope.watch(model) as scope:
        model(ids)
    wanted = scope.received(1)
    model.train()
    model.gradient_checkpointing_enable()
    with attnscope.watch(model) as scope:
        model(ids, use_cache=False).logits.mean().backward()
    torch.testing.assert_close(scope.received(1), wanted, rtol=0, atol=1e-5)


def test_dropout_in_training() -> None:
    model, ids = build("qwen2"), tokens()
    with attnscope.watch(model) as calm:
        model(ids)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with attnscope.watch(model) as scope:
        model(ids)
    # The weights are those before dropout, in the first layer the same as without it.
    torch.testing.assert_close(scope.received(0), calm.received(0), rtol=0, atol=1e-5)


@torch.no_grad()
def test_weights_kept_on_another_device() -> None:
    """As with `device_map`: accelerate's hooks move weights, inputs and masks around."""
    from accelerate import cpu_offload

    ids, real = tokens(), torch.ones(B, N, dtype=torch.long)
    real[0, :3] = 0
    model = build("gemma3")
    with attnscope.watch(model) as whole_scope:
        model(ids, attention_mask=real)
    spread = cpu_offload(build("gemma3"), execution_device=torch.device("cpu"))
    with attnscope.watch(spread) as scope:
        spread(ids, attention_mask=real)
    for layer in scope.layers:
        assert torch.equal(scope.received(layer), whole_scope.received(layer))


@torch.no_grad()
def test_a_model_spread_over_memory_and_disk(tmp_path: Path) -> None:
    """As `device_map="auto"` lays out what is larger than the memory: some layers are there, some
    come from a disk for as long as they are needed."""
    from accelerate import dispatch_model

    ids, real = tokens(), torch.ones(B, N, dtype=torch.long)
    real[0, :3] = 0
    model = build("qwen2")
    with attnscope.watch(model) as whole:
        wanted = model(ids, attention_mask=real).logits
    places = {f"model.layers.{n}": ("cpu", "disk")[n % 2] for n in range(len(model.model.layers))}
    rest = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    spread = dispatch_model(
        build("qwen2"), {**places, **dict.fromkeys(rest, "cpu")}, "cpu", offload_dir=tmp_path
    )
    assert {p.device.type for p in spread.parameters()} == {"cpu", "meta"}
    with attnscope.watch(spread) as scope:
        logits = spread(ids, attention_mask=real).logits
    assert torch.equal(logits, wanted)
    assert scope.layers == whole.layers
    for layer in scope.layers:
        assert torch.equal(scope.received(layer), whole.received(layer))
        assert torch.equal(scope.entropy(layer), whole.entropy(layer))


def tagged(batch: int, length: int, **more: Any) -> masks.MaskTensor:
    size = {"batch_size": batch, "q_length": length, "kv_length": length}
    return masks.build_tagged_mask(masking_utils.sdpa_mask, "sdpa", **size, **more)


@pytest.mark.parametrize("name", ["qwen2", "gpt-oss", "gptj"])
@torch.no_grad()
def test_a_device_without_float64(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What it computed is measured on the CPU (here it is there already: nothing may be lost), and
    at once: no fused operator returns the log-sum-exp there."""
    model, ids = build(name), torch.randint(5, 50, (2, 9))
    real = torch.ones_like(ids)
    real[0, :3] = 0
    with attnscope.watch(model, keep=True) as wanted:
        model(ids, attention_mask=real)
    moved = []
    honest = CapturedCall.on_cpu
    monkeypatch.setattr(
        CapturedCall, "on_cpu", lambda seen: moved.append(honest(seen)) or moved[-1]
    )
    monkeypatch.setattr(watch_hook, "WITHOUT_FLOAT64", {"cpu"})
    with watching(model, keep=True, share=0) as scope:
        model(ids, attention_mask=real)
    assert len(moved) == len(scope.layers)
    for layer in scope.layers:
        close = {"rtol": 0, "atol": 1e-6, "equal_nan": True}
        torch.testing.assert_close(scope.average(layer), wanted.average(layer), **close)
        torch.testing.assert_close(scope.entropy(layer), wanted.entropy(layer), **close)
        torch.testing.assert_close(
            scope.largest(layer, 2).weight, wanted.largest(layer, 2).weight, **close
        )


def test_a_mask_moved_or_copied_keeps_its_geometry() -> None:
    mask = tagged(2, 5, attention_mask=torch.ones(2, 5, dtype=torch.bool))
    for moved in (mask.to("cpu", torch.bool), mask.clone(), mask.contiguous(), mask.detach()):
        assert isinstance(moved, masks.MaskTensor)
        assert moved.geometry is mask.geometry


def test_other_operations_use_the_dense_mask_of_transformers() -> None:
    real = torch.ones(2, 5, dtype=torch.bool)
    real[0, :2] = False
    mask = tagged(2, 5, attention_mask=real)
    plain = masking_utils.sdpa_mask(
        batch_size=2, q_length=5, kv_length=5, attention_mask=real, allow_is_causal_skip=False
    )
    assert (mask.shape, mask.ndim, mask.dtype, mask.size(2)) == (plain.shape, 4, torch.bool, 5)
    assert not isinstance(mask[:, :, :, :3], masks.MaskTensor)
    assert torch.equal(mask[:, :, :, :3], plain[:, :, :, :3])
    assert torch.equal(mask & plain, plain)
    assert torch.equal(mask.to(torch.float32), plain.float())
    q = torch.randn(2, 1, 5, 4)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attention(q, q, q, attn_mask=mask), attention(q, q, q, attn_mask=plain))


# --- masks ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_packed_sequences() -> None:
    model = build("qwen2")
    ids = tokens(1, 12)
    positions = torch.tensor([[*range(5), *range(7)]])
    weights = eager_weights("qwen2", ids, position_ids=positions, use_cache=False)
    with attnscope.watch(model) as scope:
        model(ids, position_ids=positions, use_cache=False)
    rows = torch.ones(1, 12, dtype=torch.bool)
    oracle.compare(scope, weights, rows, rows, 1e-5)
    assert scope.eligible(0)[0, 4] == 1  # the second sequence does not see the first


@torch.no_grad()
def test_padding_in_the_middle() -> None:
    model, ids = build("qwen2"), tokens()
    real = torch.ones_like(ids)
    real[0, 5:8] = 0
    weights = eager_weights("qwen2", ids, attention_mask=real)
    with attnscope.watch(model) as scope:
        model(ids, attention_mask=real)
    oracle.compare(scope, weights, real.bool(), real.bool(), 1e-5)


@torch.no_grad()
def test_a_mask_of_the_users_own() -> None:
    model, ids = build("qwen2"), tokens()
    own = torch.ones(N, N, dtype=torch.bool).tril().triu(-3)[None, None].expand(B, 1, N, N)
    additive = torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)
    weights = eager_weights("qwen2", ids, attention_mask=additive)
    rows = torch.ones(B, N, dtype=torch.bool)
    for mask in (own, additive):
        with attnscope.watch(model) as scope:
            model(ids, attention_mask=mask)
        oracle.compare(scope, weights, rows, rows, 1e-5)
    gappy = own.clone()
    gappy[:, :, 9, 8] = False
    plain = model(ids, attention_mask=gappy).logits
    weights = eager_weights(
        "qwen2", ids, attention_mask=additive.masked_fill(~gappy, torch.finfo(torch.float32).min)
    )
    with attnscope.watch(model) as scope:
        assert torch.equal(model(ids, attention_mask=gappy).logits, plain)
    assert scope.backend == "eager-fallback"
    oracle.compare(scope, weights, rows, rows, 1e-5)


@torch.no_grad()
def test_unknown_mask_functions_are_evaluated() -> None:
    def every_third_start(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return k >= (q // 3) * 3

    known = masking_utils.and_masks(masking_utils.causal_mask_function, every_third_start)
    mask = tagged(1, 9, mask_function=known)
    start, stop = mask.geometry.visible_ranges
    assert start[0].tolist() == [0, 0, 0, 3, 3, 3, 6, 6, 6]
    assert stop[0].tolist() == list(range(1, 10))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_caches_and_chunked_prefill(cache: str) -> None:
    model, ids = build("mistral" if cache == "dynamic" else "qwen2"), tokens(1, 20)
    name = "mistral" if cache == "dynamic" else "qwen2"
    past = (
        hf.DynamicCache(config=model.config)
        if cache == "dynamic"
        else hf.StaticCache(config=model.config, max_cache_len=32)
    )
    with attnscope.watch(model) as scope:
        for part in ids.split([7, 6, 1, 6], dim=1):
            model(part, past_key_values=past)
    rows = torch.ones(1, 20, dtype=torch.bool)
    oracle.compare(scope, eager_weights(name, ids), rows, rows, 1e-5)


@torch.no_grad()
def test_generation_with_a_static_cache() -> None:
    model, ids = build("qwen2"), tokens()
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with attnscope.watch(model, queries="generated") as dynamic:
        model.generate(ids, **settings)
    with attnscope.watch(model, queries="generated") as static:
        model.generate(ids, cache_implementation="static", **settings)
    torch.testing.assert_close(static.received(1), dynamic.received(1), rtol=0, atol=1e-5)


# --- bad input: an error of ours, never a wrong number -------------------------------------------


@pytest.mark.parametrize("layers", [[3], [-1], ["0"], [True], 7])
def test_layer_out_of_range(layers: Any) -> None:
    with raises(InputError, "unknown-layer", known=[0, 1, 2]):
        attnscope.watch(build("qwen2"), layers=layers)


def test_layers_of_a_hybrid_are_its_own() -> None:
    model = build("qwen3-next")
    with raises(InputError, "unknown-layer", value=0, known=[1, 3]):
        attnscope.watch(model, layers=[0])


@pytest.mark.parametrize(
    ("queries", "got"),
    [
        (torch.ones(2, 5), "float32 [2, 5]"),
        (torch.ones(5, dtype=torch.bool), "bool [5]"),
    ],
)
def test_bad_query_mask(queries: torch.Tensor, got: str) -> None:
    with raises(InputError, "wrong-shape", argument="queries", got=got):
        attnscope.watch(build("qwen2"), queries=queries)


@pytest.mark.parametrize("queries", ["most", "sample:x", "sample:2", None])
def test_bad_queries(queries: Any) -> None:
    with pytest.raises(InputError):
        attnscope.watch(build("qwen2"), queries=queries)


def test_query_mask_of_the_wrong_size() -> None:
    model = build("qwen2")
    mask = torch.ones(B, N - 1, dtype=torch.bool)
    wrong = raises(InputError, "wrong-shape", argument="queries", got=f"bool {[B, N - 1]}")
    with wrong, attnscope.watch(model, queries=mask):
        model(tokens())


def test_query_mask_wider_than_the_text() -> None:
    model = build("qwen2")
    with attnscope.watch(model, queries=torch.ones(B, N + 1, dtype=torch.bool)) as scope:
        model(tokens())
    with raises(InputError, "wrong-shape", argument="queries", got=f"bool {[B, N + 1]}"):
        scope.received(0)


def test_unknown_backend() -> None:
    with raises(InputError, "unknown-backend", value="cuda"):
        attnscope.watch(build("qwen2"), backend="cuda")


def test_triton_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError):
        attnscope.watch(build("qwen2"), backend="triton")


def test_reading_too_early() -> None:
    early = raises(ScopeError, "no-forward-pass")
    with attnscope.watch(build("qwen2")) as scope, early:
        scope.received(0)


def test_no_generated_tokens() -> None:
    model = build("qwen2")
    with attnscope.watch(model, queries="generated") as scope:
        model(tokens())
        with raises(ScopeError, "no-query-counted", queries="generated"):
            scope.received(0)


@pytest.mark.parametrize("kind", ["mamba", "rwkv"])
def test_a_model_without_attention(kind: str) -> None:
    if kind == "mamba":
        config = hf.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, state_size=4)
        with raises(ModelError, "no-attention"):
            attnscope.watch(hf.MambaForCausalLM(config))
    else:  # named attention, and yet there are no weights
        config = hf.RwkvConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2)
        model = hf.RwkvForCausalLM(config).eval()
        with raises(ModelError, "no-attention"), attnscope.watch(model):
            model(tokens())


def test_not_a_transformers_model() -> None:
    with raises(ModelError, "not-a-transformers-model", model="Linear"):
        attnscope.watch(torch.nn.Linear(2, 2))


def test_a_shuffled_cache_is_refused_and_then_released() -> None:
    model = build("qwen2")
    with attnscope.watch(model):
        past = model(tokens(), use_cache=True).past_key_values
        model(tokens(B, 1), past_key_values=past)
        with raises(ScopeError, "cache-changed", method="reorder_cache"):
            past.reorder_cache(torch.tensor([1, 0]))
    past.reorder_cache(torch.tensor([1, 0]))
    out = model.generate(tokens(), num_beams=2, max_new_tokens=4, pad_token_id=0)
    assert out.shape[1] == N + 4


def test_a_cache_from_before_the_block() -> None:
    model = build("qwen2")
    past = model(tokens(), use_cache=True).past_key_values
    with raises(ScopeError, "cache-from-before"), attnscope.watch(model):
        model(tokens(B, 1), past_key_values=past)


@pytest.mark.parametrize(
    ("classes", "code", "value"),
    [
        (torch.zeros(B, N - 1, dtype=torch.int64), "wrong-shape", None),
        (torch.zeros(B, N), "wrong-shape", None),
        (torch.full((B, N), 2), "out-of-range", [2, 2]),
        (torch.full((B, N), -2), "out-of-range", [-2, -2]),
    ],
)
def test_bad_class_ids(classes: torch.Tensor, code: str, value: list[int] | None) -> None:
    model = build("qwen2")
    with attnscope.watch(model) as scope:
        model(tokens())
    with raises(InputError, code, argument="class_ids", value=value):
        scope.mass(0, classes, 2)


def test_flow_must_be_asked_for() -> None:
    model = build("qwen2")
    with attnscope.watch(model) as scope:
        model(tokens())
    with raises(ScopeError, "no-classes"):
        scope.flow(0)


@pytest.mark.parametrize("backend", ["streaming", "reference"])
def test_conservation_is_checked(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """A kernel that loses a little attention is caught in the very pass."""
    from dataclasses import replace

    honest = reduce.kernels.kernel

    def lossy(name: str) -> Any:
        def reduce(rows: Any) -> Any:
            totals = honest(name)(rows)
            return replace(totals, mass=totals.mass * (1 - 5e-4))

        return reduce

    model = build("qwen2")
    monkeypatch.setattr(reduce.kernels, "kernel", lossy)
    caught = raises(ConservationError, "conservation", layer=0)
    with caught, attnscope.watch(model, backend=backend):
        model(tokens())


def test_no_warnings_where_there_is_nothing_to_warn_of() -> None:
    model = build("gemma3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attnscope.watch(model):
            model(tokens())


@torch.no_grad()
def test_measures_of_answers_are_not_offered_for_a_scope() -> None:
    model = build("qwen2")
    with attnscope.watch(model, keep=True) as scope:
        model(tokens())
    for read in (scope.measure, lambda name, layer: scope.to_frame(measures=[name])):
        with pytest.raises(InputError) as error:
            read("lookback", 0)
        assert error.value.code == "unknown-measure"
        assert "lookback" not in error.value.values["known"]
        assert "entropy" in error.value.values["known"]


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@torch.no_grad()
def test_full_weights_of_a_cache_that_dropped_keys(name: str) -> None:
    """Their first key is not the first token of the text."""
    model, ids = build(name), torch.randint(5, VOCABULARY, (B, N))
    scopes = []
    for backend in ("streaming", "eager-fallback"):
        with attnscope.watch(model, backend=backend, keep=True) as scope:
            more = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}
            model.generate(ids, attention_mask=torch.ones_like(ids), **more)
        scopes.append(scope)
    streamed, dense = scopes
    assert dense.backend == "eager-fallback"
    for layer in streamed.layers:
        for what in ("received", "average", "distance"):
            one, other = getattr(streamed, what)(layer), getattr(dense, what)(layer)
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5, equal_nan=True)
        assert torch.equal(streamed.largest(layer).key, dense.largest(layer).key)
