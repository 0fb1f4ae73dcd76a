"""Filler uniformity: how uniform is the attention that the inserted tokens receive?"""

import numpy as np

from attnscope.measures.layer import Array, Layer, Mask
from attnscope.measures.measure import POSITIVE, Measure, Numbers
from attnscope.measures.slope import ratio


def uniformity(average: Array, inserted: Mask) -> tuple[Array, Array]:
    """Coefficient of variation of the averages over the inserted tokens, and their number."""
    used = np.isfinite(average) & inserted
    size = used.sum(-1).astype(np.float64)
    mean = ratio(np.where(used, average, 0.0).sum(-1), size)
    off = np.where(used, average - mean[..., None], 0.0)
    return ratio(np.sqrt(ratio((off * off).sum(-1), size)), mean), size


def _read(layer: Layer) -> Numbers:
    value, size = uniformity(layer.sums.averages, layer.baseline.inserted[:, None])
    return Numbers(value, tokens=size)


UNIFORMITY = Measure(
    name="uniformity",
    range=POSITIVE,
    description="coefficient of variation of the average attention over the inserted tokens; 0 if "
    "uniform",
    level="head",
    compares_to_base=True,
    function=_read,
)
