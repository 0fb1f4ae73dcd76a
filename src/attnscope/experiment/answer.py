"""A model answers a prompt, and is watched while it does.

One prompt at a time: nothing is padded, and an answer ends where the model ends it. What was
generated and fed back belongs to the text afterwards, in the region `generated`; the last token of
an answer is never fed, so it is neither a query nor a key.

This module must not know measures or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attnscope.capture.scope import Scope
from attnscope.capture.watch import watch
from attnscope.errors import InputError
from attnscope.experiment.cells import Answer, Cell
from attnscope.question.generate import GENERATED, Generate
from attnscope.tokens import Region, TokenizedPrompt, spelled


@contextmanager
def answering(
    model: Any, cell: Cell, choices: Mapping[str, Any], generate: Generate, **options: Any
) -> Iterator[tuple[dict[str, Scope], list[int]]]:
    """One scope for each of the choices of queries, and the answer's tokens."""
    ids = torch.from_numpy(cell.tokens.ids[None]).to(model.device)
    scopes: dict[str, Scope] = {}
    with ExitStack() as undo:
        for name, queries in choices.items():
            scopes[name] = undo.enter_context(watch(model, queries=queries, **options))
        with _drawn_by(model, generate, cell.prompt):
            said = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=_config(model, generate),
            )
        new = said[0, ids.shape[1] :].tolist()
        if not new:
            raise InputError(f"prompt {cell.prompt}: the model generated nothing")
        yield scopes, new


def _config(model: Any, generate: Generate) -> Any:
    """What is asked and nothing that the model's makers recommend: no penalties, no top-k."""
    from transformers import GenerationConfig

    made = model.generation_config
    end = made.eos_token_id
    padding = made.pad_token_id
    if padding is None and end is not None:
        padding = end if isinstance(end, int) else end[0]
    sampling = {"temperature": generate.temperature, "top_p": generate.top_p, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=generate.max_new_tokens,
        do_sample=generate.sample,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=end,
        pad_token_id=padding,
        bos_token_id=made.bos_token_id,
        **(sampling if generate.sample else {"temperature": 1.0, "top_p": 1.0, "top_k": 50}),
    )


@contextmanager
def _drawn_by(model: Any, generate: Generate, prompt: int) -> Iterator[None]:
    """The seed of a prompt inside, and the random numbers of before afterwards."""
    seeded = generate.sample and generate.seed is not None
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices) if seeded else nullcontext():
        if seeded:
            torch.manual_seed((generate.seed or 0) + prompt)
        yield


def with_answer(cell: Cell, new: Sequence[int], tokenizer: Any) -> Cell:
    """The cell with what was generated."""
    text = tokenizer.decode(new, skip_special_tokens=True)
    tokens = _extended(cell.tokens, new[:-1], tokenizer)
    return replace(cell, tokens=tokens, answer=Answer(tuple(new), text))


def with_room(cell: Cell, generate: Generate) -> Cell:
    """The cell as it would be after the longest answer, whatever it says: to choose queries by
    their places before they are there."""
    tokens, room = cell.tokens, generate.max_new_tokens - 1
    end = len(tokens.prompt.text)
    places = end + np.arange(room, dtype=np.int64)
    prompt = replace(
        tokens.prompt,
        text=tokens.prompt.text + "?" * room,
        regions=(*tokens.prompt.regions, Region(end, end + room, GENERATED)),
    )
    longer = TokenizedPrompt(
        prompt,
        np.concatenate([tokens.ids, np.zeros(room, dtype=np.int64)]),
        np.concatenate([tokens.offsets, np.stack([places, places + 1], axis=1)]),
    )
    return replace(cell, tokens=longer)


def _extended(tokens: TokenizedPrompt, fed: Sequence[int], tokenizer: Any) -> TokenizedPrompt:
    start = len(tokens.prompt.text)
    if not fed:
        nothing = Region(start, start, GENERATED)
        regions = (*tokens.prompt.regions, nothing)
        return replace(tokens, prompt=replace(tokens.prompt, regions=regions))
    new = spelled(fed, tokenizer)
    prompt = replace(
        tokens.prompt,
        text=tokens.prompt.text + new.prompt.text,
        regions=(
            *tokens.prompt.regions,
            Region(start, start + len(new.prompt.text), GENERATED),
        ),
    )
    return TokenizedPrompt(
        prompt,
        np.concatenate([tokens.ids, new.ids]),
        np.concatenate([tokens.offsets, start + new.offsets]),
    )
