"""What comes out of the MLP's non-linearity: how much of it is near zero, and how large it is.

Made of sums that were taken for every token as the layer ran (`capture/token_sums.py`): how many
activations it has, how many are near zero and how many large by the thresholds of the *base*, and
the sums of their sizes, squares and selves.
"""

from attnscope.measures.layer import Layer, Tensor, or_nan
from attnscope.measures.measure import POSITIVE, SHARE, Measure, Numbers


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

    tokens = layer.made["activations"].double()
    keys = torch.from_numpy(layer.keys).to(tokens.device).double()[..., None]
    keys = keys.expand(*tokens.shape[:2], 1)
    return Numbers(_numbers(tokens, keys), tokens=keys.sum(1, keepdim=True))


def _of_classes(layer: Layer) -> Numbers:
    assert layer.shares is not None
    tokens, shares = layer.made["activations"].double(), layer.shares.double()
    value = _numbers(tokens, shares.to(tokens.device))[..., :1]
    return Numbers(value[:, None, :, 0], tokens=shares.nan_to_num().sum(1, keepdim=True))


ACTIVATIONS = Measure(
    name="activations",
    range={
        "near_zero": SHARE,
        "large": SHARE,
        **dict.fromkeys(("activation_l1", "activation_l2", "activation_variance"), POSITIVE),
    },
    about="what comes out of the MLP's non-linearity, over the tokens that count",
    level="layer",
    needs=frozenset({"activations"}),
    over=frozenset({"keys"}),
    columns={
        "near_zero": "share of activations nearer to zero than the base's ε: 1.4826 · 0.25 times "
        "the median distance of sizes from their median",
        "large": "share of activations farther from zero than the base's 99th percentile of sizes",
        "activation_l1": "mean over tokens of the L1 norm of their activations",
        "activation_l2": "mean over tokens of the L2 norm of their activations",
        "activation_variance": "variance of the activations around their mean",
    },
    function=_of_keys,
)

CLASS_ACTIVATIONS = Measure(
    name="class_near_zero",
    range=SHARE,
    about="share of the activations of a class's tokens that are near zero, as in near_zero",
    level="layer",
    needs=frozenset({"activations"}),
    over=frozenset({"keys", "classes"}),
    function=_of_classes,
)
