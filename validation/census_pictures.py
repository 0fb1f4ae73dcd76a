"""The census of models with pictures: vision-language models and vision towers of transformers.

    make census                                          # writes the section of docs/models.md
    python validation/census_pictures.py llava vit       # some, printed

As `census.py`: small, random weights, plain and watched, beside the model's own eager attention.
Both prompts of a padded batch have a picture. The number of its tokens is the one that the model
asks for, and a result counts only if other pixels change the output.
"""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import census
from census import SMALL, VOCABULARY, B

SIDE, PATCH, PADDING, BEFORE, AFTER = 32, 8, 3, 7, 9
IMAGE = 90
"""The id of an image token."""
HEADING = "## Models with pictures"
MOST = 12
"""Attempts to find a batch that a model reads."""

SMALL_PICTURES: dict[str, Any] = SMALL | {
    "image_size": SIDE,
    "patch_size": PATCH,
    "depth": 2,
    "num_heads": 4,
    "out_hidden_size": 32,
    "projection_dim": 32,
    "vision_hidden_size": 32,
    "fullatt_block_indexes": [0, 1],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    "num_patches": 16,
    "spatial_merge_size": 2,
    "mm_tokens_per_image": 4,
    "scale_factor": 2,
    "projector_hidden_size": 32,
    "num_query_tokens": 4,
    "num_frames": 2,
    **dict.fromkeys(["image_token_id", "image_token_index"], IMAGE),
    **dict.fromkeys(["video_token_id", "video_token_index"], 91),
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "image_start_token_id": 92,
    "image_end_token_id": 93,
    "boi_token_index": 92,
    "eoi_token_index": 93,
}

_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 1.0,
    }
}
_TILES = {"image_grid_pinpoints": [[2 * SIDE, SIDE]]}
MORE: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    **{kind: {"text_config": _MROPE} for kind in (
        "qwen2_vl", "glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glmga")},
    **{kind: {"vision_config": {"window_size": 16}} for kind in (
        "exaone4_5", "hyperclovax_vision_v2")},
    "qwen2_5_vl": {"text_config": _MROPE, "vision_config": {"window_size": 16}},
    "llava_next": _TILES,
    "llava_next_video": _TILES,
    "llava_onevision": _TILES,
    "llama4": {"vision_config": {"intermediate_size": 128, "projector_input_dim": 32,
                                 "projector_output_dim": 32, "vision_output_dim": 32}},
    "mllama": {"vision_config": {"max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]],
                                 "intermediate_layers_indices": [1], "vision_output_dim": 64,
                                 "num_global_layers": 1},
               "text_config": {"cross_attention_layers": [1]}},
    "vipllava": {"vision_feature_layers": [-1, -2]},
}  # fmt: skip
"""Where that is not enough, by model type."""


def kinds_with_pictures() -> dict[str, str]:
    """Model type to the name of its class."""
    found = {
        **auto.MODEL_FOR_IMAGE_MAPPING_NAMES,
        **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "clip_vision_model": "CLIPVisionModel",
    }
    for kind in ("siglip", "siglip2"):  # two encoders; tests/vision has them
        found.pop(kind, None)
    return {kind: name if isinstance(name, str) else name[0] for kind, name in found.items()}


