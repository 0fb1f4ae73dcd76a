"""Mass and effect of every head: how much of the attention a class of tokens gets from where an
answer begins, and what the right answer loses when nobody can look at it in that head."""

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
    meant = {text: parse(f"knockout:{text}").cut for text in classes}
    right = [
        tokenizer(sample.answer, add_special_tokens=False)["input_ids"] for sample in task.samples
    ]
    check_all_fit(model, "baseline", prompts, new_tokens=1 + max(map(len, right)))
    rows: list[dict[str, Any]] = []
    for n, (answered, asked) in enumerate(zip(right, prompts, strict=True)):
        ids = torch.tensor([[*asked.ids.tolist(), *answered]], device=model.device)
        order = torch.arange(ids.shape[1])[None]
        last, said = order == len(asked) - 1, order >= len(asked)
        with torch.no_grad(), watch(model, layers=layers, queries=last) as scope:
            model(input_ids=ids)
        of_class = DEFAULT.ids(ids.cpu().numpy(), tokenizer)
        for text, cut in meant.items():
            assert cut is not None
            keys = of_class == DEFAULT.index(cut.tokens or "")
            keys &= np.arange(ids.shape[1]) < len(asked)
            if cut.region is not None:
                keys[:, : len(asked)] &= asked.mask(cut.region)
            if not keys.any():
                continue
            found = effect(
                model, {"input_ids": ids}, keys=torch.from_numpy(keys), answer=said, layers=layers
            )
            assert found.logprob is not None
            for at, layer in enumerate(found.layers):
                mass = scope.mass(layer, torch.from_numpy(keys).long(), 2)[0, :, 1].tolist()
                rows += [
                    {"problem": n, "class": text, "layer": layer, "head": head}
                    | {"mass": looked, "effect": lost}
                    for head, (looked, lost) in enumerate(
                        zip(mass, found.logprob[0, at].tolist(), strict=True)
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
