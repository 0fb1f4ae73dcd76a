"""What a model looks at while it answers: the context or its own words, token by token, and the
words that it copies.

A row predicts the token after it, so the rows that matter are those of `predicts:generated`.
"""

from typing import Any

import numpy as np

from attnscope.measures.layer import Layer, Tensor, or_nan
from attnscope.measures.measure import SHARE, Measure, Numbers


def _lookback(layer: Layer) -> Tensor:
    """Of every token that was generated and fed back: context against context and new."""
    import torch

    where = layer.single.positions
    begins = where.new_tensor(layer.begins)[:, None]
    K = layer.sums.received.shape[-1]
    new = torch.arange(K, device=where.device) >= begins
    mass = layer.single.read("rows", new.long(), 2)
    context, own = mass[..., 0], mass[..., 1]
    tokens = (where - begins + 1).where((where >= begins) & (begins >= 0), -1)
    many = or_nan(tokens.double())[:, None]
    mean, of_new = context / begins[..., None], own / many
    ratios = [context / (context + own) + 0 * many, mean / (mean + of_new)]
    return torch.stack([ratio.nanmean(-1) for ratio in ratios], -1)


def _retrieval(layer: Layer) -> Numbers:
    """Keys that a head looked at most while the model said the same token."""
    import torch

    where = layer.single.positions
    key = layer.single.read("largest")[0][..., 0].nan_to_num(-1).long()  # [B, H, Q]
    tokens, following = (where.new_tensor(ids) for ids in (layer.of_tokens, layer.following))
    keys = torch.as_tensor(layer.keys, device=where.device).expand(tokens.shape)
    said = following.gather(1, where.clamp(min=0)).where(where >= 0, -1)[:, None]
    at = key.clamp(min=0)
    copied = (key >= 0) & (said >= 0) & (_taken(tokens, at) == said) & _taken(keys, at)
    found = torch.zeros((*key.shape[:2], tokens.shape[1]), device=where.device)
    found.scatter_reduce_(2, at, copied.float(), "amax")
    many = (keys & (tokens >= 0)).sum(1)[:, None].double()
    return Numbers(found.sum(-1) / or_nan(many), tokens=many)


def _taken(of_keys: Tensor, at: Tensor) -> Tensor:
    """What the keys [B, K] have, at places [B, H, Q]."""
    return of_keys[:, None].expand(-1, at.shape[1], -1).gather(2, at)


def _step_mass(layer: Layer) -> Any:
    """[B, H, classes, steps]; nan beyond the end of an answer."""
    assert layer.shares is not None
    where, shares = layer.single.positions, layer.shares
    there = ~shares.isnan().flatten(1).any(1)
    mass = layer.single.read("rows", shares.nan_to_num(), shares.shape[-1]).cpu().double().numpy()
    out = np.full((*mass.shape[:2], mass.shape[3], layer.steps), np.nan)
    for row, (begins, positions) in enumerate(zip(layer.begins, where.cpu().numpy(), strict=True)):
        step = positions - begins + 1
        good = (positions >= 0) & (step >= 0) & (step < layer.steps)
        if there[row] and begins >= 0:
            out[row][..., step[good]] = np.moveaxis(mass[row][:, good], 1, 2)
    return Numbers(out.reshape(*mass.shape[:2], -1))


LOOKBACK = Measure(
    name="lookback",
    range=SHARE,
    about="of the tokens that were generated: how far attention goes back to the context",
    level="head",
    needs=frozenset({"sums", "rows"}),
    answers=True,
    columns={
        "lookback": "mean over new tokens of the mass on the context over that on context and new",
        "lookback_per_token": "the same of the mass per token of each, as published",
    },
    function=_lookback,
)

RETRIEVAL = Measure(
    name="retrieval",
    range=SHARE,
    about="share of the keys that were said while they had the largest weight of the query that "
    "said them",
    level="head",
    needs=frozenset({"sums", "rows"}),
    over=frozenset({"keys"}),
    function=_retrieval,
)

STEP_MASS = Measure(
    name="step_mass",
    range=SHARE,
    about="the mass of a class in the one query that new token n is predicted from; n stands under "
    "target",
    level="head",
    needs=frozenset({"sums", "rows"}),
    over=frozenset({"keys", "classes", "steps"}),
    answers=True,
    function=_step_mass,
)
