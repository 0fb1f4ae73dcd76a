"""Alignment and word mass once more: plain transformers, eager cross-attention, loops in numpy.

Uses the package for nothing but its sounds.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau
from transformers import AutoProcessor, WhisperForConditionalGeneration

from attnscope.prompts import speech
from attnscope.prompts.speech import sentences

Array = np.ndarray[Any, Any]
SOUNDS = Path(speech.__file__).parent / "sounds"


@cache
def dense(folder: str, text: str, file: str) -> tuple[list[int], list[tuple[int, int]], Array]:
    """Token ids, their characters, and the cross-attention [layers, heads, tokens, frames]."""
    processor = AutoProcessor.from_pretrained(folder)
    model = WhisperForConditionalGeneration.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    sound = speech.read_mu_law(SOUNDS / file)
    features = processor(sound, sampling_rate=16_000, return_tensors="pt")
    encoded = processor.tokenizer(f" {text}", return_offsets_mapping=True)
    with torch.no_grad():
        out = model(
            **features,
            decoder_input_ids=torch.tensor([encoded["input_ids"]]),
            output_attentions=True,
        )
    weights = torch.stack([layer[0] for layer in out.cross_attentions])
    return encoded["input_ids"], encoded["offset_mapping"], weights.double().numpy()


def reference(folder: str, entry: dict[str, Any]) -> dict[tuple[str, str | None], Array]:
    """[layers, heads] of every measure, by loops over queries and words."""
    ids, places, A = dense(folder, entry["text"], entry["file"])
    seconds = next(s.seconds for s in sentences() if s.file == entry["file"])
    times = (np.arange(1500) + 0.5) * 0.02
    word_of = []
    for first, last in places:
        letters = [n for n in range(first, last) if f" {entry['text']}"[n] != " "]
        found = [
            number
            for number, (start, end, *_) in enumerate(entry["words"])
            if any(start + 1 <= n < end + 1 for n in letters)
        ]
        word_of.append(found[0] if found else None)
    queries = range(1, len(ids) - 2)  # from the token before the first letter on
    heard = A[..., times < seconds]
    middle = (heard * times[times < seconds]).sum(-1) / heard.sum(-1)
    order = [[kendalltau(head[list(queries)], queries)[0] for head in of] for of in middle]
    result: dict[tuple[str, str | None], Array] = {("alignment", None): np.array(order)}
    for item, ahead in (("predicted", 1), ("read", 0)):
        masses = []
        for query in queries:
            word = word_of[query + ahead]
            if word is not None:
                _, _, start, end = entry["words"][word]
                masses.append(A[:, :, query, (times >= start) & (times < end)].sum(-1))
        result["word_mass", item] = np.mean(masses, axis=0)
    return result
