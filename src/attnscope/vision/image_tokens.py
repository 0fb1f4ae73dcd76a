"""Finds the image tokens of a prompt, and the place of each in its picture."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.errors import AttnscopeWarning, InputError, ModelError, describe
from attnscope.vision.layouts import LAYOUTS, Picture, visible_box
from attnscope.vision.views import Box, View, common_grid, overlaps

MOST_BEFORE = 8
"""Largest number of tokens before the patches of a vision tower."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageTokens:
    """The tokens of one picture in a batch of prompts."""

    sequence: int
    """The number of the prompt in the batch."""
    positions: NDArray[np.int64]
    """[tokens]: the position of each image token in the prompt."""
    views: tuple[View, ...]
    """The grids of tokens, in the order of the tokens."""
    height: int
    """Of the picture, in pixels."""
    width: int
    assumed: bool = False
    """Whether the layout is a guess: a square, because the processor is unknown."""

    @cached_property
    def boxes(self) -> NDArray[np.float64]:
        """[tokens, 4]: left, top, right, bottom as fractions of the picture; nan without a place.

        Newline and class tokens have no place. Padding lies outside 0 to 1.
        """
        return np.concatenate([view.token_boxes() for view in self.views])

    @cached_property
    def grid(self) -> tuple[int, int, Box]:
        """The rows and columns of `to_map`, and the part of the picture under them."""
        return common_grid(self.views)

    def to_map(self, weights: ArrayLike) -> NDArray[np.float64]:
        """[…, rows, columns]: weights of the keys of the prompt [..., keys], moved to the picture.

        A token of a coarse view spreads its weight evenly over the cells that it covers, so the
        map adds up to the weight of all tokens with a place.
        """
        return self.tokens_to_map(np.asarray(weights, dtype=np.float64)[..., self.positions])

    def tokens_to_map(self, tokens: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """[…, rows, columns]: as `to_map`, from the weights of the image tokens [..., tokens]."""
        rows, columns, (left, top, right, bottom) = self.grid
        total = np.zeros((*tokens.shape[:-1], rows, columns))
        first = 0
        for view in self.views:
            part = tokens[..., first : first + view.tokens]
            first += view.tokens
            if view.box is None:
                continue
            part = part.reshape(*tokens.shape[:-1], view.rows, -1)[..., : view.columns]
            down = overlaps(view.rows, view.box[1], view.box[3], rows, top, bottom)
            across = overlaps(view.columns, view.box[0], view.box[2], columns, left, right)
            total += down.T @ part @ across
        return total

    def share_inside(self, box: Box) -> NDArray[np.float64]:
        """[tokens]: the share of each token's area inside a box of the picture; 0 without a
        place."""
        left, top, right, bottom = self.boxes.T
        with np.errstate(invalid="ignore"):
            wide = np.clip(np.minimum(right, box[2]) - np.maximum(left, box[0]), 0, None)
            high = np.clip(np.minimum(bottom, box[3]) - np.maximum(top, box[1]), 0, None)
            share = wide * high / ((right - left) * (bottom - top))
        return np.asarray(np.nan_to_num(share))


def image_tokens(
    processor: Any, inputs: Mapping[str, Any], images: Sequence[Any], **options: Any
) -> list[ImageTokens]:
    """The tokens of every picture of a batch.

    Args:
        processor: The processor of the model, from `attnscope.load` or `AutoProcessor`.
        inputs: What the processor returned.
        images: The pictures in the order of the prompts: what the processor got, or the sizes
            (height, width). Nested lists are flattened.
        **options: The keyword arguments of the processor's call that concern images, such as
            `do_pan_and_scan=True`.

    Raises:
        InputError: The prompts have no image tokens, or a number of them that does not belong to
            these pictures.
        ModelError: The layout of the processor is unknown, and its tokens are no square.
    """
    sizes = [size_of(image) for image in flat(images)]
    sequences = _positions(processor, inputs["input_ids"])
    layout = LAYOUTS.get(type(processor).__name__)
    if layout is None:
        return _squares(processor, sequences, sizes)
    views: list[list[View]] = []
    for picture in _pictures(processor, inputs, sizes, options):
        try:
            views.append(layout(picture))
        except IndexError as error:
            raise InputError(
                f"got {len(sizes)} pictures, but the inputs have {len(views)}; give the pictures "
                "of these prompts, in their order",
                code="wrong-image-tokens",
                expected=len(views),
            ) from error
    return _assigned(processor, sequences, sizes, views)


def patch_tokens(
    processor: Any,
    inputs: Mapping[str, Any],
    images: Sequence[Any],
    *,
    keys: int,
    patch_size: int,
    **options: Any,
) -> list[ImageTokens]:
    """The tokens of pictures in a vision tower, whose keys are patches row by row.

    Tokens before the patches (a class token, registers) have no place.

    Args:
        processor: The image processor, or a processor that has one.
        inputs: What it returned, with `pixel_values` [pictures, channels, height, width].
        images: The pictures, or their sizes.
        keys: The number of keys of the tower.
        patch_size: The side of a patch in pixels.
        **options: The options of the processor's call.
    """
    sizes = [size_of(image) for image in flat(images)]
    pixels = inputs["pixel_values"]
    if getattr(pixels, "ndim", 0) != 4 or len(pixels) != len(sizes):
        raise ModelError(
            "the patches of a vision tower can be placed if every picture is one entry of "
            f"pixel_values [pictures, channels, height, width]; got {describe(pixels)} for "
            f"{len(sizes)} pictures",
            code="unknown-image-layout",
            got=describe(pixels),
        )
    down, across = int(pixels.shape[-2]) // patch_size, int(pixels.shape[-1]) // patch_size
    before = keys - down * across
    if not 0 <= before <= MOST_BEFORE:
        raise ModelError(
            f"the tower has {keys} keys, but {down} × {across} patches of {patch_size} pixels; "
            "give the inputs of this forward pass",
            code="unknown-image-layout",
            keys=keys,
        )
    first = [View(1, before, None)] if before else []
    boxes = [visible_box(picture) for picture in _pictures(processor, inputs, sizes, options)]
    return [
        ImageTokens(
            sequence=number,
            positions=np.arange(keys),
            views=(*first, View(down, across, box)),
            height=height,
            width=width,
        )
        for number, ((height, width), box) in enumerate(zip(sizes, boxes, strict=True))
    ]


def _pictures(
    processor: Any,
    inputs: Mapping[str, Any],
    sizes: list[tuple[int, int]],
    options: Mapping[str, Any],
) -> list[Picture]:
    return [
        Picture(
            processor=processor,
            inputs=inputs,
            options=options,
            index=index,
            height=height,
            width=width,
        )
        for index, (height, width) in enumerate(sizes)
    ]


def flat(images: Any) -> list[Any]:
    """Pictures as a flat list; a size (height, width) is one picture."""
    if _is_size(images) or not isinstance(images, list | tuple):
        return [images]
    return [picture for image in images for picture in flat(image)]


def size_of(image: Any) -> tuple[int, int]:
    """Height and width of a PIL image, of an array or tensor, or of a size itself."""
    if _is_size(image):
        return int(image[0]), int(image[1])
    shape = getattr(image, "shape", None)
    if shape is not None and len(shape) in (2, 3):
        channels_first = len(shape) == 3 and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4)
        height, width = shape[-2:] if channels_first or len(shape) == 2 else shape[:2]
        return int(height), int(width)
    size = getattr(image, "size", None)
    if isinstance(size, tuple) and len(size) == 2:
        return int(size[1]), int(size[0])
    raise InputError(
        f"{describe(image)} is no picture; give a PIL image, an array, or (height, width)",
        code="bad-image",
        got=describe(image),
    )


