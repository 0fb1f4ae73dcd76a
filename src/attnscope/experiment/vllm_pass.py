"""Step 2 of a batch with `engine: vllm`: every choice of queries is measured by a run of its own.

vLLM's scheduler cuts a batch as it likes; the numbers go by the position of a token in its own
text. Prompts are completed greedily, so every run gives the same completions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnscope.errors import ModelError
from attnscope.experiment.condition_batch import ConditionBatch
from attnscope.experiment.model_pass import PassResult, single_queries, stored_sums
from attnscope.experiment.vllm_model import VllmModel
from attnscope.measures.measure import Need
from attnscope.scope.scope import Scope


@contextmanager
def run_vllm(
    model: VllmModel, batch: ConditionBatch, needs: set[Need], base: PassResult | None
) -> Iterator[PassResult]:
    """One condition, as `run_pass`."""
    keep, plan = "rows" in needs, batch.plan
    generates = batch.experiment.generate is not None
    longest = batch.with_longest_completions() if generates else batch
    scopes: dict[str, Scope] = {}
    completions: list[list[int]] | None = None
    for name in batch.experiment.queries:
        queries = longest.queries(name)
        if queries is not None:
            scopes[name], new = _measure(model, batch, queries, keep)
            if completions not in (None, new) and generates:
                raise _unstable(batch, completions or [], new)
            completions = new
    if generates and completions is None:
        _, completions = _measure(model, batch, "all", keep)
    text = batch if completions is None or not generates else batch.with_completions(completions)
    choices = {name: text.queries(name) for name in batch.experiment.queries}
    known = {name: scope for name, scope in scopes.items() if choices[name] is not None}
    # A choice without any query in this batch has the shapes of another.
    other = next(iter(known.values()), None) or _measure(model, batch, "all", keep)[0]
    yield PassResult(
        batch=text,
        sums={n: stored_sums(known.get(n, other), plan, chosen) for n, chosen in choices.items()},
        single={
            n: single_queries(known.get(n, other), plan, chosen)
            for n, chosen in (choices if keep else {}).items()
        },
        recorded={},
        tables={},
        base=base,
    )


def _measure(
    model: VllmModel, batch: ConditionBatch, queries: Any, keep: bool
) -> tuple[Scope, list[list[int]]]:
    prompts = [cell.tokens.ids.tolist() for cell in batch.cells]
    return model.measure(prompts, queries, new_tokens=batch.max_new_tokens or None, keep=keep)


def _unstable(batch: ConditionBatch, one: list[list[int]], other: list[list[int]]) -> ModelError:
    prompts = [cell.prompt for cell, a, b in zip(batch.cells, one, other, strict=True) if a != b]
    return ModelError(
        f"prompt {prompts[0]}: vLLM gave two completions of the same prompt, so the choices of "
        "queries would be about different texts. Use dtype: float32, or one choice of queries",
        code="completions-differ",
        prompts=prompts,
    )
