"""Layouts: which views of a picture a processor makes, one small function per family.

The sizes come from the settings of the processor and the shapes of its outputs. The callers compare
the number of tokens with the token ids of the prompt, so a wrong layout is an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from attnscope.errors import ModelError
from attnscope.vision.views import WHOLE, Box, View, tiles


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of a batch, and how its processor was called."""

    processor: Any
    inputs: Mapping[str, Any]
    """What the processor returned."""
    options: Mapping[str, Any]
    """The keyword arguments of the processor's call."""
    index: int
    """The number of the picture in the batch."""
    height: int
    width: int

    @property
    def image_processor(self) -> Any:
        """The image processor; it may be the processor itself."""
        return getattr(self.processor, "image_processor", self.processor)

    @cached_property
    def _images_kwargs(self) -> dict[str, Any]:
        if self.image_processor is self.processor:
            return dict(self.options)
        merged = self.processor._merge_kwargs(
            self.processor.valid_processor_kwargs, tokenizer_init_kwargs={}, **self.options
        )
        return dict(merged["images_kwargs"])

    def setting(self, name: str) -> Any:
        """A setting of the image processor in this call."""
        kwargs = self._images_kwargs
        if kwargs.get(name) is not None:
            return kwargs[name]
        return getattr(self.image_processor, name, None)

    def pixels(self) -> tuple[int, int]:
        """Height and width of what the vision tower gets for this picture."""
        height, width = self.inputs["pixel_values"][self.index].shape[-2:]
        return int(height), int(width)


Layout = Callable[[Picture], list[View]]


