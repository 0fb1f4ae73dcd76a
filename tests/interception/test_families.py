"""Compares every supported family with its own eager attention."""

import inspect
from typing import Any

import pytest
import torch
import transformers as hf

import attnscope
import oracle
from families import ENCODERS, FALLBACK, FAMILIES, NO_SDPA, VOCABULARY, build

B, N = 3, 19
TOLERANCE = 1e-5


def batch(padding: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(5, VOCABULARY, (B, N))
    real = torch.ones(B, N, dtype=torch.long)
    for row, size in ((1, 4), (2, 9)):
        if padding == "left":
            real[row, :size] = 0
        if padding == "right":
            real[row, N - size :] = 0
    return ids, real


def logits(output: Any) -> torch.Tensor:
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def dense(
    name: str, ids: torch.Tensor, real: torch.Tensor, layers: list[int], *, generated: bool = False
) -> dict[int, Any]:
    """Weights of the same model, run eager by transformers alone."""
    model = build(name, "eager")
    more = {}
    if generated and "position_ids" in inspect.signature(model.forward).parameters:
        # `generate` counts positions from the first real token, a plain call from the padding.
        more["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
    out = model(ids, attention_mask=real, output_attentions=True, **more)
    weights = [a for a in out.attentions if a is not None]
    assert len(weights) == len(layers)
    return dict(zip(layers, weights, strict=True))


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_one_forward_pass(name: str, padding: str | None) -> None:
    # Stock transformers adds ALiBi twice in Falcon's eager attention: compare like with like.
    model = build(name, "eager" if "alibi" in name else None)
    ids, real = batch(padding)
    plain = logits(model(ids, attention_mask=real))
    before = model.config._attn_implementation
    with attnscope.watch(model) as scope:
        watched = logits(model(ids, attention_mask=real))
    assert model.config._attn_implementation == before
    assert scope.backend == ("eager-fallback" if name in FALLBACK else "streaming")
    rows = real.bool()
    # Eager attention and sdpa differ in padding rows, which have no meaning.
    where = rows if name in NO_SDPA else torch.ones_like(rows)
    torch.testing.assert_close(watched[where], plain[where], rtol=0, atol=TOLERANCE)
    oracle.compare(scope, dense(name, ids, real, scope.layers), rows, rows, TOLERANCE)


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - ENCODERS))
@torch.no_grad()
def test_generation(name: str, padding: str | None) -> None:
    model = build(name, "eager" if "alibi" in name else None)
    ids, real = batch(padding)
    ids, real = ids[:2], real[:2]
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, attention_mask=real, **settings)
    with attnscope.watch(model) as scope:
        text = model.generate(ids, attention_mask=real, **settings)
    assert torch.equal(text, plain)
    with attnscope.watch(model, queries="generated") as generated:
        model.generate(ids, attention_mask=real, **settings)
    seen = text[:, :-1]  # the last token is never fed back
    rows = torch.cat([real, torch.ones(2, seen.shape[1] - N, dtype=torch.long)], 1)
    weights = dense(name, seen, rows, scope.layers, generated=True)
    everything = rows.bool()
    oracle.compare(scope, weights, everything, everything, TOLERANCE)
    late = everything & (torch.arange(seen.shape[1]) >= N)
    oracle.compare(generated, weights, everything, late, TOLERANCE)


def looking_at_itself(family: str) -> Any:
    """A model outside the attention interface, of one head, whose tokens look at themselves so
    firmly that every other weight is 0 by rounding."""
    torch.manual_seed(0)
    if family == "gptj":  # spells softmax out
        config = hf.GPTJConfig(
            vocab_size=97, n_embd=32, n_layer=2, n_head=1, n_positions=64, rotary_dim=16
        )
        model = hf.GPTJForCausalLM(config).eval()
        for block in model.transformer.h:
            for projection in (block.attn.q_proj, block.attn.k_proj):
                projection.weight.data = 30 * torch.eye(32)
        return model
    config = hf.FalconConfig(  # calls sdpa
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=1
    )
    model = hf.FalconForCausalLM(config).eval()
    for block in model.transformer.h:
        block.self_attention.query_key_value.weight.data[:64] = 30 * torch.eye(32).repeat(2, 1)
    return model


@pytest.mark.parametrize("family", ["gptj", "falcon"])
@torch.no_grad()
def test_a_weight_of_zero_hides_nothing(family: str) -> None:
    model, n = looking_at_itself(family), 12
    with attnscope.watch(model) as scope:
        model(torch.arange(5, 5 + n)[None])
    assert scope.backend == ("eager-fallback" if family == "gptj" else "streaming")
    assert scope.self_mass(0).item() == 1
    assert scope.eligible(0)[0].tolist() == list(range(n, 0, -1))
    assert scope.average(0)[0, 0, :-1].tolist() == [0.0] * (n - 1)
    assert scope.average(0)[0, 0, -1].isnan()
