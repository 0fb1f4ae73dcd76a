"""Maps over pictures, and vision towers, against the dense attention of the model itself."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import attnscope
import made_processors
from attnscope.errors import InputError, ModelError, ScopeError

FAMILIES = list(made_processors.FAMILIES)
TOLERANCE = 2e-6


def pictures() -> list[Image.Image]:
    random = np.random.default_rng(0)
    sizes = ((50, 70), (70, 40), (32, 32))
    return [Image.fromarray(random.integers(0, 255, (*s, 3), dtype=np.uint8)) for s in sizes]


def dense(model: Any, inputs: Any) -> list[torch.Tensor]:
    """By layer [B, H, Q, K]: the weights of eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return list(model(**inputs, output_attentions=True).attentions)
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_maps_are_the_dense_attention_moved_to_the_picture(name: str, side: str) -> None:
    family = made_processors.made(name)
    texts = [f"{family.mark}One{family.mark}Two", f"Look: {family.mark} What is it, a ball?"]
    one, two, three = pictures()
    nested = [[one, two], [three]]
    inputs = made_processors.model_inputs(family, texts, nested, padding_side=side)
    with torch.no_grad():
        plain = family.model(**inputs).logits
        with attnscope.watch(family.model, keep=True) as scope:
            watched = family.model(**inputs).logits
    torch.testing.assert_close(watched, plain, rtol=0, atol=1e-6)  # padding has another kernel
    tokens = scope.place_images(family.processor, inputs, nested)
    weights = dense(family.model, inputs)
    real = inputs["attention_mask"].bool()
    for layer in scope.layers:
        for number, picture in enumerate(tokens):
            b = picture.sequence
            query = int(real[b].nonzero()[-1])
            expected = picture.to_map(weights[layer][b, :, query].numpy())
            np.testing.assert_allclose(
                scope.image_map(layer, number, query), expected, atol=TOLERANCE
            )
            mean = weights[layer][b][:, real[b]].mean(1).numpy()
            np.testing.assert_allclose(
                scope.image_map(layer, number), picture.to_map(mean), atol=TOLERANCE
            )
            placed = picture.positions[~np.isnan(picture.boxes[:, 0])]
            np.testing.assert_allclose(
                scope.image_map(layer, number).sum((-1, -2)), mean[:, placed].sum(-1), atol=1e-5
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_maps_of_generated_tokens(name: str) -> None:
    family = made_processors.made(name)
    picture = pictures()[0]
    inputs = made_processors.model_inputs(family, [f"{family.mark}What is it?"], [picture])
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad(), attnscope.watch(family.model, queries="predicts", keep=True) as scope:
        family.model.generate(**inputs, **settings)
    (tokens,) = scope.place_images(family.processor, inputs, [picture])
    family.model.set_attn_implementation("eager")
    settings |= {"output_attentions": True, "return_dict_in_generate": True}
    with torch.no_grad():
        steps = family.model.generate(**inputs, **settings).attentions
    family.model.set_attn_implementation("sdpa")
    prompt = inputs["input_ids"].shape[1]
    length = prompt + 3  # the model does not read the last token
    for layer in scope.layers:
        for step in range(4):
            row = np.zeros((4, length))
            weights = steps[step][layer][0, :, -1].numpy()
            end = prompt + step  # the cache of a sliding layer has the last keys alone
            row[:, end - weights.shape[-1] : end] = weights
            np.testing.assert_allclose(
                scope.image_map(layer, query=prompt - 1 + step),
                tokens.to_map(row),
                atol=5 * TOLERANCE,
            )
        np.testing.assert_array_equal(
            scope.image_map(layer, query=-1), scope.image_map(layer, query=length - 1)
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_vision_tower_is_a_part_of_the_scope(name: str) -> None:
    family = made_processors.made(name)
    picture = pictures()[0]
    inputs = made_processors.model_inputs(family, [f"{family.mark}What is it?"], [picture])
    received = {}
    if name == "qwen2.5-vl":  # one call per window
        with (
            torch.no_grad(),
            attnscope.watch(family.model, vision=True),
            pytest.raises(ModelError) as error,
        ):
            family.model(**inputs)
        assert error.value.code == "repeated-attention"
        return
    for backend in ("auto", "eager-fallback"):
        with torch.no_grad(), attnscope.watch(family.model, backend=backend, vision=True) as scope:
            family.model(**inputs)
        vision = scope["vision"]
        received[backend] = [vision.received(layer) for layer in vision.layers]
        assert "vision" in scope.parts
        assert len(vision.layers) == 2
        for layer in vision.layers:
            total = vision.received(layer).sum(-1)
            torch.testing.assert_close(
                total, vision.count(layer)[:, None].expand_as(total), rtol=1e-5, atol=1e-4
            )
    for fast, slow in zip(received["auto"], received["eager-fallback"], strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-4)


TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "bos_token_id": 0,
    "eos_token_id": 99,
    "pad_token_id": 1,
}


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_a_model_of_two_encoders_has_both_as_parts(name: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(text_config=TEXT, vision_config=TOWER)
    model = getattr(transformers, f"{name}Model")(config).eval()
    ids = torch.randint(2, 90, (2, 9))
    ids[:, -1] = 99
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
    with torch.no_grad(), attnscope.watch(model) as scope:
        model(**inputs)
    assert scope.parts == ["text", "vision"]
    with pytest.raises(ScopeError) as error:
        scope.received(0)
    assert error.value.code == "several-parts"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    for part in scope.parts:
        weights = out[f"{part}_model_output"].attentions
        assert scope[part].layers == list(range(len(weights)))
        for layer in scope[part].layers:
            torch.testing.assert_close(
                scope[part].received(layer), weights[layer].sum(2), rtol=0, atol=2e-6
            )


def test_a_tower_with_a_pooling_head_is_measured_without_it() -> None:
    torch.manual_seed(0)
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**TOWER)).eval()
    pixels = torch.randn(1, 3, 32, 32)
    with torch.no_grad(), attnscope.watch(model) as scope:
        model(pixel_values=pixels)
    assert "head.attention" in repr(scope)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(pixel_values=pixels, output_attentions=True).attentions
    for layer in scope.layers:
        torch.testing.assert_close(scope.received(layer), weights[layer].sum(2), rtol=0, atol=2e-6)


