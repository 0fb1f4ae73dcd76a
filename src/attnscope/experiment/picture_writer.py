"""Writes the prompts of a model with the tokens of their pictures, and finds these tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attnscope.errors import AttnscopeWarning, InputError, ModelError
from attnscope.experiment.pictures import PromptPictures
from attnscope.tokens import Alignment, Prompt, TokenizedPrompt, apply_chat_template
from attnscope.tokens.chat import Turn
from attnscope.tokens.modalities import IMAGE_MARK
from attnscope.vision.image_tokens import ImageTokens, image_token_id, image_tokens
from attnscope.vision.prompt_text import tokenize_with_pictures, with_picture_marks, written_out


class PictureWriter:
    """Writes prompts for one model; what it learns of their pictures is in `places`."""

    def __init__(self, pictures: PromptPictures, processor: Any, base: str):
        self.pictures = pictures
        self.processor = processor
        self.base = base
        self.token = image_token_id(processor)
        self.places: dict[tuple[int, tuple[str, ...]], list[ImageTokens] | None] = {}
        """By prompt and names of its pictures: the grids of tokens; None if the layout is
        unknown."""
        self.unknown = ""
        """Why the tokens of some picture have no known places."""
        self._inputs: Any = None

    def plain(self, prompt: Prompt, number: int, condition: str) -> Prompt:
        """A prompt without a chat template."""
        return self._written(with_picture_marks(prompt, self.processor), number, condition)

    def chat(
        self,
        turns: Sequence[Turn],
        asking: bool,
        number: int,
        condition: str,
        options: Mapping[str, Any],
    ) -> Prompt:
        """A prompt in the chat template of the processor."""
        template = getattr(self.processor, "chat_template", None)
        defaults = {"chat_template": template} if isinstance(template, str) else {}
        prompt = apply_chat_template(
            turns,
            self.processor.tokenizer,
            generation_prompt=asking,
            image_mark=IMAGE_MARK,
            **{**defaults, **options},
        )
        return self._written(prompt, number, condition)

    def _written(self, prompt: Prompt, number: int, condition: str) -> Prompt:
        images = self.pictures.images(number, condition or self.base)
        prompt, self._inputs = written_out(prompt, self.processor, images)
        self._find(number, condition or self.base, images)
        return prompt

    def tokenized(self, prompt: Prompt, number: int, condition: str) -> TokenizedPrompt:
        """The tokens of the prompt that was written last."""
        return tokenize_with_pictures(prompt, self.processor, self._inputs)

    def _find(self, number: int, condition: str, images: list[Any]) -> None:
        """The grids of tokens of the prompt that was written last."""
        key = number, self.pictures.names(number, condition)
        if key in self.places or not images:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AttnscopeWarning)  # a guess is marked as one
                self.places[key] = image_tokens(self.processor, self._inputs, images)
        except ModelError as error:
            self.places[key], self.unknown = None, str(error)

    def check(
        self, number: int, row: Mapping[str, tuple[TokenizedPrompt, Alignment | None]]
    ) -> None:
        """Raise an error if a condition has lost or divided the tokens of a picture."""
        (base, _) = row[self.base]
        for condition, (tokens, _) in row.items():
            names = self.pictures.names(number, condition)
            tokens_here = int((tokens.ids == self.token).sum())
            pictures = self.places.get((number, names))
            expected = int((base.ids == self.token).sum())
            if pictures is not None:
                expected = sum(len(picture.positions) for picture in pictures)
            if tokens_here != expected:
                raise InputError(
                    f"condition {condition!r} leaves {tokens_here} of the {expected} tokens of the "
                    "pictures; a condition, a filler or 'truncate' must keep all of them",
                    code="image-tokens-lost",
                    condition=condition,
                    tokens=tokens_here,
                    expected=expected,
                )

    def rows(
        self, number: int, row: Mapping[str, tuple[TokenizedPrompt, Alignment | None]]
    ) -> list[dict[str, Any]]:
        """What a run stores of the pictures of a prompt: their files, sizes, tokens and grids."""
        return [
            {
                "prompt": number,
                "condition": condition,
                "image": image + 1,
                "file": self.pictures.names(number, condition)[image].partition("#")[0],
                "blank": "#" in self.pictures.names(number, condition)[image],
                "height": picture.height,
                "width": picture.width,
                "assumed": picture.assumed,
                "positions": picture.positions.tolist(),
                "views": [[v.rows, v.columns, v.box, v.newline] for v in picture.views],
            }
            for condition, image, picture in self.placed(number, row)
        ]

    def placed(
        self, number: int, row: Mapping[str, tuple[TokenizedPrompt, Alignment | None]]
    ) -> Iterator[tuple[str, int, ImageTokens]]:
        """By condition: the number of each picture of a prompt from 0, and its tokens there."""
        for condition, (tokens, _) in row.items():
            names = self.pictures.names(number, condition)
            positions, first = np.flatnonzero(tokens.ids == self.token), 0
            for image, picture in enumerate(self.places.get((number, names)) or ()):
                part = positions[first : first + len(picture.positions)]
                first += len(part)
                yield condition, image, replace(picture, positions=part)
