"""The token that follows each text of a batch, from the forward pass that is measured."""

import inspect
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import ModelError


def next_token(model: Any, inputs: dict[str, Any], last: Tensor) -> Tensor:
    """Run the model; float32 [B, vocabulary]: log-probabilities after position `last`, int64 [B].

    Only the logits of these positions are computed where the model can leave out the others.
    """
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    kept, row = last.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = kept
    else:
        row = last
    logits = getattr(model(**inputs, **options), "logits", None)
    if logits is None or logits.ndim != 3:
        raise ModelError(
            f"{type(model).__name__} has no logits of a next token; leave out the measure "
            "next_token, or load a causal language model",
            code="no-logits",
            model=type(model).__name__,
        )
    return torch.log_softmax(logits[torch.arange(len(last), device=last.device), row].float(), -1)
