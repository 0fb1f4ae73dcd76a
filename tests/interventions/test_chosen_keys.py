"""Interventions by words, by positions, and in cross-attention."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import attnscope
from attnscope.errors import InputError
from attnscope.interventions.effect import effect
from support_errors import raises

TEXTS = ["The ball is left of the box.", "The box and the ball are red."]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    model, tokenizer = attnscope.load("zoo:spatial-phys")
    tokenizer.padding_side = "left"
    return model, tokenizer


@torch.no_grad()
def test_words_and_positions_are_the_keys_of_a_mask(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with attnscope.watch(model, layers=0) as scope:
        plain = model(**inputs).logits
    ball = scope.find("ball")
    for options in ({}, {"queries": "last"}, {"layers": [1, 2], "heads": 3}):
        with attnscope.knockout(model, keys=ball, **options):
            want = model(**inputs).logits
        with attnscope.knockout(model, text="ball", **options):
            assert torch.equal(model(**inputs).logits, want)
        assert not torch.equal(plain, want)
    with attnscope.steer(model, keys=ball, factor=3.0):
        want = model(**inputs).logits
    with attnscope.steer(model, text="ball", factor=3.0, tokenizer=tokenizer):
        assert torch.equal(model(**inputs).logits, want)
    one = tokenizer(TEXTS[0], return_tensors="pt")
    mask = torch.zeros_like(one["input_ids"], dtype=torch.bool)
    mask[0, [1, 4]] = True
    with attnscope.knockout(model, keys=mask):
        want = model(**one).logits
    for keys in ([1, 4], (4, 1), torch.tensor([1, 4])):
        with attnscope.knockout(model, keys=keys):
            assert torch.equal(model(**one).logits, want)
    by_words = effect(model, one, text="left", layers=[0])
    by_place = effect(model, one, keys=[3], layers=[0])
    assert torch.equal(by_words.kl, by_place.kl)
    assert float(by_words.kl.max()) > 0


@torch.no_grad()
def test_words_of_the_prompt_stay_hidden_while_it_generates(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    keys = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with (
        attnscope.knockout(model, text="ball"),
        attnscope.watch(model, queries="predicts") as scope,
    ):
        got = model.generate(**inputs, **options)
    hidden = scope.find("ball")[:, : keys.shape[1]]
    with attnscope.knockout(model, keys=hidden):
        assert torch.equal(model.generate(**inputs, **options), got)
    assert float((scope.received(0)[..., : keys.shape[1]] * hidden[:, None]).max()) == 0
    with (
        attnscope.knockout(model, text="ball"),
        raises(InputError, "prompt-in-pieces"),
    ):
        model.generate(**inputs, **options, prefill_chunk_size=4)


@torch.no_grad()
def test_wrong_choices_are_refused(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    both = tokenizer(TEXTS, return_tensors="pt", padding=True)
    one = tokenizer(TEXTS[0], return_tensors="pt")
    for options in ({}, {"keys": [1], "text": "ball"}):
        with (
            raises(InputError, "bad-argument", argument="keys"),
            attnscope.knockout(model, **options),
        ):
            pass
    for keys in ([], [0.5], [[1, 2]], torch.zeros(2, 3, 4)):
        with (
            raises(InputError, "wrong-shape", argument="keys"),
            attnscope.knockout(model, keys=keys),
        ):
            pass
    with attnscope.knockout(model, keys=[1]), raises(InputError, "wrong-batch-size", batch=2):
        model(**both)
    for position in (-1, 8):
        with (
            attnscope.knockout(model, keys=[position]),
            raises(InputError, "out-of-range", value=position),
        ):
            model(**one)
    with attnscope.knockout(model, text="red"), raises(InputError, "text-not-found", sequence=0):
        model(**both)
    with attnscope.knockout(model, text="red"), raises(InputError, "no-token-ids"):
        model(inputs_embeds=model.get_input_embeddings()(one["input_ids"]))
    with raises(InputError, "needs-tokenizer"), attnscope.knockout(model.model, text="red"):
        pass
    with (
        raises(InputError, "unknown-part", value="cross"),
        attnscope.knockout(model, keys=[1], part="cross"),
    ):
        pass


def bart(implementation: str) -> Any:
    torch.manual_seed(0)
    config = hf.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=16, decoder_ffn_dim=16,
        max_position_embeddings=64, attn_implementation=implementation, init_std=0.3,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config).double().eval()


def t5(implementation: str) -> Any:
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=3,
        num_heads=4, decoder_start_token_id=0, attn_implementation=implementation,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config).double().eval()


def two_texts() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids, target = torch.randint(5, 97, (2, 11)), torch.randint(5, 97, (2, 6))
    real = torch.ones_like(ids)
    real[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": real, "decoder_input_ids": target}


@pytest.mark.parametrize("make", [bart, t5])
@torch.no_grad()
def test_cross_attention_can_be_knocked_out(make: Any) -> None:
    model, text = make("sdpa"), two_texts()
    keys = torch.zeros_like(text["input_ids"], dtype=torch.bool)
    keys[0, [1, 4]] = keys[1, [0, 9]] = True
    encoded = model.get_encoder()(text["input_ids"], attention_mask=text["attention_mask"])
    shown = text["attention_mask"] * ~keys
    want = model(
        encoder_outputs=encoded, attention_mask=shown, decoder_input_ids=text["decoder_input_ids"]
    ).logits
    plain = model(**text).logits
    with attnscope.knockout(model, keys=keys, part="cross"), attnscope.watch(model) as scope:
        got = model(**text).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert (got - plain).abs().max() > 1e-4
    assert float((scope["cross"].received(2) * keys[:, None]).max()) == 0
    assert float((scope["encoder"].received(1) * keys[:, None]).max()) > 0.1
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    want = model.generate(encoder_outputs=encoded, attention_mask=shown, **options)
    prompt = {name: text[name] for name in ("input_ids", "attention_mask")}
    with attnscope.knockout(model, keys=keys, part="cross"):
        assert torch.equal(model.generate(**prompt, **options), want)


@pytest.mark.parametrize("make", [bart, t5])
@torch.no_grad()
def test_heads_queries_and_layers_of_cross_attention(make: Any) -> None:
    """Layer 0 has the queries and keys of the plain pass, so its weights are those without some."""
    model, text = make("sdpa"), two_texts()
    keys = torch.zeros_like(text["input_ids"], dtype=torch.bool)
    keys[:, 2:5] = True
    queries = torch.zeros_like(text["decoder_input_ids"], dtype=torch.bool)
    queries[:, [1, 3]] = True
    dense = make("eager")(**text, output_attentions=True).cross_attentions[0]
    cut = (
        keys[:, None, None]
        & queries[:, None, :, None]
        & torch.tensor([0, 1, 0, 1]).bool()[None, :, None, None]
    )
    want = dense.masked_fill(cut, 0)
    want = want / want.sum(-1, keepdim=True)
    with (
        attnscope.knockout(model, keys=keys, queries=queries, heads=[1, 3], layers=0, part="cross"),
        attnscope.watch(model) as scope,
    ):
        model(**text)
    torch.testing.assert_close(scope["cross"].received(0).double(), want.sum(2), rtol=0, atol=1e-5)
    assert float((scope["cross"].received(1) * keys[:, None]).min(-1).values.min()) >= 0
    assert float((scope["cross"].received(1) * keys[:, None]).max()) > 0


@torch.no_grad()
def test_parts_of_an_encoder_decoder_model() -> None:
    model, text = bart("sdpa"), two_texts()
    with raises(InputError, "encoder-decoder"), attnscope.knockout(model, keys=[1]):
        pass
    with (
        raises(InputError, "unknown-layer", value=2),
        attnscope.knockout(model, keys=[1], part="encoder", layers=2),
    ):
        pass
    keys = torch.zeros_like(text["input_ids"], dtype=torch.bool)
    keys[:, 3] = True
    with (
        attnscope.knockout(model, keys=keys[:, :-1], part="cross"),
        raises(InputError, "wrong-shape", argument="keys"),
    ):
        model(**text)
    for part, width in (("encoder", 11), ("decoder", 6)):
        with (
            attnscope.knockout(model, keys=keys[:, :width], part=part),
            attnscope.watch(model) as scope,
        ):
            model(**text)
        assert float(scope[part].received(1)[:, :, 3].max()) == 0
        other = {"encoder": "decoder", "decoder": "encoder"}[part]
        assert float(scope[other].received(1)[:, :, 3].max()) > 0
        assert float(scope["cross"].received(1)[:, :, 3].max()) > 0