def test_maps_of_a_vision_tower_leave_out_its_class_token() -> None:
    torch.manual_seed(0)
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER)).eval()
    square = {"height": 32, "width": 32}
    processor = made_processors.pil("clip", size={"shortest_edge": 32}, crop_size=square)
    inputs = processor(pictures()[:1], return_tensors="pt")
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(**inputs)
    (tokens,) = scope.place_images(processor, inputs, pictures()[:1])
    row = scope.row(1, 0)
    np.testing.assert_allclose(
        scope.image_map(1, query=0).flatten(1), row[:, 1:], rtol=0, atol=1e-7
    )
    rows, columns, box = tokens.grid
    assert (rows, columns) == (4, 4)
    assert box[0] > 0  # a centre crop of a wide picture
    with pytest.raises(ModelError) as error:
        scope.place_images(processor, {"pixel_values": torch.zeros(1, 3, 64, 64)}, pictures()[:1])
    assert error.value.code == "unknown-image-layout"


def test_maps_need_places_and_a_known_picture() -> None:
    family = made_processors.made("llava")
    inputs = made_processors.model_inputs(family, ["<image>Who?"], pictures()[:1])
    with torch.no_grad(), attnscope.watch(family.model) as scope:
        family.model(**inputs)
    with pytest.raises(ScopeError) as missing:
        scope.image_map(0)
    assert missing.value.code == "images-not-placed"
    scope.place_images(family.processor, inputs, pictures()[:1])
    for wrong in (1, -1, True):
        with pytest.raises(InputError) as error:
            scope.image_map(0, wrong)
        assert error.value.code == "unknown-image"
    with pytest.raises(ScopeError) as not_kept:
        scope.image_map(0, query=3)
    assert not_kept.value.code == "queries-not-kept"
    longer = made_processors.model_inputs(family, ["Who is it, and when? <image>"], pictures()[:1])
    scope.place_images(family.processor, longer, pictures()[:1])
    with pytest.raises(InputError) as other:
        scope.image_map(0)
    assert other.value.code == "other-inputs"
