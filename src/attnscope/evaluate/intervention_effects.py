"""Mass and effect of every head for a class of tokens.

The mass is the attention from the last prompt token. The effect is the change in log-probability
of the right answer when the head cannot attend to the class.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch

from attnscope.capture.watch import watch
from attnscope.errors import InputError
from attnscope.evaluate.condition_parser import parse
from attnscope.evaluate.fit import check_all_fit
from attnscope.evaluate.tasks import Task
from attnscope.interventions.effect import effect
from attnscope.tokens import DEFAULT, TokenizedPrompt


def effects(
    model: Any,
    tokenizer: Any,
    task: Task,
    prompts: Sequence[TokenizedPrompt],
    classes: Sequence[str],
    *,
    layers: list[int] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> pl.DataFrame:
    """Columns problem, class, layer, head, mass, effect; `classes` are written CLASS or
    CLASS@REGION. A problem whose prompt has no such token is left out of that class."""
    changes = {text: parse(f"knockout:{text}").attention_change for text in classes}
    answers = [
        tokenizer(sample.answer, add_special_tokens=False)["input_ids"] for sample in task.samples
    ]
    check_all_fit(model, "baseline", prompts, new_tokens=1 + max(map(len, answers)))
    rows: list[dict[str, Any]] = []
    for n, (answer, prompt) in enumerate(zip(answers, prompts, strict=True)):
        ids = torch.tensor([[*prompt.ids.tolist(), *answer]], device=model.device)
        order = torch.arange(ids.shape[1])[None]
        last, in_answer = order == len(prompt) - 1, order >= len(prompt)
        with torch.no_grad(), watch(model, layers=layers, queries=last) as scope:
            model(input_ids=ids)
        of_class = DEFAULT.ids(ids.cpu().numpy(), tokenizer)
        for text, change in changes.items():
            assert change is not None
            keys = of_class == DEFAULT.index(change.tokens or "")
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
        if progress is not None:
            progress("effects", n + 1, len(prompts))
    if not rows:
        raise InputError(
            f"no prompt has a token of {', '.join(classes)}; choose other classes",
            code="no-token-in-classes",
            classes=tuple(classes),
        )
    return pl.DataFrame(rows)
