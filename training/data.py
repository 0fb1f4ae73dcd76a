"""From documents to rows of token ids, with the weight of each token in the loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from multiprocessing import Pool
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from attnscope.prompts import Sample, math_samples, spatial_samples
from attnscope.tokens import turns_of
from corpus import Turns, documents, worked
from models import Recipe
from vocabulary import in_format

MERGES = Path(__file__).with_name("merges.json")
PART = 2000


def rows(recipe: Recipe, workers: int) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """[rows, length] ids and weights in hundredths; 0 for padding."""
    parts = [(recipe, first) for first in range(0, recipe.documents, PART)]
    if workers > 1:
        with Pool(workers) as pool:
            encoded = pool.starmap(encode, parts)
    else:
        encoded = [encode(*part) for part in parts]
    return pack([one for part in encoded for one in part], recipe.length)


def encode(recipe: Recipe, first: int) -> list[tuple[NDArray[np.int16], NDArray[np.uint8]]]:
    """One part of the documents as ids and weights."""
    tokenizer = tokenizer_of(recipe.format)
    conversations = list(islice(conversations_of(recipe, first), PART))
    texts, begins = [], []
    for turns in conversations:
        messages = [{"role": role, "content": text} for role, text in turns]
        full = tokenizer.apply_chat_template(messages, tokenize=False)
        prompt = tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        assert full.startswith(prompt)
        texts.append(full)
        begins.append(len(prompt))
    made = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    out = []
    for ids, offsets, begin in zip(made["input_ids"], made["offset_mapping"], begins, strict=True):
        answer = np.array([start >= begin for start, _ in offsets])
        weights = np.where(answer, 100, round(100 * recipe.prompt_weight)).astype(np.uint8)
        out.append((np.array(ids, dtype=np.int16), weights))
    return out


def conversations_of(recipe: Recipe, first: int) -> Iterator[Turns]:
    """The documents from number `first`; each part has its own seed."""
    count = min(PART, recipe.documents - first)
    seed = 1_000_003 * (recipe.seed + 1) + first
    if recipe.data == "corpus":
        yield from documents(count, seed)
    elif recipe.data == "spatial":
        for sample in spatial_samples(count, seed=seed, split="train"):
            yield conversation(sample, sample.answer or "")
    else:
        others = documents(count, seed)
        draw = Random(seed)
        for sample in math_samples(count, seed=seed):
            yield next(others) if draw.random() < 0.2 else conversation(sample, worked(sample))


def conversation(sample: Sample, answer: str) -> Turns:
    """A sample as turns, with its answer."""
    return [*((role, part.text) for role, part in turns_of(sample.prompt)), ("assistant", answer)]


@cache
def tokenizer_of(format: str):
    """The tokenizer of a chat format."""
    return in_format(MERGES, format)


def pack(
    encoded: list[tuple[NDArray[np.int16], NDArray[np.uint8]]], length: int
) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """One document after another into rows; one that does not fit begins the next row."""
    ids, weights, used = [], [], length
    for one, weight in encoded:
        if len(one) > length:
            raise ValueError(f"a document of {len(one)} tokens is longer than a row of {length}")
        if used + len(one) > length:
            ids.append(np.zeros(length, dtype=np.int16))
            weights.append(np.zeros(length, dtype=np.uint8))
            used = 0
        ids[-1][used : used + len(one)] = one
        weights[-1][used : used + len(one)] = weight
        used += len(one)
    return np.stack(ids), np.stack(weights)
