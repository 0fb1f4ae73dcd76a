"""Massive activations: the largest entries of the residual stream after a layer, and its median.

The median is that of all entries of the text, over tokens and dimensions, as in the program of
arXiv 2402.17762. `activations/residual_peaks.py` reduces the stream while the model runs.
"""

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import POSITIVE, Measure

TOP = 3
"""How many of the largest entries are kept."""
MASSIVE, TIMES = 100.0, 1000.0
"""The published criterion: a size above 100, and at least about 1,000 times the median."""
FIELDS = (
    *("residual_largest", "residual_second", "residual_third", "residual_median"),
    *("massive_entries", "massive_token", "massive_dimension"),
)
"""What is kept of each text and layer, in this order."""


def residual(layer: Layer) -> Tensor:
    """float64 [B, 1, columns]: the fields, and the ratio of the largest entry to the median."""
    import torch

    fields = layer.recorded["residual"].double()
    ratio = fields[:, :1] / fields[:, 3:4]
    return torch.cat([fields, ratio], 1)[:, None]


RESIDUAL = Measure(
    name="residual",
    range=POSITIVE,
    description="largest entries of the residual stream after a layer, over all tokens",
    level="layer",
    needs=frozenset({"residual"}),
    columns={
        "residual_largest": "largest absolute value",
        "residual_second": "second largest absolute value",
        "residual_third": "third largest absolute value",
        "residual_median": "median absolute value, over tokens and dimensions",
        "massive_entries": f"number of entries above {MASSIVE:g} and at least {TIMES:g} times the "
        "median",
        "massive_token": "position of the token of the largest, from 0",
        "massive_dimension": "dimension of the largest, from 0",
        "residual_ratio": "largest absolute value over the median",
    },
    function=residual,
)
