"""Answers of a model to many problems: batched, and each the same whoever stands beside it.

What is drawn is drawn by the problem's own seed, so that neither the batch nor where an evaluation
was broken off changes an answer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from attnscope.evaluate.condition_parser import ConditionProtocol
from attnscope.evaluate.fit import check_all_fit
from attnscope.experiment.completion import Drawn, Gumbels, greedily
from attnscope.tokens import TokenizedPrompt, pad

WhichSample = tuple[int, int]
"""Which problem, and which of its samples."""


def answers(
    model: Any,
    tokenizer: Any,
    condition: ConditionProtocol,
    prompts: Sequence[TokenizedPrompt],
    asked: Sequence[WhichSample],
    *,
    longest: int,
    batch: int,
    temperature: float,
    seed: int,
    until: Sequence[str] = (),
) -> Iterator[list[tuple[WhichSample, str]]]:
    """A batch at a time: what the model says, greedily where the temperature is 0, up to the
    first of the words `until`."""
    put = {n: condition.asked(prompts[n], tokenizer) for n in {problem for problem, _ in asked}}
    check_all_fit(model, condition.name, put.values(), new_tokens=longest)
    order = sorted(asked, key=lambda one: len(put[one[0]]))
    config = greedily(model, tokenizer, longest)
    config.stop_strings = list(until) or None
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        padded = pad([put[problem] for problem, _ in some], tokenizer, side="left")
        inputs = {name: value.to(model.device) for name, value in padded.inputs.items()}
        rows = [_gumbels(seed, *one) for one in some]
        drawn = [Drawn(rows, temperature)] if temperature > 0 else []
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


def _gumbels(*seed: int) -> Gumbels:
    random = np.random.default_rng(seed)
    return lambda n: torch.from_numpy(random.gumbel(size=n))
