"""Answers of a model to many problems: batched, and each the same whoever stands beside it.

A sampled token is the largest of its log-probabilities plus Gumbel noise, which is a draw from the
distribution; the noise comes from the problem's own seed, so that neither the batch nor where an
evaluation was broken off changes an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from attnscope.evaluate.conditions import Way
from attnscope.experiment.answer import ends_of
from attnscope.tokens import TokenizedPrompt, pad

Asked = tuple[int, int]
"""Which problem, and which of its samples."""


class _Drawn(LogitsProcessor):  # type: ignore[misc]
    """Makes the likeliest token of each row a draw."""

    def __init__(self, asked: Sequence[Asked], temperature: float, seed: int):
        self.temperature = temperature
        self.draws = [np.random.default_rng([seed, *one]) for one in asked]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = np.stack([draw.gumbel(size=scores.shape[1]) for draw in self.draws])
        return scores.float() / self.temperature + torch.from_numpy(noise).to(scores).float()


def answers(
    model: Any,
    tokenizer: Any,
    condition: Way,
    prompts: Sequence[TokenizedPrompt],
    asked: Sequence[Asked],
    *,
    longest: int,
    batch: int,
    temperature: float,
    seed: int,
    until: Sequence[str] = (),
) -> Iterator[list[tuple[Asked, str]]]:
    """A batch at a time: what the model says, greedily where the temperature is 0, up to the
    first of the words `until`."""
    put = {n: condition.asked(prompts[n], tokenizer) for n in {problem for problem, _ in asked}}
    order = sorted(asked, key=lambda one: len(put[one[0]]))
    config = _config(model, tokenizer, longest)
    config.stop_strings = list(until) or None
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        padded = pad([put[problem] for problem, _ in some], tokenizer, side="left")
        inputs = {name: value.to(model.device) for name, value in padded.inputs.items()}
        drawn = [_Drawn(some, temperature, seed)] if temperature > 0 else []
        with torch.no_grad(), condition.block(model, tokenizer, padded):
            out = model.generate(
                **inputs,
                generation_config=config,
                tokenizer=tokenizer if until else None,
                logits_processor=LogitsProcessorList(drawn),
            )
        said = tokenizer.batch_decode(out[:, padded.input_ids.shape[1] :], skip_special_tokens=True)
        yield [(one, _upto(until, text)) for one, text in zip(some, said, strict=True)]


def _upto(until: Sequence[str], text: str) -> str:
    return text[: min((text.find(end) for end in until if end in text), default=len(text))]


def _config(model: Any, tokenizer: Any, longest: int) -> GenerationConfig:
    """What is asked, and nothing that the model's makers recommend."""
    ends = ends_of(model, tokenizer)
    padding = tokenizer.pad_token_id
    if padding is None and ends:
        padding = ends[0]
    return GenerationConfig(
        max_new_tokens=longest, do_sample=False, eos_token_id=ends or None, pad_token_id=padding
    )
