"""How likely a model finds given words: of every text the part behind its context, in batches.

Must not know where the texts come from, nor what they are compared with.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from attnscope.evaluate.condition_parser import ConditionProtocol
from attnscope.evaluate.fit import check_all_fit
from attnscope.tokens import TokenizedPrompt, pad

Continued = tuple[TokenizedPrompt, int]
"""A text, and how many of its tokens are the context."""


def likelihoods(
    model: Any,
    tokenizer: Any,
    condition: ConditionProtocol,
    texts: Sequence[Continued],
    *,
    batch: int,
) -> Iterator[list[tuple[int, float, bool]]]:
    """A batch at a time: which text, the log-probability of what is behind its context, and
    whether that is what the model would have said greedily.

    The condition's prompt is the text as it is given: who wants a filler inserts it before.
    """
    check_all_fit(model, condition.name, [text for text, _ in texts])
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
            options["logits_to_keep"] = kept  # the others would be most of the memory
        with torch.no_grad(), condition.block(model, tokenizer, padded, among=context):
            logits = model(**inputs, **options).logits
        logits = logits if options else logits[:, kept]
        said = logits.float().log_softmax(-1)
        wanted = inputs["input_ids"][:, kept + 1]
        counts = torch.from_numpy(padded.attention_mask.astype(bool) & ~context)
        counts = counts.to(model.device)[:, kept + 1]
        each = said.gather(2, wanted[..., None])[..., 0].double().where(counts, 0.0).sum(1)
        greedy = ((said.argmax(-1) == wanted) | ~counts).all(1)
        yield list(zip(some, each.tolist(), greedy.tolist(), strict=True))
