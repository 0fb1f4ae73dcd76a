"""Scores of documents by attention: of the query, minus that of an empty query.

As in arXiv 2410.02642 and 2506.09944: a token of a document has the mean attention from the tokens
of the query, minus the same where the query is `N/A`. A document has the sum over its tokens,
without those that are more than 2 standard deviations below their mean.
"""

from attnscope.measures.layer import Layer, Tensor, align_to_variant, numpy_of, or_nan
from attnscope.measures.measure import ANY, Measure, Numbers

DEVIATIONS = 2
"""How far below the mean a token is left out."""


def document_score(tokens: Tensor, keys: Tensor) -> Tensor:
    """float64 [B, H]: the sum of the scores [B, H, K] of the chosen keys [B, K], without outliers;
    nan without keys."""
    chosen = tokens.where(keys[:, None], float("nan"))
    count = keys.sum(-1)[:, None]
    mean = chosen.nanmean(-1)
    spread = ((chosen - mean[..., None]).square().nansum(-1) / (count - 1).clamp(min=1)).sqrt()
    kept = chosen >= (mean - DEVIATIONS * spread)[..., None]
    return chosen.where(kept, 0.0).sum(-1).where(count > 0, float("nan"))


def _read(layer: Layer) -> Numbers:
    import torch

    base, sums = layer.baseline, layer.sums
    aligned = base.aligned_position
    parts = [
        numpy_of(one.received) / numpy_of(or_nan(one.count))[:, None, None]
        for one in (base.sums, sums)
    ]
    tokens = torch.from_numpy(align_to_variant(parts[0], aligned) - parts[1])
    keys = torch.from_numpy(layer.keys & (aligned >= 0))
    score = document_score(tokens, keys)
    # A sequence without queries has no score: its tokens are nan, which the sum leaves out.
    return Numbers(
        score.where(tokens.isnan().all(-1).logical_not(), float("nan")),
        tokens=keys.sum(-1, keepdim=True).double(),
    )


RERANK = Measure(
    name="rerank",
    range=ANY,
    description="how much more attention the keys get in the base than in the condition",
    level="head",
    per=frozenset({"keys"}),
    compares_to_base=True,
    columns={
        "rerank_score": "sum over the keys of the mean attention from the queries in the base, "
        "minus that in the condition; keys more than 2 standard deviations below their mean are "
        "left out"
    },
    function=_read,
)
