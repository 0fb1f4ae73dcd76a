"""How completions are generated: greedy or sampled, the same in runs, evaluations and the page.

Every completion ends at its end token. Sampled tokens depend on the seed of their prompt alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attnscope.spec.generate import Generate
from attnscope.tokens.tokenized import PaddedBatch


def complete(
    model: Any,
    tokenizer: Any,
    batch: PaddedBatch,
    generate: Generate,
    numbers: Sequence[int],
    *,
    until: Sequence[str] = (),
    inputs: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """The tokens of a completion of every prompt of a batch that is padded on the left.

    Prompt `numbers[n]` is sampled with its own seed. A completion may also end at one of the
    strings `until`, which it then contains. `inputs` are those of prompts with pictures.
    """
    from transformers import LogitsProcessorList

    drawn = []
    if generate.sample:
        seed = generate.seed
        rows = [_gumbels(None if seed is None else seed + number) for number in numbers]
        drawn = [Drawn(rows, generate.temperature, generate.top_p)]
    config = greedy_config(model, tokenizer, generate.max_new_tokens)
    config.stop_strings = list(until) or None
    if inputs is None:
        inputs = {name: tensor.to(model.device) for name, tensor in batch.inputs.items()}
    output = model.generate(
        **inputs,
        generation_config=config,
        tokenizer=tokenizer if until else None,
        logits_processor=LogitsProcessorList(drawn),
    )
    new = output[:, batch.input_ids.shape[1] :].tolist()
    return [_ended(row, end_tokens(model, tokenizer)) for row in new]


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
    """Gumbel numbers of a seed; without one, other numbers in every process."""
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