def merged_patches(picture: Picture) -> list[View]:
    """Qwen-VL: a grid of the picture's own shape; m × m patches are one token."""
    frames, rows, columns = (int(n) for n in picture.inputs["image_grid_thw"][picture.index])
    merge = int(picture.setting("merge_size"))
    return [View(rows // merge, columns // merge) for _ in range(frames)]


def one_square(picture: Picture) -> list[View]:
    """PaliGemma: the picture is resized to a square of tokens."""
    side = _side(picture, picture.processor.image_seq_length)
    return [View(side, side)]


def patches(picture: Picture) -> list[View]:
    """LLaVA 1.5: a patch is a token; tokens of the tower without a place come first."""
    size = picture.processor.patch_size
    height, width = picture.pixels()
    before = _tokens_before(picture)
    if before < 0:
        raise _unsupported(picture, "it removes a token of a tower that has no class token")
    grid = View(height // size, width // size, visible_box(picture))
    return [View(1, before, None), grid] if before else [grid]


def tiles_with_newlines(picture: Picture) -> list[View]:
    """LLaVA-NeXT: the whole picture, then a finer grid of tiles whose rows end with a newline."""
    if _tokens_before(picture):
        raise _unsupported(picture, "its towers keep their class token")
    height, width = picture.inputs["pixel_values"][0][0].shape[-2:]
    rows, columns = height // picture.processor.patch_size, width // picture.processor.patch_size
    return [View(rows, columns), _unpadded(picture, rows, columns, height, width)]


def onevision(picture: Picture) -> list[View]:
    """LLaVA-OneVision: as LLaVA-NeXT, with a limit of tokens; one square if there are several."""
    side = _side(picture, picture.processor.num_image_tokens)
    if not _alone(picture):
        longest = max(picture.height, picture.width)
        return [View(side, side, _padded_square(picture, longest)), View(1, 1, None)]
    height, width = picture.inputs["pixel_values"][0][0].shape[-2:]
    grid = _unpadded(picture, side, side, height, width)
    limit = int(picture.processor.vision_aspect_ratio.removeprefix("anyres_max_"))
    ratio = math.sqrt(grid.rows * grid.columns / (limit * side**2))
    if ratio > 1.1:  # the model interpolates the grid to a smaller one
        grid = View(int(grid.rows // ratio), int(grid.columns // ratio), grid.box, newline=True)
    return [View(side, side), grid]


def crops(picture: Picture) -> list[View]:
    """Gemma 3: the whole picture, then its crops side by side (pan and scan)."""
    side = _side(picture, picture.processor.image_seq_length)
    full = View(side, side)
    if not picture.setting("do_pan_and_scan"):
        return [full]
    height, width = picture.height, picture.width
    smallest = picture.setting("pan_and_scan_min_crop_size")
    long, short = max(height, width), min(height, width)
    if long / short < picture.setting("pan_and_scan_min_ratio_to_activate"):
        return [full]
    number = min(long // smallest, math.floor(long / short + 0.5))
    number = min(max(2, number), picture.setting("pan_and_scan_max_num_crops"))
    step = math.ceil(long / number)
    if min(step, short) < smallest:
        return [full]
    edges = [min(step * n, long) / long for n in range(number + 1)]
    boxes: list[Box] = [
        (low, 0.0, high, 1.0) if width >= height else (0.0, low, 1.0, high)
        for low, high in itertools.pairwise(edges)
    ]
    return [full, *(View(side, side, box) for box in boxes)]


def tiles_then_whole(picture: Picture) -> list[View]:
    """Idefics 3 and SmolVLM: tiles row by row, then the whole picture."""
    side = _side(picture, picture.options.get("image_seq_len") or picture.processor.image_seq_len)
    full = View(side, side)
    if not picture.setting("do_image_splitting"):
        return [full]
    height, width = picture.height, picture.width
    if picture.setting("do_resize"):
        module = import_module(type(picture.processor.image_processor).__module__)
        height, width = module._resize_output_size_rescale_to_max_len(
            height, width, max_len=picture.setting("size")["longest_edge"]
        )
        height, width = module._resize_output_size_scale_below_upper_bound(
            height, width, max_len=module.MAX_IMAGE_SIZE
        )
    tile = picture.setting("max_image_size")["longest_edge"]
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / ratio) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * ratio) / tile)
    return [full] if rows == columns == 1 else [*tiles(rows, columns, side), full]


def tiles_then_thumbnail(picture: Picture) -> list[View]:
    """InternVL: tiles row by row, then the whole picture if there are several tiles."""
    side = _side(picture, picture.processor.image_seq_length)
    most = picture.setting("max_patches")
    if not picture.setting("crop_to_patches") or most <= 1:
        return [View(side, side)]
    size = picture.setting("size")
    module = import_module(type(picture.processor.image_processor).__module__)
    columns, rows = module.get_optimal_tiled_canvas(
        (picture.height, picture.width),
        (size["height"], size["width"]),
        picture.setting("min_patches"),
        most,
    )
    grid = tiles(rows, columns, side)
    return grid if len(grid) == 1 else [*grid, View(side, side)]


LAYOUTS: dict[str, Layout] = {
    "Gemma3Processor": crops,
    "Idefics3Processor": tiles_then_whole,
    "InternVLProcessor": tiles_then_thumbnail,
    "LlavaNextProcessor": tiles_with_newlines,
    "LlavaOnevisionProcessor": onevision,
    "LlavaProcessor": patches,
    "PaliGemmaProcessor": one_square,
    "Qwen2VLProcessor": merged_patches,
    "Qwen2_5_VLProcessor": merged_patches,
    "Qwen3VLProcessor": merged_patches,
    "SmolVLMProcessor": tiles_then_whole,
}
"""By the class of the processor."""


def visible_box(picture: Picture) -> Box:
    """The part of the picture that the vision tower gets, after padding and a centre crop."""
    height, width = picture.height, picture.width
    box = WHOLE
    if picture.setting("do_pad"):
        height = width = max(height, width)
        box = _padded_square(picture, width)
    size = picture.setting("size")
    if picture.setting("do_resize") and "shortest_edge" in size:
        short, long = min(height, width), max(height, width)
        new_short, new_long = size["shortest_edge"], int(size["shortest_edge"] * long / short)
        height, width = (new_short, new_long) if height <= width else (new_long, new_short)
    elif picture.setting("do_resize"):
        height, width = size["height"], size["width"]
    if not picture.setting("do_center_crop"):
        return box
    crop = picture.setting("crop_size")
    left, top = (width - crop["width"]) // 2, (height - crop["height"]) // 2
    inner = (left, top, left + crop["width"], top + crop["height"])
    x, y = (box[2] - box[0]) / width, (box[3] - box[1]) / height
    return (
        box[0] + inner[0] * x,
        box[1] + inner[1] * y,
        box[0] + inner[2] * x,
        box[1] + inner[3] * y,
    )


def _padded_square(picture: Picture, longest: int) -> Box:
    """The box of a square in whose middle the picture lies."""
    left, top = (longest - picture.width) // 2, (longest - picture.height) // 2
    return (
        -left / picture.width,
        -top / picture.height,
        (longest - left) / picture.width,
        (longest - top) / picture.height,
    )


def _unpadded(picture: Picture, rows: int, columns: int, height: int, width: int) -> View:
    """The grid of all tiles without the rows or columns of padding.

    The processor scales the picture into the best resolution and pads it to the middle; the model
    removes the patches that contain padding alone.
    """
    from transformers.image_processing_utils import select_best_resolution

    best_height, best_width = select_best_resolution(
        (picture.height, picture.width), picture.setting("image_grid_pinpoints")
    )
    rows, columns = rows * (best_height // height), columns * (best_width // width)
    x_scale, y_scale = best_width / picture.width, best_height / picture.height
    if x_scale < y_scale:
        new_width, new_height = best_width, min(math.ceil(picture.height * x_scale), best_height)
    else:
        new_height, new_width = best_height, min(math.ceil(picture.width * y_scale), best_width)
    left, top = (best_width - new_width) // 2, (best_height - new_height) // 2
    skipped_rows = skipped_columns = 0
    if picture.width / picture.height > columns / rows:
        skipped_rows = (rows - int(round(picture.height * (columns / picture.width), 7))) // 2
    else:
        skipped_columns = (columns - int(round(picture.width * (rows / picture.height), 7))) // 2
    patch_height, patch_width = best_height / rows, best_width / columns
    box = (
        (skipped_columns * patch_width - left) / new_width,
        (skipped_rows * patch_height - top) / new_height,
        ((columns - skipped_columns) * patch_width - left) / new_width,
        ((rows - skipped_rows) * patch_height - top) / new_height,
    )
    return View(rows - 2 * skipped_rows, columns - 2 * skipped_columns, box, newline=True)


def _alone(picture: Picture) -> bool:
    """Whether the picture is the only one of its prompt."""
    first = 0
    for number in picture.inputs["batch_num_images"]:
        first += int(number)
        if picture.index < first:
            return int(number) == 1
    return True


def _tokens_before(picture: Picture) -> int:
    processor = picture.processor
    removed = 1 if processor.vision_feature_select_strategy == "default" else 0
    return int(processor.num_additional_image_tokens) - removed


def _side(picture: Picture, tokens: int) -> int:
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise _unsupported(picture, f"its {tokens} tokens per picture are no square")
    return side


def _unsupported(picture: Picture, reason: str) -> ModelError:
    name = type(picture.processor).__name__
    return ModelError(
        f"attnscope cannot place the image tokens of {name}: {reason}",
        code="unknown-image-layout",
        processor=name,
    )
