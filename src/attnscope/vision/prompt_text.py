"""Writes the image tokens of a prompt out, as its processor does, with a region for each picture.

Tokenizing the written text gives what the model reads, with the characters of every token. Both
are compared with the processor's own result: what differs is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import InputError, ModelError
from attnscope.tokens.modalities import IMAGE_MARK
from attnscope.tokens.regions import Prompt, Region
from attnscope.tokens.tokenized import TokenizedPrompt, tokenize
from attnscope.vision.image_tokens import image_token_id
from attnscope.vision.model_inputs import check_token_types

if TYPE_CHECKING:
    from PIL.Image import Image

_AROUND = (
    ("vision_start_token", "<|vision_start|>"),
    ("vision_end_token", "<|vision_end|>"),
)
"""Tokens of the Qwen-VL families around a picture: the attribute, and the usual text."""
KEPT = "\0kept-image"
"""Region around what is written for a picture, in prompts whose characters are followed."""


def picture_mark(processor: Any) -> str:
    """What stands for a picture in a prompt without a chat template."""
    tokenizer, token = processor.tokenizer, _replaced_token(processor)
    if not type(processor).__name__.startswith("Qwen"):
        return token
    start, end = (
        getattr(processor, name, None) or getattr(tokenizer, name, None) or usual
        for name, usual in _AROUND
    )
    return f"{start}{token}{end}"


def with_picture_marks(prompt: Prompt, processor: Any) -> Prompt:
    """The prompt with the model's own mark for each `<image>`."""
    mark = picture_mark(processor)
    spans = [match.span() for match in re.finditer(re.escape(IMAGE_MARK), prompt.text)]
    return _replaced(prompt, spans, [mark] * len(spans))


def written_out(prompt: Prompt, processor: Any, images: Sequence[Image]) -> tuple[Prompt, Any]:
    """The prompt with the image tokens of its pictures, and what the processor makes of it.

    The prompt has the model's own mark for every picture. The tokens of picture n are the region
    `image:n`, counted from 1.
    """
    token = _replaced_token(processor)
    if prompt.text.count(token) != len(images):
        raise InputError(
            f"pictures: {len(images)}; places for them in the prompt ({token}): "
            f"{prompt.text.count(token)}; each picture needs one {IMAGE_MARK}, and a chat template "
            "or condition must keep it",
            code="image-count" if images else "no-images",
            marks=prompt.text.count(token),
            images=len(images),
        )
    options = {"add_special_tokens": False} if prompt.complete else {}
    try:
        inputs = processor(
            text=[prompt.text],
            images=[list(images)],
            return_tensors="pt",
            return_text_replacement_offsets=True,
            **options,
        )
        places = inputs.pop("text_replacement_offsets")[0]
        (prepared,) = processor.prepare_inputs_layout(images=[list(images)], text=[prompt.text])[1]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ModelError(
            f"{type(processor).__name__} does not return what it writes for a picture "
            f"({type(error).__name__}: {error}); use attnscope.watch with its inputs",
            code="unsupported-processor",
            processor=type(processor).__name__,
        ) from error
    prompt = _prepared(prompt, prepared, token, processor)
    spans = [match.span() for match in re.finditer(re.escape(token), prompt.text)]
    return _with_regions(prompt, spans, [one["replacement"] for one in places], processor), inputs


def tokenize_with_pictures(prompt: Prompt, processor: Any, inputs: Any) -> TokenizedPrompt:
    """Tokenize a prompt of `written_out`; an error unless the processor made the same tokens."""
    expected = np.asarray(inputs["input_ids"][0])
    for complete in dict.fromkeys((prompt.complete, True)):
        tokens = tokenize(replace(prompt, complete=complete), processor.tokenizer)
        if np.array_equal(tokens.ids, expected):
            check_token_types(processor, inputs)
            return tokens
    raise ModelError(
        f"{type(processor).__name__} makes other tokens of this prompt than its tokenizer makes of "
        f"the same text ({len(expected)} and {len(tokens)}), so attnscope cannot locate its "
        "regions; use attnscope.watch with its inputs",
        code="unsupported-processor",
        processor=type(processor).__name__,
    )


def _replaced_token(processor: Any) -> str:
    """The text that a processor replaces by the tokens of a picture."""
    token = getattr(processor, "image_token", None)
    if not isinstance(token, str) or not token:
        raise ModelError(
            f"{type(processor).__name__} has no image token, so it cannot read prompts with "
            "pictures",
            code="no-image-token",
            processor=type(processor).__name__,
        )
    return token


def _prepared(prompt: Prompt, prepared: str, token: str, processor: Any) -> Prompt:
    """The prompt with what the processor adds around its text (PaliGemma: a begin-of-sequence token
    and a line break)."""
    if prepared == prompt.text:
        return prompt
    before, after = prompt.text.split(token), prepared.split(token)
    if len(before) != len(after) or any(a not in b for a, b in zip(before, after, strict=True)):
        raise ModelError(
            f"{type(processor).__name__} changes the text of the prompt, so attnscope cannot "
            "locate its regions; use attnscope.watch with its inputs",
            code="unsupported-processor",
            processor=type(processor).__name__,
        )
    at, shifts = 0, []
    for old, new in zip(before, after, strict=True):
        first = new.rindex(old) if old else len(new)
        shifts += [(at, new[:first]), (at + len(old), new[first + len(old) :])]
        at += len(old) + len(token)
    for character, added in reversed(shifts):
        if added:
            prompt = prompt.inserted(character, added)
    return prompt


def _with_regions(
    prompt: Prompt, spans: list[tuple[int, int]], written: list[str], processor: Any
) -> Prompt:
    token = processor.tokenizer.convert_ids_to_tokens(image_token_id(processor))
    runs = re.compile(f"(?:{re.escape(token)})+")
    followed = any(region.name.startswith("\0") for region in prompt.regions)
    prompt = _replaced(prompt, spans, written)
    regions, by = list(prompt.regions), 0
    for number, ((start, end), text) in enumerate(zip(spans, written, strict=True), start=1):
        first = start + by
        by += len(text) - (end - start)
        regions += [
            Region(first + run.start(), first + run.end(), f"image:{number}")
            for run in runs.finditer(text)
        ]
        if followed:
            regions.append(Region(first, first + len(text), f"{KEPT}:{number}"))
    return replace(prompt, regions=tuple(regions))


def _replaced(prompt: Prompt, spans: list[tuple[int, int]], texts: list[str]) -> Prompt:
    """The prompt with other texts in place of the spans; regions around them grow."""

    def moved(at: int, *, opening: bool) -> int:
        by = 0
        for (start, end), text in zip(spans, texts, strict=True):
            if at >= end:
                by += len(text) - (end - start)
            elif at > start:  # inside: the region takes all of the new text
                return start + by if opening else start + by + len(text)
        return at + by

    text, last = [], 0
    for (start, end), new in zip(spans, texts, strict=True):
        text += [prompt.text[last:start], new]
        last = end
    regions = tuple(
        Region(moved(r.start, opening=True), moved(r.end, opening=False), r.name)
        for r in prompt.regions
    )
    return replace(prompt, text="".join([*text, prompt.text[last:]]), regions=regions)