def built(kind: str, implementation: str | None = None) -> Any:
    """The shrunk model of a type."""
    more = census.MORE.get(kind, {}) | MORE.get(kind, {})
    config = census.shrunk(CONFIG_MAPPING[kind], more, SMALL_PICTURES)
    model_class = getattr(transformers, kinds_with_pictures()[kind])
    model = census.random_model(model_class, config, implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Gemma 3's projector, the gates of Mllama
            if not parameter.any() and (parameter.ndim > 1 or "gate" in name):
                parameter.normal_()
    return model


def pictures(model: Any, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Pixels of one picture for each prompt, in the shapes that families take, named as they take
    them."""
    known = inspect.signature(model.forward).parameters
    pixels = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    vision = getattr(model.config, "vision_config", model.config)
    channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3)) or 3
    side = getattr(vision, "image_size", SIDE)
    side = side if isinstance(side, int) else SIDE
    patch = getattr(vision, "patch_size", PATCH)
    patch = patch if isinstance(patch, int) else PATCH
    grid = side // patch
    if "image_grid_thw" in known or "grid_thw" in known:
        frames = getattr(vision, "temporal_patch_size", 1) or 1
        size = channels * frames * patch**2
        grids = torch.tensor([[1, grid, grid]] * B)
        yield {"pixel_values": pixels(B * grid**2, size), "image_grid_thw": grids}
    if "spatial_shapes" in known:
        yield {
            "pixel_values": pixels(B, grid**2, channels * patch**2),
            "spatial_shapes": torch.tensor([[grid, grid]] * B),
            "pixel_attention_mask": torch.ones(B, grid**2, dtype=torch.long),
        }
    if "aspect_ratio_ids" in known:
        yield {
            "pixel_values": pixels(B, 1, 1, channels, side, side),
            "aspect_ratio_ids": torch.ones(B, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(B, 1, 1, dtype=torch.long),
        }
    if "noise" in known:  # which patches a masked autoencoder keeps
        yield {
            "pixel_values": pixels(B, channels, side, side),
            "noise": torch.arange(grid**2.0).expand(B, -1),
        }
    frames = getattr(vision, "num_frames", 1)
    for before in ((), (1,), (frames,)):
        yield {"pixel_values": pixels(B, *before, channels, side, side)}
    if "image_sizes" in known:
        one = torch.tensor([[side, side]] * B)
        yield {"pixel_values": pixels(B, channels, side, side), "image_sizes": one}
        two = torch.tensor([[2 * side, side]] * B)  # the whole picture and two tiles
        yield {"pixel_values": pixels(B, 3, channels, side, side), "image_sizes": two}


def prompts(model: Any, tokens: int) -> dict[str, torch.Tensor]:
    """A padded batch of prompts, each with a run of image tokens."""
    torch.manual_seed(2)
    known = inspect.signature(model.forward).parameters
    if "input_ids" not in known:
        return {}
    ids = torch.randint(5, 80, (B, BEFORE + tokens + AFTER))
    ids[:, BEFORE : BEFORE + tokens] = IMAGE
    real = torch.ones_like(ids)
    real[1, :PADDING] = 0
    given = {"input_ids": ids, "attention_mask": real}
    types = (ids == IMAGE).long()
    given |= {n: types for n in ("mm_token_type_ids", "token_type_ids") if n in known}
    if "cross_attention_mask" in known:
        given["cross_attention_mask"] = torch.ones(*ids.shape, 1, 1, dtype=torch.long)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(5, VOCABULARY, (B, census.TARGET))
    return given


def batch(model: Any) -> dict[str, torch.Tensor]:
    """Prompts with pictures that the model reads, or the pixels alone."""
    dtype = next(model.parameters()).dtype

    def run(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        floats = {k: v.to(dtype) for k, v in given.items() if v.is_floating_point()}
        return census.outputs(model(**given | floats))

    reasons = []
    for shape, other in zip(pictures(model, 3), pictures(model, 4), strict=True):
        tokens = [4]
        while tokens:
            given = prompts(model, tokens.pop()) | shape
            try:
                made, changed = run(given), run(given | other)
            except Exception as reason:
                reasons.append(census.line(reason))
                features = re.search(r"features:? *(\d+)", str(reason))
                if features is not None and len(reasons) < MOST:
                    found = int(features[1]) // B  # of tokens, or of numbers
                    tokens += [found // 32, found] if found >= 32 else [found]
                continue
            if any(not torch.equal(made[name], changed[name]) for name in made):
                return given
            reasons.append("the output does not depend on the pixels")
    raise RuntimeError("; ".join(dict.fromkeys(reasons)))


count = partial(census.count, built=built, inputs=batch)


OPENING = """## Models with pictures
`validation/census_pictures.py` does the same for models of text and pictures (their text layers)
and for vision models. Both prompts of a padded batch have a picture, and a result counts
only if its pixels change the output. "No model": it could not be built, or the script has no inputs
for it. {totals}

| outcome | measured | attention | model types | output off by | received off by |
| --- | --- | --- | --- | --- | --- |
{table}

| outcome | model types |
| --- | --- |
{others}

"""


def page(before: str, results: dict[str, dict[str, Any]], seconds: float) -> str:
    """The page of models with another section on pictures."""
    table, others = census.tables(results)
    section = OPENING.format(
        totals=census.totals(results, seconds), table="\n".join(table), others="\n".join(others)
    )
    start = before.find(HEADING)
    end = before.index(census.BY_HAND[1])
    return before[: start if start >= 0 else end] + section + before[end:]


def main(wanted: list[str]) -> int:
    """Count these models, or all; 1 where there are defects."""
    census.quiet()
    results: dict[str, dict[str, Any]] = {}
    began = time.monotonic()
    for kind in wanted or sorted(kinds_with_pictures()):
        results[kind] = census.counted_apart(kind, count)
        census.printed(kind, results[kind])
    if not wanted:
        seconds = time.monotonic() - began
        before = census.PAGE.read_text(encoding="utf-8")
        census.PAGE.write_text(page(before, results, seconds), encoding="utf-8")
    return int(any(row["outcome"] in census.DEFECTS for row in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
