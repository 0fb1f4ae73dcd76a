"""Encoder-decoder models: encoder, decoder and cross-attention have separate scopes."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import attnscope
import oracle
from attnscope.errors import InputError, ScopeError
from attnscope.interception.sites import Site, find
from support_errors import raises

B, N, M = 2, 17, 9
VOCABULARY = 97


def bart(implementation: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=2, decoder_attention_heads=4, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=64, attn_implementation=implementation,
    )  # fmt: skip
    return _sharp(hf.BartForConditionalGeneration(config))


def t5(implementation: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=3,
        num_heads=4, decoder_start_token_id=0, attn_implementation=implementation,
    )  # fmt: skip
    return _sharp(hf.T5ForConditionalGeneration(config), by=1.5)


def _sharp(model: Any, by: float = 2.0) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name and "shared" not in name:
                parameter.normal_().mul_(by * parameter.shape[1] ** -0.5)
    return model.double().eval()


MODELS = {"bart": bart, "t5": t5}


def inputs() -> dict[str, torch.Tensor]:
    ids, target = torch.randint(5, VOCABULARY, (B, N)), torch.randint(5, VOCABULARY, (B, M))
    real, shown = torch.ones_like(ids), torch.ones_like(target)
    real[0, -4:] = 0
    shown[1, -2:] = 0
    return {
        "input_ids": ids,
        "attention_mask": real,
        "decoder_input_ids": target,
        "decoder_attention_mask": shown,
    }


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_parts_have_separate_scopes(name: str) -> None:
    model, text = MODELS[name](), inputs()
    plain = model(**text).logits
    with attnscope.watch(model) as scope:
        watched = model(**text).logits
    shown = text["decoder_attention_mask"].bool()
    torch.testing.assert_close(watched[shown], plain[shown], rtol=0, atol=1e-5)
    assert scope.parts == ["cross", "decoder", "encoder"]
    assert [scope[part].layers for part in scope.parts] == [[0, 1, 2]] * 3
    assert {scope[part].backend for part in scope.parts} == {"streaming"}
    dense = MODELS[name]("eager")(**text, output_attentions=True)
    real = text["attention_mask"].bool()
    weights = dict(enumerate(dense.encoder_attentions))
    oracle.compare(scope["encoder"], weights, real, real, 1e-5)
    weights = dict(enumerate(dense.decoder_attentions))
    oracle.compare(scope["decoder"], weights, shown, shown, 1e-5)
    for layer, A in enumerate(dense.cross_attentions):
        _compare_cross(scope["cross"], layer, A.double().numpy(), shown.numpy(), real.numpy())


def _compare_cross(scope: Any, layer: int, A: Any, rows: Any, keys: Any) -> None:
    A = A * rows[:, None, :, None] * keys[:, None, None]
    count = rows.sum(1)
    np.testing.assert_allclose(scope.received(layer), A.sum(2), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(scope.count(layer), count)
    np.testing.assert_array_equal(scope.eligible(layer), count[:, None] * keys)
    even = count[:, None] * keys / keys.sum(1)[:, None]
    np.testing.assert_allclose(scope.uniform(layer), even, rtol=1e-5)
    entropy = -(A * np.log(A, where=A > 0, out=np.zeros_like(A))).sum((2, 3)) / count[:, None]
    np.testing.assert_allclose(scope.entropy(layer), entropy, rtol=0, atol=1e-5)
    first = A[..., 0].sum(2) / count[:, None]
    np.testing.assert_allclose(scope.first_token(layer), first, rtol=0, atol=1e-5)
    classes = torch.arange(N).remainder(3).expand(B, -1)
    mass = np.stack([A[..., classes[0] == c].sum((2, 3)) for c in range(3)], -1)
    wanted = mass / count[:, None, None]
    np.testing.assert_allclose(scope.mass(layer, classes, 3), wanted, rtol=0, atol=1e-5)
    # Queries are no keys: there is no own key, none before, no distance.
    for undefined in (scope.average, scope.self_mass, scope.distance):
        assert undefined(layer).isnan().all()
    with raises(ScopeError, "cross-attention", measure="flow"):
        scope.flow(layer)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_generation(name: str) -> None:
    """Decoding with a cache adds up to one pass over what was generated."""
    model, text = MODELS[name](), inputs()
    source = {key: text[key] for key in ("input_ids", "attention_mask")}
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    plain = model.generate(**source, **settings)
    with attnscope.watch(model) as scope:
        made = model.generate(**source, **settings)
    assert torch.equal(made, plain)
    with attnscope.watch(model) as whole:
        model(**source, decoder_input_ids=made[:, :-1])
    for part in scope.parts:
        for layer in scope[part].layers:
            for read in ("received", "entropy", "count", "eligible", "average"):
                torch.testing.assert_close(
                    getattr(scope[part], read)(layer),
                    getattr(whole[part], read)(layer),
                    rtol=0,
                    atol=2e-5,
                    equal_nan=True,
                )


@torch.no_grad()
def test_parts_side_by_side() -> None:
    """A query mask is for one text, so the texts are watched beside each other."""
    model, text = bart(), inputs()
    mask = torch.zeros(B, M, dtype=torch.bool)
    mask[:, 3:5] = True
    with raises(InputError, "encoder-decoder"):
        attnscope.watch(model, queries=mask)
    with (
        attnscope.watch(model.get_encoder()) as encoder,
        attnscope.watch(model.get_decoder(), queries=mask) as decoder,
    ):
        model(**text)
    with attnscope.watch(model) as whole:
        model(**text)
    assert torch.equal(encoder.received(1), whole["encoder"].received(1))
    assert decoder.parts == ["cross", "decoder"]
    assert decoder.count(0).tolist() == decoder["cross"].count(0).tolist() == [2, 2]
    A = bart("eager")(**text, output_attentions=True).cross_attentions[2]
    wanted = A[:, :, 3:5].sum(2).float()
    torch.testing.assert_close(decoder["cross"].received(2), wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_one_part_must_be_chosen() -> None:
    model = bart()
    with attnscope.watch(model) as scope:
        model(**inputs())
    with raises(ScopeError, "several-parts", parts=["cross", "decoder", "encoder"]):
        scope.received(0)
    with raises(InputError, "unknown-part", value="vision"):
        scope["vision"]


def test_sites() -> None:
    found = find(t5())
    assert found.all_sites[:2] == [Site("decoder", 0, "cross"), Site("decoder", 0, "self")]
    assert len(found.all_sites) == 9
    assert found.stacks == ["decoder", "encoder"]
    assert find(bart().get_encoder()).all_sites == [Site("encoder", n) for n in range(3)]


def test_gradients_of_position_biases() -> None:
    model, text = t5(), inputs()

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(**text).logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    plain = gradient()
    with attnscope.watch(model):
        watched = gradient()
    torch.testing.assert_close(watched, plain, rtol=1e-6, atol=1e-9)


@torch.no_grad()
def test_whisper() -> None:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, num_mel_bins=8,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_source_positions=20, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None, attn_implementation="sdpa",
    )  # fmt: skip
    model = _sharp(hf.WhisperForConditionalGeneration(config))
    heard = {
        "input_features": torch.randn(B, 8, 40).double(),
        "decoder_input_ids": torch.randint(5, VOCABULARY, (B, M)),
    }
    plain = model(**heard).logits
    with attnscope.watch(model) as scope:
        torch.testing.assert_close(model(**heard).logits, plain, rtol=0, atol=1e-5)
    model.set_attn_implementation("eager")
    weights = model(**heard, output_attentions=True).cross_attentions
    for layer, A in enumerate(weights):
        wanted = A.sum(2).float()
        torch.testing.assert_close(scope["cross"].received(layer), wanted, rtol=0, atol=1e-5)
    assert scope["encoder"].received(0).shape == (B, 4, 20)


@pytest.mark.parametrize("backend", ["auto", "eager-fallback"])
@torch.no_grad()
def test_the_whole_scope_describes_its_parts(backend: str) -> None:
    model, text = bart(), inputs()
    with attnscope.watch(model, backend=backend) as scope:
        before = repr(scope)
        model(**text)
    assert scope.backend == scope["decoder"].backend
    for part in scope.parts:
        assert part in before
        assert repr(scope[part]) in repr(scope)
    assert before != repr(scope)


@torch.no_grad()
def test_the_backend_of_the_whole_scope_is_the_fallback_where_a_part_took_it() -> None:
    model, text = t5("eager"), inputs()
    with attnscope.watch(model) as scope:
        model(**text)
        scope["cross"].backend = "eager-fallback"
    assert scope.backend == "eager-fallback"
    assert scope["encoder"].backend != "eager-fallback"
