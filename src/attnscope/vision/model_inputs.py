"""What a model gets beside the token ids of prompts with pictures: pixels and token types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.errors import ModelError

_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
_OF_TEXT = ("input_ids", "attention_mask", "labels", *_TOKEN_TYPES)


def picture_inputs(
    processor: Any, input_ids: NDArray[np.int64], images: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Tensors for `model(input_ids=…, **inputs)`: pixels, and the modality of every token.

    Args:
        processor: The processor of the model.
        input_ids: [B, N] the prompts, with the image tokens of their pictures, padded.
        images: The pictures of each prompt, in the order of its tokens.
    """
    import torch

    pictures_alone = processor_inputs(processor, images)
    inputs = {name: value for name, value in pictures_alone.items() if name not in _OF_TEXT}
    shape = pictures_alone["input_ids"].shape
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == shape:
            raise ModelError(
                f"{type(processor).__name__} makes {name!r} for every token, which attnscope does "
                "not know; use attnscope.watch with its inputs",
                code="unsupported-processor",
                processor=type(processor).__name__,
                value=name,
            )
    types = {
        name: torch.as_tensor(_token_types(processor, pictures_alone, name, input_ids))
        for name in _TOKEN_TYPES
        if name in pictures_alone
    }
    return {**inputs, **types}


def processor_inputs(processor: Any, images: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """What a processor makes of pictures alone; prompts without pictures are left out."""
    some = [list(of) for of in images if of]
    return dict(
        processor(
            text=[processor.image_token * len(of) for of in some],
            images=some,
            padding=True,
            return_tensors="pt",
        )
    )


def check_token_types(processor: Any, inputs: Mapping[str, Any]) -> None:
    """An error unless the token types of a prompt follow from its ids."""
    for name in _TOKEN_TYPES:
        if name in inputs:
            _token_types(processor, inputs, name, np.asarray(inputs["input_ids"]))


def _token_types(
    processor: Any, inputs: Mapping[str, Any], name: str, input_ids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[B, N]: the modality of every token, or zeros, as the processor itself makes them."""

    def modalities(ids: ArrayLike) -> NDArray[np.int64]:
        return np.array(processor.create_mm_token_type_ids(np.asarray(ids).tolist()))

    types = np.asarray(inputs[name])
    if not types.any():
        return np.zeros_like(input_ids)
    if np.array_equal(types, modalities(inputs["input_ids"])):
        return modalities(input_ids)
    raise ModelError(
        f"{type(processor).__name__} makes {name!r} in a way that attnscope does not know; use "
        "attnscope.watch with its inputs",
        code="unsupported-processor",
        processor=type(processor).__name__,
        value=name,
    )
