"""MLP activations after the non-linearity: how many are near zero, how large they are, and their
distribution (a histogram and the Gini coefficient, over all tokens of a text).

`activations/token_sums.py` takes six sums per token while the layer runs: how many activations
there are, how many are near zero, how many are large (by the thresholds of the base), and the sums
of their absolute values, squares and values.
"""

from attnscope.measures.layer import Layer, Tensor, or_nan
from attnscope.measures.measure import POSITIVE, SHARE, Measure, Numbers

STEP = 0.05
EDGES = tuple(round(STEP * n, 2) for n in range(-20, 21))
"""Edges of the bins of the histogram, in units of the base's 99th percentile of absolute values,
so that prompts and conditions share one axis."""


def _numbers(tokens: Tensor, shares: Tensor) -> Tensor:
    """float64 [B, C, 5], of tokens [B, K, fields] in classes [B, K, C]."""
    import torch

    shares = shares.nan_to_num()
    width, near, large, size, squares, total = (
        torch.einsum("bkc,bk->bc", shares, tokens[..., n]) for n in range(6)
    )
    norms = torch.einsum("bkc,bk->bc", shares, tokens[..., 4].sqrt())
    count, width = or_nan(shares.sum(1)), or_nan(width)
    variance = squares / width - (total / width) ** 2
    return torch.stack([near / width, large / width, size / count, norms / count, variance], -1)


def _of_keys(layer: Layer) -> Numbers:
    import torch

    tokens = layer.recorded["activations"].double()
    keys = torch.from_numpy(layer.keys).to(tokens.device).double()[..., None]
    keys = keys.expand(*tokens.shape[:2], 1)
    return Numbers(_numbers(tokens, keys), tokens=keys.sum(1, keepdim=True))


def _of_classes(layer: Layer) -> Numbers:
    assert layer.shares is not None
    tokens, shares = layer.recorded["activations"].double(), layer.shares.double()
    value = _numbers(tokens, shares.to(tokens.device))[..., :1]
    return Numbers(value[:, None, :, 0], tokens=shares.nan_to_num().sum(1, keepdim=True))


ACTIVATIONS = Measure(
    name="activations",
    range={
        "near_zero": SHARE,
        "large": SHARE,
        **dict.fromkeys(("activation_l1", "activation_l2", "activation_variance"), POSITIVE),
    },
    description="MLP activations after the non-linearity, over the chosen tokens",
    level="layer",
    needs=frozenset({"activations"}),
    per=frozenset({"keys"}),
    columns={
        "near_zero": "share of activations with an absolute value below the base's ε = 1.4826 · "
        "0.25 · MAD (median absolute deviation of the absolute values)",
        "large": "share of activations with an absolute value above the base's 99th percentile",
        "activation_l1": "L1 norm of a token's activations, mean over tokens",
        "activation_l2": "L2 norm of a token's activations, mean over tokens",
        "activation_variance": "variance of the activations",
    },
    function=_of_keys,
)

CLASS_ACTIVATIONS = Measure(
    name="class_near_zero",
    range=SHARE,
    description="near_zero over the tokens of one class",
    level="layer",
    needs=frozenset({"activations"}),
    per=frozenset({"keys", "classes"}),
    function=_of_classes,
)

HISTOGRAM = Measure(
    name="activation_histogram",
    range=SHARE,
    description="share of activations in a bin; `item` is the lower edge of the bin, in units of "
    "the base's 99th percentile of absolute values",
    level="layer",
    needs=frozenset({"activations"}),
    items=tuple(f"{edge:.2f}" for edge in EDGES[:-1]),
    default="0.00",
    function=lambda layer: layer.recorded["histogram"][:, None, :-1],
)

GINI = Measure(
    name="activation_gini",
    range=SHARE,
    description="Gini coefficient of the absolute activations: 0 if all are equal, near 1 if few "
    "are large; accurate to 0.005",
    level="layer",
    needs=frozenset({"activations"}),
    function=lambda layer: layer.recorded["histogram"][:, -1:],
)
