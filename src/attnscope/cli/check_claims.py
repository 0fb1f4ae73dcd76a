"""What the prompts of an experiment can decide: for `run --check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from attnscope.stats.decidable import decidable, detectable, lacking
from attnscope.stats.means import MINIMUM
from attnscope.stats.resampling import ResamplingUnits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnscope.experiment.plan import Plan
    from attnscope.spec.claims import Claim


def decides(plan: Plan, claims: Sequence[Claim]) -> Iterator[dict[str, Any]]:
    """What the prompts can decide: one difference, and every line of the claims."""
    prompts = range(len(plan.metadata))
    table = pl.DataFrame(plan.metadata, infer_schema_length=None)
    metadata = table.with_columns(pl.Series("prompt", prompts, pl.Int64))

    def units(cluster: str | None) -> int:
        return ResamplingUnits(metadata, cluster).count(prompts)

    n = units(None)
    text = f"{n} prompts find a difference of {detectable(n):.2f} standard deviations four times in"
    few = f"different prompts: {n}; intervals and p-values need at least {MINIMUM}"
    yield {"least": MINIMUM, "text": f"{text} five" if n >= MINIMUM else few}
    measured = {
        model.label: range(model.info.layers or 1) if model.layers is None else model.layers
        for model in plan.models
    }
    for claim in claims:
        if why := lacking(claim, plan.experiment, measured):
            named: dict[str, Any] = {"claim": claim.name, "model": None, "least": 0}
            yield {**named, "text": f"  {claim.name}: not measured: {why}"}
            continue
        for label, model in _judged_models(plan, claim).items():
            heads = model.info.heads or 1 if model.heads is None else len(model.heads)
            results = decidable(claim, units, len(measured[model.label]), heads)
            for line, one in zip(claim.lines, results, strict=True):
                text = f"  {claim.name} ({label}), {line.text}: {one.text}"
                yield {"claim": claim.name, "model": label, **one._asdict(), "text": text}


def _judged_models(plan: Plan, claim: Claim) -> dict[str, Any]:
    """By label, the models that a claim is judged for: each, unless the claim names them."""
    models = {model.label: model for model in plan.models}
    places = dict(zip(("a", "b"), models, strict=False))
    named = [q.model for line in claim.lines for q in line.quantities]
    if not all(named):
        return models
    labels = dict.fromkeys(n if n in models else places[str(n)] for n in named)
    return {" and ".join(map(str, labels)): models[str(next(iter(labels)))]}
