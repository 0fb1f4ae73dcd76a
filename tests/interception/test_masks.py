"""Masks of any form are applied as the model applies them, or refused with an error."""

from typing import Any

import pytest
import torch
import transformers as hf
from transformers import masking_utils

import attnscope
import oracle
from attnscope.errors import ModelError
from attnscope.interception import mask_functions
from families import VOCABULARY, build
from support_errors import raises

B, N = 2, 17
ROWS = torch.ones(B, N, dtype=torch.bool)
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()


def tokens() -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (B, N))


def additive(hidden: float, soft: torch.Tensor | None = None) -> torch.Tensor:
    """A causal mask: `hidden` at future keys, `soft` elsewhere."""
    mask = torch.zeros(B, 1, N, N) if soft is None else soft.expand(B, -1, N, N).clone()
    return mask.masked_fill(~CAUSAL, hidden)


def check(model: Any, ids: torch.Tensor, mask: torch.Tensor, backend: str) -> None:
    """Compare the output with an unwatched pass, and the sums with eager attention."""
    plain = model(ids, attention_mask=mask).logits
    with attnscope.watch(model) as scope:
        watched = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(watched, plain, rtol=0, atol=2e-5)
    assert scope.backend == backend
    eager = build("qwen2", "eager")(ids, attention_mask=mask, output_attentions=True)
    for layer, weights in enumerate(eager.attentions):
        wanted = weights.double().sum(2).float()
        torch.testing.assert_close(scope.received(layer), wanted, rtol=0, atol=2e-5)
        assert torch.equal(scope.eligible(layer)[0], torch.arange(N, 0, -1).float())


@pytest.mark.parametrize("hidden", [-1e9, -1e30, -torch.inf, torch.finfo(torch.float32).min])
@torch.no_grad()
def test_a_finite_mask_hides(hidden: float) -> None:
    check(build("qwen2"), tokens(), additive(hidden), "streaming")


