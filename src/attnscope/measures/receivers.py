"""Receiver heads: sentences to which many later sentences attend (arXiv 2506.19143).

The vertical score of a sentence is the mean attention from the tokens of a later sentence to its
tokens, averaged over the sentences that are at least 4 later. Computed for 64 sentences at a time,
so that memory grows with the length of the text alone.
"""

import numpy as np
from numpy.typing import NDArray

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import ANY, POSITIVE, Measure

LATER = 4
"""A sentence counts for those that are at least so many before it."""
FEWEST = 4
"""A kurtosis needs so many sentences."""
ROUNDING = 1e-5
"""A standard deviation below this share of the mean may be rounding."""
TOGETHER = 64
"""Sentences in one pass over the stored rows."""


def _renumbered(sentences: NDArray[np.int64], keys: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[B, K]: sentence of each token among those with chosen tokens, from 0; -1 for none."""
    numbers = np.full(sentences.shape, -1, dtype=np.int64)
    for row, (of_row, chosen) in enumerate(zip(sentences, keys, strict=True)):
        inside = chosen & (of_row >= 0)
        numbers[row, inside] = np.unique(of_row[inside], return_inverse=True)[1]
    return numbers


def _counts(numbers: Tensor, many: int) -> Tensor:
    """float64 [B, sentences]: how often each sentence occurs in [B, N]; -1 is none."""
    counts = numbers.new_zeros((len(numbers), many + 1)).double()
    counts.scatter_add_(
        1, numbers.where(numbers >= 0, many), numbers.new_ones(1).double().expand(numbers.shape)
    )
    return counts[:, :many]


def vertical_scores(layer: Layer) -> Tensor:
    """float64 [B, H, sentences of the keys]; nan for a sentence without 4 later ones."""
    import torch

    rows = layer.per_query
    where = rows.positions
    sentences = where.new_tensor(_renumbered(layer.sentence_numbers, layer.keys))
    of_query = sentences.gather(1, where.clamp(min=0)).where(where >= 0, -1)
    many = max(1, int(sentences.max()) + 1)
    tokens, queries = _counts(sentences, many), _counts(of_query, many)
    has = (queries > 0).double()
    number = torch.arange(many, device=where.device)
    later = has @ (number[:, None] >= number + LATER).double()  # [B, sentences]
    share = 1 / queries.gather(1, of_query.clamp(min=0)).clamp(min=1)  # of a query in its sentence
    parts = [torch.zeros((*layer.sums.received.shape[:2], 0), dtype=torch.float64)]
    for first in range(0, many, TOGETHER):
        some = number[first : first + TOGETHER]
        inside = (sentences[..., None] == some).double()
        mass = rows.mass(inside, len(some)).double().nan_to_num()  # [B, H, Q, sentences]
        counts = (of_query[..., None] >= some + LATER) * share[..., None]
        total = torch.einsum("bhqs,bqs->bhs", mass, counts)
        divisor = later[:, some] * tokens[:, some]
        parts.append((total / divisor[:, None]).where(divisor[:, None] > 0, np.nan).cpu())
    return torch.cat(parts, -1)


def kurtosis(values: Tensor) -> Tensor:
    """Over the last axis without nan: Fisher's, of the sample as it is (0 for a normal
    distribution); nan for fewer than 4 values, and for values that differ by rounding alone."""
    count = (~values.isnan()).sum(-1)
    mean = values.nanmean(-1, keepdim=True)
    deviations = values - mean
    variance, fourth = (deviations.pow(power).nanmean(-1) for power in (2, 4))
    return (fourth / variance.square() - 3).where(
        (count >= FEWEST) & (variance > (ROUNDING * mean[..., 0]) ** 2), np.nan
    )


def _read(layer: Layer) -> Tensor:
    """[B, H, 2]: the kurtosis, and the sentence with the largest score."""
    import torch

    scores = vertical_scores(layer)
    spread = kurtosis(scores)
    largest = scores.nan_to_num(-1.0).argmax(-1).double()
    return torch.stack([spread, largest.where(~spread.isnan(), np.nan)], -1)


RECEIVERS = Measure(
    name="receivers",
    range={"receiver_kurtosis": ANY, "receiver_sentence": POSITIVE},
    description="how few sentences receive the attention of later sentences",
    level="head",
    needs=frozenset({"sums", "rows"}),
    per=frozenset({"keys"}),
    columns={
        "receiver_kurtosis": "Fisher's kurtosis, over the sentences of the keys, of the mean "
        f"attention that a sentence gets from the sentences at least {LATER} after it; null below "
        f"{FEWEST} such sentences",
        "receiver_sentence": "number of the sentence that gets most, from 0",
    },
    function=_read,
)
