"""Generates completions for a batch of prompts and measures the attention meanwhile.

Prompts are padded on the left, and every completion ends at its end token, so that a prompt has
the same numbers as alone. Sampled tokens depend on the seed of their prompt. Generated tokens that
were fed back belong to the text, in the region `generated`. The last token of a completion is never
fed back, so it is neither a query nor a key.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnscope.capture.scope import Scope
from attnscope.capture.watch import watch
from attnscope.errors import InputError
from attnscope.experiment.cells import Cell, Completion
from attnscope.experiment.unpad import pad_left
from attnscope.spec.generate import GENERATED, Generate
from attnscope.tokens import Region, TokenizedPrompt, pad, prompt_from_ids

_NOTHING = np.zeros((0, 2), dtype=np.int64)


@contextmanager
def generating(
    model: Any,
    tokenizer: Any,
    cells: Sequence[Cell],
    choices: Mapping[str, Any],
    generate: Generate,
    **options: Any,
) -> Iterator[tuple[dict[str, Scope], list[list[int]], torch.Tensor]]:
    """One scope for each of the choices of queries, by the columns of the batch; the tokens of
    every answer; and how much padding stands before each prompt. Masks of queries go by the
    positions of a text."""
    from transformers import LogitsProcessorList

    batch = pad([cell.tokens for cell in cells], tokenizer, side="left")
    left = torch.from_numpy((~batch.real).sum(1))
    length = batch.input_ids.shape[1] + generate.max_new_tokens - 1
    scopes: dict[str, Scope] = {}
    with ExitStack() as undo:
        for name, queries in choices.items():
            chosen = queries if isinstance(queries, str) else pad_left(queries, left, length, False)
            scopes[name] = undo.enter_context(watch(model, queries=chosen, **options))
        drawn = []
        if generate.sample:
            seed = generate.seed
            rows = [_gumbels(None if seed is None else seed + cell.prompt) for cell in cells]
            drawn = [Drawn(rows, generate.temperature, generate.top_p)]
        output = model.generate(
            **{name: tensor.to(model.device) for name, tensor in batch.inputs.items()},
            generation_config=greedy_config(model, tokenizer, generate.max_new_tokens),
            logits_processor=LogitsProcessorList(drawn),
        )
        new = output[:, batch.input_ids.shape[1] :].tolist()
        completions = [_ended(row, end_tokens(model, tokenizer)) for row in new]
        for cell, new in zip(cells, completions, strict=True):
            if not new:
                raise InputError(
                    f"prompt {cell.prompt}: the model generated no token; give another prompt or "
                    "leave out 'generate'",
                    code="empty-completion",
                    prompt=cell.prompt,
                )
        yield scopes, completions, left


def _ended(new: list[int], ends: list[int]) -> list[int]:
    """The tokens up to the one that ended the answer; the rest is padding."""
    at = next((n for n, token in enumerate(new) if token in ends), len(new) - 1)
    return new[: at + 1]


Gumbels = Callable[[int], torch.Tensor]
"""As many Gumbel numbers as are asked for, float64, other ones every time."""


class Drawn:
    """Draws the tokens of every row by random numbers of its own: the largest of the logarithms of
    the probabilities, each plus a Gumbel number, is a draw from them. So neither the rest of a
    batch nor where a generation was broken off changes an answer."""

    def __init__(self, rows: Sequence[Gumbels], temperature: float, top_p: float = 1.0):
        from transformers import TemperatureLogitsWarper, TopPLogitsWarper

        self.rows = rows
        self.warp: list[Any] = [TemperatureLogitsWarper(temperature)]
        if top_p < 1:
            self.warp.append(TopPLogitsWarper(top_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The logits of every row, so that the largest is a draw."""
        logits = scores.float()
        for warp in self.warp:
            logits = warp(input_ids, logits)
        return logits + torch.stack([row(scores.shape[1]) for row in self.rows]).to(logits)


def _gumbels(seed: int | None) -> Gumbels:
    random = torch.Generator()
    if seed is None:
        random.seed()
    else:
        random.manual_seed(seed)
    return lambda n: -(-torch.rand(n, generator=random, dtype=torch.float64).log()).log()


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end an answer: where the model's makers end it, or the tokenizer's. A
    fine-tune or an adapter may have learnt either."""
    end = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])}
    return sorted(ends - {None})


def greedy_config(model: Any, tokenizer: Any, longest: int) -> Any:
    """How answers of up to so many tokens are generated, here and everywhere: the likeliest token
    each time, and nothing that the model's makers recommend: no penalties, no top-k. Drawn tokens
    are made the likeliest beforehand."""
    from transformers import GenerationConfig

    defaults = model.generation_config
    ends = end_tokens(model, tokenizer)
    paddings = (defaults.pad_token_id, tokenizer.pad_token_id, *ends)
    return GenerationConfig(
        max_new_tokens=longest,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=ends or None,
        pad_token_id=next((one for one in paddings if one is not None), None),
        bos_token_id=defaults.bos_token_id,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
    )


def with_completion(cell: Cell, new: Sequence[int], tokenizer: Any) -> Cell:
    """The cell with what was generated."""
    text = tokenizer.decode(new, skip_special_tokens=True)
    longer = _extended(cell.tokens, "", _NOTHING[:, 0], _NOTHING)
    if len(new) > 1:
        fed = prompt_from_ids(new[:-1], tokenizer)
        longer = _extended(cell.tokens, fed.prompt.text, fed.ids, fed.offsets)
    return replace(cell, tokens=longer, completion=Completion(tuple(new), text))


def with_longest_completion(cell: Cell, generate: Generate) -> Cell:
    """The cell as it would be after the longest answer, whatever it says: to choose queries by
    their places before they are there."""
    length = generate.max_new_tokens - 1
    places = np.arange(length, dtype=np.int64)
    offsets = np.stack([places, places + 1], axis=1)
    return replace(
        cell, tokens=_extended(cell.tokens, "?" * length, np.zeros_like(places), offsets)
    )


def _extended(
    tokens: TokenizedPrompt, text: str, ids: NDArray[np.int64], offsets: NDArray[np.int64]
) -> TokenizedPrompt:
    """With what was generated behind it, as its region."""
    start = len(tokens.prompt.text)
    region = Region(start, start + len(text), GENERATED)
    prompt = replace(
        tokens.prompt,
        text=tokens.prompt.text + text,
        regions=(*tokens.prompt.regions, region),
    )
    return TokenizedPrompt(
        prompt,
        np.concatenate([tokens.ids, ids]),
        np.concatenate([tokens.offsets, start + offsets]),
    )
