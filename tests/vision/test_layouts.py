"""Every layout against the family's own processor and model: pixels decide where a token lies."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import made_processors
from attnscope.errors import AttnscopeWarning, InputError, ModelError
from attnscope.vision import ImageTokens, View, image_tokens
from attnscope.vision.image_tokens import size_of
from attnscope.vision.views import overlaps

FAMILIES = list(made_processors.FAMILIES)
SIZES = [(50, 70), (70, 40), (32, 32), (30, 110)]


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def crosses(box: NDArray[np.float64], block: tuple[float, ...], margin: float) -> bool:
    left, top, right, bottom = box
    return bool(
        left - margin < block[2]
        and block[0] < right + margin
        and top - margin < block[3]
        and block[1] < bottom + margin
    )


def check_places(family: Any, size: tuple[int, int], **options: Any) -> ImageTokens:
    """Paint small blocks of a picture; only tokens at that place may change."""
    height, width = size
    picture = noise(height, width)
    text = f"{family.mark}What is it?"
    inputs = made_processors.model_inputs(family, [text], [Image.fromarray(picture)], **options)
    (tokens,) = image_tokens(family.processor, inputs, [size], **options)
    plain = made_processors.first_embeddings(family.model, **inputs)
    rng = np.random.default_rng(1)
    _, _, (left, top, right, bottom) = tokens.grid
    hit = 0
    for _ in range(8):
        y = int(rng.uniform(max(top, 0), min(bottom, 1)) * (height - 4))
        x = int(rng.uniform(max(left, 0), min(right, 1)) * (width - 4))
        painted = picture.copy()
        painted[y : y + 4, x : x + 4] = 255 - painted[y : y + 4, x : x + 4] // 2
        other = made_processors.model_inputs(family, [text], [Image.fromarray(painted)], **options)
        changed = made_processors.first_embeddings(family.model, **other)
        difference = (changed - plain).abs().amax(-1)[0, tokens.positions].numpy()
        block = (x / width, y / height, (x + 4) / width, (y + 4) / height)
        # Resampling to a smaller size mixes pixels up to three of the new pixels away.
        margin = 3 / made_processors.SIDE + 4 / min(size)
        for box, value in zip(tokens.boxes, difference, strict=True):
            if value > 1e-3 * difference.max():
                assert not np.isnan(box[0]), "a token without a place changed"
                assert crosses(box, block, margin)
        first = 0
        for view in tokens.views:
            part = slice(first, first + view.tokens)
            first += view.tokens
            if view.box is None or not crosses(np.array(view.box), block, 0.0):
                continue
            strongest = difference[part].argmax()
            if difference[part].max() > 0.1 * difference.max():
                hit += 1
                assert crosses(tokens.boxes[part][strongest], block, 0.0)
    assert hit >= 8
    return tokens


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_changed_pixels_change_the_tokens_at_their_place(name: str, size: tuple[int, int]) -> None:
    check_places(made_processors.made(name), size)


@pytest.mark.parametrize("size", [(30, 110), (110, 40), (60, 64)], ids=str)
def test_crops_of_gemma3_lie_side_by_side(size: tuple[int, int]) -> None:
    family = made_processors.made("gemma3")
    options = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 16,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    tokens = check_places(family, size, **options)
    assert len(tokens.views) == {(30, 110): 5, (110, 40): 4, (60, 64): 1}[size]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_number_of_tokens_is_the_processors_for_many_sizes(name: str) -> None:
    family = made_processors.made(name)
    rng = np.random.default_rng(3)
    sizes = [tuple(map(int, size)) for size in rng.integers(16, 160, (40, 2))]
    for height, width in sizes:
        if max(height, width) > 6 * min(height, width):
            continue
        picture = Image.new("RGB", (width, height))
        inputs = made_processors.model_inputs(family, [family.mark], [picture])
        (tokens,) = image_tokens(family.processor, inputs, [picture])  # an error if they differ
        assert len(tokens.boxes) == len(tokens.positions)
        assert (tokens.height, tokens.width) == (height, width)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_pictures_in_a_prompt_of_a_padded_batch(name: str, side: str) -> None:
    family = made_processors.made(name)
    pictures = [Image.fromarray(noise(*size)) for size in ((50, 70), (70, 40), (32, 32))]
    texts = [f"{family.mark}One{family.mark}Two", f"Look: {family.mark} What is it, a ball?"]
    nested = [pictures[:2], pictures[2:]]
    inputs = made_processors.model_inputs(family, texts, nested, padding_side=side)
    tokens = image_tokens(family.processor, inputs, nested)
    assert [picture.sequence for picture in tokens] == [0, 0, 1]
    assert [(picture.height, picture.width) for picture in tokens] == [(50, 70), (70, 40), (32, 32)]
    for picture in tokens:
        ids = inputs["input_ids"][picture.sequence, picture.positions]
        assert len(set(ids.tolist())) == 1
    # Each picture's own pixels change the tokens of this picture alone.
    plain = made_processors.first_embeddings(family.model, **inputs)
    for number in range(3):
        other = list(pictures)
        other[number] = Image.fromarray(255 - np.asarray(pictures[number]))
        inputs = made_processors.model_inputs(
            family, texts, [other[:2], other[2:]], padding_side=side
        )
        changed = made_processors.first_embeddings(family.model, **inputs) - plain
        where = {(b, k) for b, k in changed.abs().amax(-1).nonzero().tolist()}
        own = {(tokens[number].sequence, int(k)) for k in tokens[number].positions}
        assert where
        assert where <= own


@pytest.mark.parametrize("name", FAMILIES)
def test_a_map_adds_up_to_the_weights_of_placed_tokens(name: str) -> None:
    family = made_processors.made(name)
    inputs = made_processors.model_inputs(family, [family.mark], [Image.fromarray(noise(50, 70))])
    (tokens,) = image_tokens(family.processor, inputs, [(50, 70)])
    weights = np.random.default_rng(2).random((2, 3, inputs["input_ids"].shape[1]))
    result = tokens.to_map(weights)
    rows, columns, _ = tokens.grid
    assert result.shape == (2, 3, rows, columns)
    placed = ~np.isnan(tokens.boxes[:, 0])
    np.testing.assert_allclose(
        result.sum((-1, -2)), weights[..., tokens.positions[placed]].sum(-1), rtol=1e-12
    )
    if len(tokens.views) == 1:
        np.testing.assert_array_equal(result.reshape(2, 3, -1), weights[..., tokens.positions])


def test_a_coarse_view_spreads_over_the_cells_that_it_covers() -> None:
    coarse, fine = View(1, 2), View(2, 2, (0.5, 0.0, 1.0, 1.0))
    tokens = ImageTokens(
        sequence=0, positions=np.arange(6), views=(coarse, fine), height=10, width=20
    )
    assert tokens.grid == (2, 4, (0.0, 0.0, 1.0, 1.0))
    np.testing.assert_allclose(
        tokens.to_map([4.0, 8.0, 1.0, 2.0, 3.0, 5.0]), [[1, 1, 3, 4], [1, 1, 5, 7]]
    )
    np.testing.assert_allclose(
        tokens.share_inside((0.0, 0.0, 0.75, 0.5)), [0.5, 0.25, 1.0, 0.0, 0.0, 0.0]
    )


def test_overlaps_of_intervals_add_up_to_one() -> None:
    shares = overlaps(5, 0.1, 0.9, 7, 0.0, 1.0)
    np.testing.assert_allclose(shares.sum(1), 1.0)
    np.testing.assert_array_equal(overlaps(3, 0, 1, 3, 0, 1), np.eye(3))


class Unknown:
    image_token_ids = (7,)


def test_an_unknown_layout_is_a_square_and_says_so() -> None:
    ids = torch.tensor([[1, *[7] * 9, 2, *[7] * 9]])
    with pytest.warns(AttnscopeWarning):
        tokens = image_tokens(Unknown(), {"input_ids": ids}, [(30, 20), (10, 10)])
    assert [picture.assumed for picture in tokens] == [True, True]
    assert tokens[1].positions.tolist() == list(range(11, 20))
    assert tokens[0].grid[:2] == (3, 3)


@pytest.mark.parametrize("ids", [[7] * 8, [*[7] * 9, 1, *[7] * 4], [*[7] * 9, 1, *[7] * 9]])
def test_other_unknown_layouts_are_refused(ids: list[int]) -> None:
    number = 2 if ids == [*[7] * 9, 1, *[7] * 4] else 1
    with pytest.raises(ModelError) as error:
        image_tokens(Unknown(), {"input_ids": [ids]}, [(30, 20)] * number)
    assert error.value.code == "unknown-image-layout"


def test_prompts_without_image_tokens_or_with_other_pictures_are_refused() -> None:
    family = made_processors.made("idefics3")
    picture = Image.fromarray(noise(50, 70))
    inputs = made_processors.model_inputs(family, ["<image>"], [picture])
    with pytest.raises(InputError) as error:
        image_tokens(family.processor, {"input_ids": [[3, 4]]}, [picture])
    assert error.value.code == "no-image-tokens"
    for wrong in ([(20, 100)], [picture, picture], []):
        with pytest.raises(InputError) as error:
            image_tokens(family.processor, inputs, wrong)
        assert error.value.code == "wrong-image-tokens"
    with pytest.raises(InputError) as error:
        image_tokens(family.processor, inputs, ["cat.png"])
    assert error.value.code == "bad-image"


@pytest.mark.parametrize("name", FAMILIES)
def test_more_pictures_than_the_inputs_have_are_refused(name: str) -> None:
    family = made_processors.made(name)
    picture = Image.fromarray(noise(50, 70))
    inputs = made_processors.model_inputs(family, [family.mark], [picture])
    with pytest.raises(InputError) as error:
        image_tokens(family.processor, inputs, [picture, picture])
    assert error.value.code == "wrong-image-tokens"


def test_sizes_of_arrays_and_pictures() -> None:
    assert size_of(Image.new("RGB", (20, 10))) == (10, 20)
    assert size_of(np.zeros((10, 20, 3))) == (10, 20)
    assert size_of(torch.zeros(3, 10, 20)) == (10, 20)
    assert size_of(np.zeros((10, 20))) == (10, 20)
    assert size_of((10, 20)) == (10, 20)
