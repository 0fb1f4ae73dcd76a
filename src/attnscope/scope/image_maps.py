"""The attention of a scope over the pictures of its prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import InputError, ScopeError, is_int, unknown
from attnscope.scope.per_query import PerQuerySums
from attnscope.vision.image_tokens import ImageTokens, flat, image_tokens, patch_tokens


class ImageMaps(PerQuerySums):
    """The methods of a `Scope` for prompts with pictures."""

    _images: list[ImageTokens] | None = None
    _pictures: list[Any]
    """The pictures as they were given: for a page."""
    _patch_size: int | None = None
    """Side of a patch in pixels, if the model is a vision tower."""

    def place_images(
        self, processor: Any, inputs: Mapping[str, Any], images: Sequence[Any], **options: Any
    ) -> list[ImageTokens]:
        """Find the tokens of every picture, so that `image_map` can draw them.

        Args:
            processor: The processor of the model; for a vision tower its image processor.
            inputs: What the processor returned.
            images: The pictures that the processor got, in order; or their sizes (height, width).
            **options: The image options of the processor's call, such as `do_pan_and_scan=True`.

        Returns:
            One `ImageTokens` per picture: positions of its tokens, and their boxes in the picture.
        """
        self._pictures = flat(images)
        if "input_ids" in inputs:
            self._images = image_tokens(processor, inputs, images, **options)
        elif self._patch_size is None:
            raise InputError(
                "the inputs have no token ids, and the measured model is no vision tower with "
                "patches of one size; give what the processor returned",
                code="no-image-tokens",
            )
        else:
            keys = max((keys for _, keys in self._extents.values()), default=0)
            size = self._patch_size
            self._images = patch_tokens(
                processor, inputs, images, keys=keys, patch_size=size, **options
            )
        return self._images

    def image_map(self, layer: int, image: int = 0, query: int | None = None) -> Tensor:
        """[H, rows, columns]: the attention of a query to each place of a picture.

        The map adds up to the attention to all tokens of the picture that have a place. Before
        this, `place_images` must find the tokens.

        Args:
            layer: A measured layer.
            image: The number of the picture in the batch, from 0.
            query: The position of a counted query, which needs `watch(…, keep=True)`; negative
                positions count from the last token. Default: the mean over all counted queries.
        """
        if self._images is None:
            raise ScopeError(
                "the places of the image tokens are unknown; call "
                "scope.place_images(processor, inputs, images) first",
                code="images-not-placed",
            )
        if not is_int(image) or image >= len(self._images):
            raise unknown("image", image, range(len(self._images)))
        picture = self._images[image]
        if query is None:
            block = self._read(layer)
            received = block.computed().received[picture.sequence]
            weights = received / block.count[picture.sequence].to(received.device)
        else:
            weights = self.row(layer, self._position(layer, query), picture.sequence)
        if picture.positions[-1] >= weights.shape[-1]:
            raise InputError(
                f"the picture's tokens reach position {picture.positions[-1]}, but the measured "
                f"text has {weights.shape[-1]} keys; give the inputs of this forward pass",
                code="other-inputs",
                keys=weights.shape[-1],
            )
        return torch.from_numpy(picture.to_map(weights.cpu().numpy())).float()

    def _position(self, layer: int, query: int) -> int:
        return query if query >= 0 else self._extents[layer][0] + query
