"""Mass and effect of every head for a class of tokens.

The mass is the attention from the last prompt token. The effect is the change in log-probability
of the right answer when the head cannot attend to the class.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch

from attnscope.errors import InputError
from attnscope.evaluate.conditions import parse
from attnscope.interventions.effect import effect
from attnscope.loading.compatibility import check_fit
from attnscope.scope.watch import watch
from attnscope.tokens import DEFAULT, ClassSet, TokenizedPrompt


def effects(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[TokenizedPrompt],
    answers: Sequence[str],
    classes: Sequence[str],
    class_set: ClassSet = DEFAULT,
    *,
    layers: list[int] | None = None,
) -> pl.DataFrame:
    """Columns problem, class, layer, head, mass, effect; `classes` of the set are written CLASS or
    CLASS@REGION. A problem whose prompt has no such token is left out of that class."""
    changes = {text: parse(f"knockout:{text}").knockout for text in classes}
    rows: list[dict[str, Any]] = []
    for n, (answer, prompt) in enumerate(zip(answers, prompts, strict=True)):
        new = tokenizer(answer, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*prompt.ids.tolist(), *new]], device=model.device)
        check_fit(model.config, ids[0].cpu().numpy(), beyond=None)
        order = torch.arange(ids.shape[1])[None]
        last, in_answer = order == len(prompt) - 1, order >= len(prompt)
        with torch.no_grad(), watch(model, layers=layers, queries=last) as scope:
            model(input_ids=ids)
        of_class = class_set.ids(ids.cpu().numpy(), tokenizer)
        for text, change in changes.items():
            assert change is not None
            keys = of_class == class_set.index(change.tokens or "")
            keys &= np.arange(ids.shape[1]) < len(prompt)
            if change.region is not None:
                keys[:, : len(prompt)] &= prompt.mask(change.region)
            if not keys.any():
                continue
            measured = effect(
                *(model, {"input_ids": ids}),
                keys=torch.from_numpy(keys),
                answer=in_answer,
                layers=layers,
            )
            assert measured.logprob is not None
            for at, layer in enumerate(measured.layers):
                mass = scope.mass(layer, torch.from_numpy(keys).long(), 2)[0, :, 1].tolist()
                rows += [
                    {"problem": n, "class": text, "layer": layer, "head": head}
                    | {"mass": of_head, "effect": change_of_head}
                    for head, (of_head, change_of_head) in enumerate(
                        zip(mass, measured.logprob[0, at].tolist(), strict=True)
                    )
                ]
    if not rows:
        raise InputError(
            f"no prompt has a token of {', '.join(classes)}; choose other classes",
            code="no-token-in-classes",
            classes=tuple(classes),
        )
    return pl.DataFrame(rows)
