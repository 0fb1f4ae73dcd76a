"""Judges choices by likelihood: the completion of a prompt is the most likely of its choices.

The log-probability of a choice is the sum over its tokens, given the prompt under the condition.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from attnscope.evaluate.likelihood import likelihoods
from attnscope.experiment.intervene import intervene
from attnscope.experiment.plan import Plan
from attnscope.loading import load
from attnscope.loading.compatibility import check_fit
from attnscope.tokens import Prompt, TokenizedPrompt, tokenize
from attnscope.tokens.tokenized import PaddedBatch

Cell = tuple[int, str]
"""The number of a prompt, and a condition."""
BATCH = 32


def choice_logprobs(plan: Plan, choices: Sequence[Sequence[str]]) -> dict[Cell, list[float]]:
    """The log-probability of every choice of every prompt, in nats."""
    (of_model,) = plan.models
    model, tokenizer = load(
        of_model.info.pinned,
        device=plan.experiment.device,
        dtype=plan.experiment.dtype,
        bos=plan.experiment.bos,
    )
    cells = {(cell.prompt, cell.condition): cell.tokens for cell in of_model.cells()}
    base = plan.experiment.base
    new = [
        [_tokens_after(cells[n, base], choice, tokenizer) for choice in of_prompt]
        for n, of_prompt in enumerate(choices)
    ]
    logprobs: dict[Cell, list[float]] = {}
    for name, condition in plan.experiment.conditions.items():

        @contextmanager
        def block(
            batch: PaddedBatch, members: list[int], context: Any, condition: Any = condition
        ) -> Iterator[None]:
            classes = plan.experiment.classes.values()
            with intervene(condition, model, tokenizer, batch, classes, context):
                yield

        texts, owners = [], []
        for n, of_prompt in enumerate(new):
            for ids in of_prompt:
                context = cells[n, name]
                texts.append((_joined(context, ids), len(context)))
                owners.append(n)
                check_fit(model.config, texts[-1][0].ids, beyond=None)
        scored = likelihoods(model, tokenizer, texts, block, batch=BATCH)
        values = {text: value for text, value, _ in scored}
        for text, n in enumerate(owners):
            logprobs.setdefault((n, name), []).append(values[text])
    return logprobs


def best(logprobs: Sequence[float], choices: Sequence[str]) -> str:
    """The most likely choice; of equal ones, the first."""
    return choices[int(np.argmax(logprobs))]


def probability(logprobs: Sequence[float], choices: Sequence[str], answer: str) -> float:
    """The probability of the answer among the choices."""
    weights = np.exp(np.array(logprobs) - max(logprobs))
    return float(weights[choices.index(answer)] / weights.sum())


def _tokens_after(context: TokenizedPrompt, choice: str, tokenizer: Any) -> list[int]:
    """The tokens of a choice after a prompt. Where text goes on in the same line, a space separates
    the two."""
    text = context.prompt.text
    same_line = not text[-1:].isspace() and not choice[:1].isspace() and not context.prompt.complete
    written = f" {choice}" if same_line else choice
    both = tokenize(Prompt(text + written, (), context.prompt.complete), tokenizer).ids
    if np.array_equal(both[: len(context)], context.ids):
        return both[len(context) :].tolist()  # type: ignore[no-any-return]
    # The last token of the prompt and the first of the choice would be one.
    return list(tokenizer(written, add_special_tokens=False)["input_ids"])


def _joined(context: TokenizedPrompt, ids: Sequence[int]) -> TokenizedPrompt:
    """The prompt, with more tokens that are in no region."""
    end = len(context.prompt.text)
    offsets = np.full((len(ids), 2), end, dtype=context.offsets.dtype)
    return TokenizedPrompt(
        context.prompt,
        np.concatenate([context.ids, np.array(ids, dtype=context.ids.dtype)]),
        np.concatenate([context.offsets, offsets]),
    )