def _is_size(image: Any) -> bool:
    return (
        isinstance(image, list | tuple)
        and len(image) == 2
        and all(isinstance(n, int | np.integer) for n in image)
    )


def image_token_id(processor: Any) -> int:
    """The id of the token that stands for a part of a picture."""
    ids = [id for id in getattr(processor, "image_token_ids", None) or () if id is not None]
    if not ids:
        raise ModelError(
            f"{type(processor).__name__} names no image token, so attnscope cannot find the image "
            "tokens of a prompt",
            code="no-image-token",
            processor=type(processor).__name__,
        )
    return int(ids[0])


def _positions(processor: Any, input_ids: Any) -> list[NDArray[np.int64]]:
    """By prompt: the positions of its image tokens."""
    token = image_token_id(processor)
    rows = input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids
    if rows and not isinstance(rows[0], list | tuple):
        rows = [rows]
    sequences = [np.flatnonzero(np.asarray(row) == token) for row in rows]
    if not any(map(len, sequences)):
        raise InputError(
            f"the prompt has no image tokens (id {token}); write the image token where the "
            "picture belongs, or use the processor's chat template",
            code="no-image-tokens",
            token=token,
        )
    return sequences


def _assigned(
    processor: Any,
    sequences: list[NDArray[np.int64]],
    sizes: list[tuple[int, int]],
    views: list[list[View]],
) -> list[ImageTokens]:
    """Give each picture its tokens, in order; the numbers must agree."""
    pictures: list[ImageTokens] = []
    for sequence, positions in enumerate(sequences):
        first = 0
        while first < len(positions):
            number = len(pictures)
            tokens = sum(view.tokens for view in views[number]) if number < len(views) else 0
            if not 0 < tokens <= len(positions) - first:
                raise _wrong_number(processor, sequences, [*map(_count, views)])
            height, width = sizes[number]
            pictures.append(
                ImageTokens(
                    sequence=sequence,
                    positions=positions[first : first + tokens],
                    views=tuple(views[number]),
                    height=height,
                    width=width,
                )
            )
            first += tokens
    if len(pictures) < len(sizes):
        raise _wrong_number(processor, sequences, [*map(_count, views)])
    return pictures