@torch.no_grad()
def test_a_mask_value_that_a_score_can_outweigh_is_added_unchanged() -> None:
    """-1e4 hides a key, unless its score is tens of thousands."""
    check(build("qwen2"), tokens(), additive(-1e4), "eager-fallback")
    model = build("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.mul_(0).add_(300)
            layer.self_attn.q_proj.bias.mul_(0).add_(-300)
    ids = tokens()
    plain = model(ids, attention_mask=additive(-1e4)).logits
    with attnscope.watch(model):
        assert torch.equal(model(ids, attention_mask=additive(-1e4)).logits, plain)


@pytest.mark.parametrize("heads", [1, 4])
@torch.no_grad()
def test_a_bias_for_every_key_is_streamed(heads: int) -> None:
    check(build("qwen2"), tokens(), additive(-1e9, torch.randn(B, heads, 1, N)), "streaming")


@pytest.mark.parametrize("heads", [1, 4])
@torch.no_grad()
def test_a_bias_by_distance_is_streamed(heads: int) -> None:
    back = (torch.arange(N)[:, None] - torch.arange(N)).abs()
    table = torch.randn(heads, N)
    check(build("qwen2"), tokens(), additive(-torch.inf, table[None, :, back]), "streaming")


def one_sided() -> torch.Tensor:
    """A text padded on the left, and one on the right."""
    real = torch.ones(B, N, dtype=torch.long)
    real[0, :4] = real[1, N - 5 :] = 0
    return real


@torch.no_grad()
def test_alibi_under_padding_is_streamed() -> None:
    """The bias is a slope per head times the position, counted from the first real token."""
    real = one_sided()
    position = ((real.cumsum(1) - 1) * real)[:, None, None].float()
    slopes = 2.0 ** -torch.arange(1, 5).float()
    mask = (slopes[:, None, None] * position).expand(B, 4, N, N)
    both = real[:, None, None].bool() & real[:, None, :, None].bool()  # padding sees nothing
    mask = mask.masked_fill(~(CAUSAL & both), torch.finfo(torch.float32).min)
    model, eager, ids = build("qwen2"), build("qwen2", "eager"), tokens()
    plain = model(ids, attention_mask=mask).logits
    with attnscope.watch(model) as scope:
        watched = model(ids, attention_mask=mask).logits
    rows = real.bool()
    assert scope.backend == "streaming"
    torch.testing.assert_close(watched[rows], plain[rows], rtol=0, atol=2e-5)
    weights = eager(ids, attention_mask=mask, output_attentions=True).attentions
    for layer, A in enumerate(weights):
        wanted = (A.double() * both).sum(2).float()
        torch.testing.assert_close(scope.received(layer), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("steps", [0, 4])
@torch.no_grad()
def test_falcon_with_alibi_is_streamed(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Falcon calls sdpa directly, with a mask that holds the biases of every head."""
    model, ids, real = build("falcon with alibi"), tokens(), one_sided()
    if steps:
        real[1] = 1
    seen: list[torch.Tensor] = []
    honest = torch.nn.functional.scaled_dot_product_attention

    def spied(q: Any, k: Any, v: Any, attn_mask: Any, **more: Any) -> Any:
        scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5 + attn_mask.double()
        seen.append(scores.softmax(-1))
        return honest(q, k, v, attn_mask=attn_mask, **more)

    def run() -> torch.Tensor:
        if not steps:
            return model(ids, attention_mask=real).logits[real.bool()]
        how = {"max_new_tokens": steps + 1, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, attention_mask=real, **how)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
        plain = run()
    with attnscope.watch(model) as scope:
        watched = run()
    assert scope.backend == "streaming"
    torch.testing.assert_close(watched, plain, rtol=0, atol=2e-5)
    total = N + steps
    rows = torch.cat([real, torch.ones(B, steps, dtype=torch.long)], 1)[:, None].double()
    for layer in scope.layers:
        wanted = torch.zeros(B, 4, total, dtype=torch.float64)
        for A in seen[layer :: len(scope.layers)]:
            here = rows[..., A.shape[3] - A.shape[2] : A.shape[3]]
            wanted[..., : A.shape[3]] += (A * here[..., None]).sum(2) * rows[..., : A.shape[3]]
        torch.testing.assert_close(scope.received(layer), wanted.float(), rtol=0, atol=2e-5)


@torch.no_grad()
def test_any_other_bias_goes_to_the_fallback() -> None:
    check(build("qwen2"), tokens(), additive(-1e9, torch.randn(B, 1, N, N)), "eager-fallback")
    check(build("qwen2"), tokens(), additive(-1e9, torch.randn(B, 4, N, N)), "eager-fallback")


@torch.no_grad()
def test_a_soft_mask_in_layers_that_are_not_measured() -> None:
    """A layer that is not measured runs unchanged."""
    model, ids, mask = build("qwen2"), tokens(), additive(-1e9, torch.randn(B, 1, N, N))
    plain = model(ids, attention_mask=mask).logits
    with attnscope.watch(model, layers=[1]):
        assert torch.equal(model(ids, attention_mask=mask).logits, plain)


@torch.no_grad()
def test_the_key_of_a_query_that_sees_nothing_is_visible_to_others() -> None:
    model, ids, mask = build("qwen2"), tokens(), additive(-torch.inf)
    mask[:, :, 5] = -torch.inf
    with attnscope.watch(model, layers=[0]) as scope:
        model(ids, attention_mask=mask)
    assert scope.count(0).tolist() == [N - 1] * B
    assert scope.eligible(0)[0, 5] == N - 6
    assert (scope.received(0)[..., 5] > 0).all()


@torch.no_grad()
def test_a_custom_mask_with_a_static_cache() -> None:
    model, ids, length = build("qwen2"), tokens(), 32
    past = hf.StaticCache(config=model.config, max_cache_len=length)
    seen = torch.ones(N, length, dtype=torch.bool).tril()[None, None].expand(B, 1, -1, -1)
    with attnscope.watch(model) as scope:
        model(ids, attention_mask=seen, past_key_values=past)
    with attnscope.watch(model) as wanted:
        model(ids)
    torch.testing.assert_close(scope.received(1), wanted.received(1), rtol=0, atol=1e-5)


# --- attention that is sparse by index ------------------------------------------------------------


def deepseek(implementation: str) -> Any:
    config = hf.DeepseekV32Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=48, moe_intermediate_size=16, q_lora_rank=12,
        kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=6, n_group=1,
        topk_group=1, n_routed_experts=4, num_experts_per_tok=2, index_topk=5, index_n_heads=4,
        index_head_dim=8, max_position_embeddings=64, pad_token_id=0,
        attn_implementation=implementation,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.DeepseekV32ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_index_sparse_attention_stays_sparse(implementation: str) -> None:
    model, ids = deepseek(implementation), tokens()
    real = torch.ones_like(ids)
    real[0, :4] = 0
    plain = model(ids, attention_mask=real).logits
    with attnscope.watch(model) as scope:
        assert torch.equal(model(ids, attention_mask=real).logits, plain)
    assert scope.backend == "eager-fallback"
    eager = deepseek("eager")(ids, attention_mask=real, output_attentions=True)
    for layer, weights in enumerate(eager.attentions):
        assert int((weights[1, 0] > 0).sum(-1).max()) == 5
        A = weights.double() * real[:, None, :, None] * real[:, None, None]
        torch.testing.assert_close(scope.received(layer).double(), A.sum(2), rtol=0, atol=1e-5)
        eligible = (A[:, 0] > 0).sum(1).float()
        assert torch.equal(scope.eligible(layer), eligible)


# --- arguments, outputs, versions -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("qwen2", "sdpa"), ("qwen2", "eager"), ("falcon", "eager"), ("gpt-oss", "eager")],
)
@torch.no_grad()
def test_requested_weights_are_returned(name: str, implementation: str) -> None:
    """As in an unwatched pass: eager attention returns weights, sdpa returns none."""
    model, ids = build(name, implementation), tokens()
    plain = model(ids, output_attentions=True).attentions
    with attnscope.watch(model) as scope:
        watched = model(ids, output_attentions=True).attentions
    assert len(watched) == len(plain)
    for ours, theirs in zip(watched, plain, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert scope.received(0).shape == (B, 4, N)


@torch.no_grad()
def test_an_unsupported_argument_that_the_function_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own function computes the weights."""
    from transformers.models.qwen2 import modeling_qwen2

    honest = modeling_qwen2.eager_attention_forward

    def tempered(*args: Any, temperature: float | None = None, **kwargs: Any) -> Any:
        scaling = kwargs.pop("scaling")
        return honest(*args, scaling=scaling * (temperature or 1.0), **kwargs)

    monkeypatch.setattr(modeling_qwen2, "eager_attention_forward", tempered)
    model, ids = build("qwen2", "eager"), tokens()
    plain = model(ids, temperature=0.1, output_attentions=True)
    with attnscope.watch(model) as scope:
        watched = model(ids, temperature=0.1)
    assert torch.equal(watched.logits, plain.logits)
    assert scope.backend == "eager-fallback"
    oracle.compare(scope, dict(enumerate(plain.attentions)), ROWS, ROWS, 1e-5)
    with attnscope.watch(model) as scope:
        model(ids)
    assert scope.backend == "streaming"


@torch.no_grad()
def test_eager_attention_that_does_not_match_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of eager attention deviates, so eager attention computes all the weights."""
    from transformers.models.qwen2 import modeling_qwen2

    honest = modeling_qwen2.eager_attention_forward

    def other(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return honest(module, query * 0.7, *args, **kwargs)

    monkeypatch.setattr(modeling_qwen2, "eager_attention_forward", other)
    model, ids = build("qwen2", "eager"), tokens()
    plain = model(ids, output_attentions=True)
    with attnscope.watch(model) as scope:
        assert torch.equal(model(ids).logits, plain.logits)
    assert scope.backend == "eager-fallback"
    oracle.compare(scope, dict(enumerate(plain.attentions)), ROWS, ROWS, 1e-5)


@torch.no_grad()
def test_a_custom_attention_function_is_refused() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def mine(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    hf.AttentionInterface.register("mine", mine)
    try:
        model = build("qwen2", "mine")
        refused = raises(ModelError, "foreign-attention-function", implementation="mine")
        with refused, attnscope.watch(model):
            model(tokens())
    finally:
        del hf.AttentionInterface._global_mapping["mine"]


@torch.no_grad()
def test_an_unsupported_argument_that_the_function_ignores() -> None:
    model, ids = build("qwen2"), tokens()
    with attnscope.watch(model) as scope:
        model(ids, mood="sunny")
    assert scope.backend == "streaming"


@torch.no_grad()
def test_a_mask_of_a_wrong_shape_is_refused() -> None:
    model = build("qwen2")
    refused = raises(ModelError, "unsupported-mask", mask=(2, 1, 3, 17), call=(N, N))
    with refused, attnscope.watch(model):
        model(tokens(), attention_mask=torch.zeros(B, 1, 3, N))


@pytest.mark.parametrize("change", ["gone", "renamed"])
@torch.no_grad()
def test_another_version_of_the_mask_builders(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """transformers evaluates a builder that is missing or different; the sums are the same."""

    def sliding_window_overlay(window: int) -> Any:
        def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
            return kv_idx > q_idx - window

        return inner_mask

    model, ids = build("mistral"), tokens()
    with attnscope.watch(model) as wanted:
        model(ids)
    mask_functions._builders.cache_clear()
    if change == "gone":
        monkeypatch.delattr(masking_utils, "chunked_overlay")
    else:
        monkeypatch.setattr(masking_utils, "sliding_window_overlay", sliding_window_overlay)
    try:
        with attnscope.watch(model) as scope:
            model(ids)
    finally:
        mask_functions._builders.cache_clear()
    torch.testing.assert_close(scope.received(1), wanted.received(1), rtol=0, atol=1e-6)
    assert torch.equal(scope.eligible(1), wanted.eligible(1))


@torch.no_grad()
def test_a_key_whose_weight_rounds_to_zero_is_visible() -> None:
    """With large scores, some visible keys receive exactly 0 from every head and query."""
    model, ids = build("bloom"), tokens()
    for block in model.transformer.h:
        block.self_attention.beta = 1.0
        block.self_attention.inv_norm_factor = 60.0
    with attnscope.watch(model) as scope:
        model(ids)
    assert any(bool((scope.received(layer) == 0).any()) for layer in scope.layers)
    for layer in scope.layers:
        assert torch.equal(scope.eligible(layer)[0], torch.arange(N, 0, -1).float())
