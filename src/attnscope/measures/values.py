"""Value similarity: how similar are the value vectors of a span of tokens?"""

import numpy as np

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import Measure, Numbers

# Number of tokens converted to float64 at a time.
CHUNK = 4096


def value_similarity(values: Tensor, span: Tensor) -> Tensor:
    """Mean pairwise cosine [B, G] of the value vectors [B, G, K, D] over a span, bool [B, K].

    The squared length of the sum of n unit vectors is n plus the cosines of all ordered pairs, so
    no n × n matrix is needed. A vector of length 0 has no direction and is left out; nan for fewer
    than two.
    """
    import torch

    B, G, K, D = values.shape
    total = values.new_zeros(B, G, D, dtype=torch.float64)
    count = values.new_zeros(B, G, dtype=torch.float64)
    for at in range(0, K, CHUNK):
        vectors = values[:, :, at : at + CHUNK].double()
        length = vectors.norm(dim=-1)
        valid = (length > 0) & span[:, None, at : at + CHUNK].to(values.device)
        units = vectors / length.where(valid, 1.0)[..., None]
        total += (units * valid[..., None]).sum(2)
        count += valid.sum(2)
    cosines = (total.square().sum(-1) - count) / (count * (count - 1))
    return cosines.where(count > 1, torch.nan)


def _read(layer: Layer) -> Numbers:
    import torch

    inserted = layer.baseline.inserted
    value = value_similarity(layer.recorded["values"], torch.from_numpy(inserted))
    return Numbers(value, tokens=inserted.sum(axis=1).astype(np.float64)[:, None])


VALUE_SIMILARITY = Measure(
    name="value_similarity",
    range=(-1.0, 1.0),
    description="mean pairwise cosine similarity of the inserted tokens' value vectors",
    level="key/value head",
    needs=frozenset({"values"}),
    compares_to_base=True,
    function=_read,
)