def _count(views: list[View]) -> int:
    return sum(view.tokens for view in views)


def _wrong_number(
    processor: Any, sequences: list[NDArray[np.int64]], expected: list[int]
) -> InputError:
    counts = [len(positions) for positions in sequences]
    return InputError(
        f"the prompts have {counts} image tokens, but {type(processor).__name__} makes {expected} "
        "of these pictures; give the pictures of these prompts, in their order, and the options "
        "that the processor got",
        code="wrong-image-tokens",
        tokens=counts,
        expected=expected,
    )


def _squares(
    processor: Any, sequences: list[NDArray[np.int64]], sizes: list[tuple[int, int]]
) -> list[ImageTokens]:
    """Unknown layouts: each run of k² image tokens is a k × k square over its picture."""
    runs = [
        (sequence, run)
        for sequence, positions in enumerate(sequences)
        for run in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
        if len(run)
    ]
    name = type(processor).__name__
    sides = [math.isqrt(len(run)) for _, run in runs]
    square = all(side**2 == len(run) for side, (_, run) in zip(sides, runs, strict=True))
    if not square or len(runs) != len(sizes) or len(set(sides)) > 1:
        raise ModelError(
            f"the layout of the image tokens of {name} is unknown: {len(sizes)} pictures have runs "
            f"of {[len(run) for _, run in runs]} tokens, which are not one equal square each; "
            f"known processors: {', '.join(LAYOUTS)}",
            code="unknown-image-layout",
            processor=name,
            runs=[len(run) for _, run in runs],
        )
    warnings.warn(
        f"the layout of {name} is unknown; its {sides[0] ** 2} tokens per picture are taken as a "
        f"{sides[0]} × {sides[0]} square over the whole picture",
        AttnscopeWarning,
        stacklevel=3,
    )
    return [
        ImageTokens(
            sequence=sequence,
            positions=run,
            views=(View(side, side),),
            height=height,
            width=width,
            assumed=True,
        )
        for (sequence, run), side, (height, width) in zip(runs, sides, sizes, strict=True)
    ]
