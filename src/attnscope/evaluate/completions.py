"""Generates completions for many problems in batches.

A completion does not depend on the other prompts of its batch. Sampled tokens use a random seed
of their problem and sample, so an interrupted evaluation continues with the same completions.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from attnscope.evaluate.condition_parser import ConditionProtocol
from attnscope.evaluate.fit import check_all_fit
from attnscope.experiment.completion import Drawn, Gumbels, greedy_config
from attnscope.tokens import TokenizedPrompt, pad

SampleKey = tuple[int, int]
"""Number of the problem, and number of the sample of that problem."""


def generate_completions(
    model: Any,
    tokenizer: Any,
    condition: ConditionProtocol,
    prompts: Sequence[TokenizedPrompt],
    samples: Sequence[SampleKey],
    *,
    max_new_tokens: int,
    batch: int,
    temperature: float,
    seed: int,
    until: Sequence[str] = (),
) -> Iterator[list[tuple[SampleKey, str]]]:
    """Yield the completions of one batch at a time, each cut at the first of the strings `until`.

    Temperature 0 means greedy decoding.
    """
    problems = {problem for problem, _ in samples}
    changed = {n: condition.change_prompt(prompts[n], tokenizer) for n in problems}
    check_all_fit(model, condition.name, changed.values(), new_tokens=max_new_tokens)
    order = sorted(samples, key=lambda one: len(changed[one[0]]))
    config = greedy_config(model, tokenizer, max_new_tokens)
    config.stop_strings = list(until) or None
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        padded = pad([changed[problem] for problem, _ in some], tokenizer, side="left")
        inputs = {name: value.to(model.device) for name, value in padded.inputs.items()}
        rows = [_gumbels(seed, *one) for one in some]
        sampling = [Drawn(rows, temperature)] if temperature > 0 else []
        with torch.no_grad(), condition.intervention(model, tokenizer, padded):
            out = model.generate(
                **inputs,
                generation_config=config,
                tokenizer=tokenizer if until else None,
                logits_processor=LogitsProcessorList(sampling),
            )
        new = out[:, padded.input_ids.shape[1] :]
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        yield [(one, _cut_at(until, text)) for one, text in zip(some, texts, strict=True)]


def _cut_at(until: Sequence[str], text: str) -> str:
    return text[: min((text.find(end) for end in until if end in text), default=len(text))]


def _gumbels(*seed: int) -> Gumbels:
    random = np.random.default_rng(seed)
    return lambda n: torch.from_numpy(random.gumbel(size=n))
