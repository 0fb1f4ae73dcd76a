"""Log-probabilities of given continuations, computed in batches."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from attnscope.tokens import TokenizedPrompt, pad
from attnscope.tokens.tokenized import PaddedBatch

Continuation = tuple[TokenizedPrompt, int]
"""A text, and the number of its first tokens that are the context."""
Block = Callable[[PaddedBatch, list[int], Any], AbstractContextManager[None]]
"""(batch, its texts, which tokens are context) → the `with` block of its forward pass."""


def likelihoods(
    model: Any, tokenizer: Any, texts: Sequence[Continuation], block: Block, *, batch: int
) -> Iterator[tuple[int, float, bool]]:
    """For every text, in any order: its index, the log-probability of its continuation, and
    whether greedy decoding would generate that continuation."""
    order = sorted(range(len(texts)), key=lambda n: len(texts[n][0]))
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        padded = pad([texts[n][0] for n in some], tokenizer, side="right")
        inputs = {name: value.to(model.device) for name, value in padded.inputs.items()}
        starts = np.array([texts[n][1] for n in some])
        context = np.arange(padded.input_ids.shape[1]) < starts[:, None]
        kept = torch.arange(starts.min() - 1, padded.input_ids.shape[1] - 1, device=model.device)
        options: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            options["logits_to_keep"] = kept  # all logits would need most of the memory
        with torch.no_grad(), block(padded, some, context):
            logits = model(**inputs, **options).logits
        logits = logits if options else logits[:, kept]
        log_probabilities = logits.float().log_softmax(-1)
        targets = inputs["input_ids"][:, kept + 1]
        counts = torch.from_numpy(padded.attention_mask.astype(bool) & ~context)
        counts = counts.to(model.device)[:, kept + 1]
        each = log_probabilities.gather(2, targets[..., None])[..., 0].double()
        sums = each.where(counts, 0.0).sum(1)
        greedy = ((log_probabilities.argmax(-1) == targets) | ~counts).all(1)
        yield from zip(some, sums.tolist(), greedy.tolist(), strict=True)
