"""Attention while a model generates: to the context, to its completion, and to copied tokens.

The attention row of a query predicts the next token, so these measures read the rows of
`predicts:generated`.
"""

import numpy as np

from attnscope.measures.by_query import query_mass
from attnscope.measures.layer import Layer, Tensor, numpy_of, or_nan
from attnscope.measures.measure import SHARE, Measure, Numbers


def _lookback(layer: Layer) -> Tensor:
    """Attention to the context over attention to context and completion, per generated token."""
    import torch

    where = layer.per_query.positions
    start = where.new_tensor(layer.completions.start)[:, None]
    K = layer.sums.received.shape[-1]
    new = torch.arange(K, device=where.device) >= start
    mass = layer.per_query.mass(new.long(), 2)
    context, completion = mass[..., 0], mass[..., 1]
    tokens = (where - start + 1).where((where >= start) & (start >= 0), -1)
    many = or_nan(tokens.double())[:, None]
    mean, of_new = context / start[..., None], completion / many
    ratios = [context / (context + completion) + 0 * many, mean / (mean + of_new)]
    return torch.stack([ratio.nanmean(-1) for ratio in ratios], -1)


def _retrieval(layer: Layer) -> Numbers:
    """Share of the keys with the largest weight when the model generated the same token."""
    import torch

    where = layer.per_query.positions
    key = layer.per_query.largest()[0].nan_to_num(-1).long()  # [B, H, Q]
    ids = layer.token_ids, layer.completions.next_token
    tokens, next_token = (where.new_tensor(each) for each in ids)
    keys = torch.as_tensor(layer.keys, device=where.device).expand(tokens.shape)
    generated = next_token.gather(1, where.clamp(min=0)).where(where >= 0, -1)[:, None]
    at = key.clamp(min=0)
    copied = (key >= 0) & (generated >= 0) & (_taken(tokens, at) == generated) & _taken(keys, at)
    retrieved = torch.zeros((*key.shape[:2], tokens.shape[1]), device=where.device)
    retrieved.scatter_reduce_(2, at, copied.float(), "amax")
    many = (keys & (tokens >= 0)).sum(1)[:, None].double()
    return Numbers(retrieved.sum(-1) / or_nan(many), tokens=many)


def _taken(of_keys: Tensor, at: Tensor) -> Tensor:
    """Values of the keys [B, K] at positions [B, H, Q]."""
    return of_keys[:, None].expand(-1, at.shape[1], -1).gather(2, at)


def _step_mass(layer: Layer) -> Numbers:
    """[B, H, classes, steps]; nan after the end of a completion."""
    mass, steps = numpy_of(query_mass(layer)), layer.completions.max_new_tokens
    out = np.full((*mass.shape[:2], mass.shape[3], steps), np.nan)
    where = layer.per_query.positions.cpu().numpy()
    for row, (start, positions) in enumerate(zip(layer.completions.start, where, strict=True)):
        step = positions - start + 1
        good = (positions >= 0) & (step >= 0) & (step < steps) & (start >= 0)
        out[row][..., step[good]] = np.moveaxis(mass[row][:, good], 1, 2)
    return Numbers(out.reshape(*mass.shape[:2], -1))


LOOKBACK = Measure(
    name="lookback",
    range=SHARE,
    description="share of the attention of generated tokens that goes to the context",
    level="head",
    needs=frozenset({"sums", "rows"}),
    about_generation=True,
    columns={
        "lookback": "mass on the context over mass on context and completion, mean over generated "
        "tokens",
        "lookback_per_token": "the same, each mass divided by its number of tokens, as published",
    },
    function=_lookback,
)

RETRIEVAL = Measure(
    name="retrieval",
    range=SHARE,
    description="share of the chosen keys that had the largest weight of the head when the model "
    "generated the same token",
    level="head",
    needs=frozenset({"sums", "rows"}),
    per=frozenset({"keys"}),
    function=_retrieval,
)

STEP_MASS = Measure(
    name="step_mass",
    range=SHARE,
    description="attention to the keys of a class when the model generates token n; the column "
    "`target` holds n",
    level="head",
    needs=frozenset({"sums", "rows"}),
    per=frozenset({"keys", "classes", "steps"}),
    about_generation=True,
    function=_step_mass,
)
