"""Heavy hitters: the share of all attention that the most attended keys receive."""

from attnscope.measures.layer import Layer, Tensor, or_nan
from attnscope.measures.measure import SHARE, Measure, Numbers

SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
"""Shares of the visible keys, rounded up; each is measured."""


def top_share(received: Tensor, keys: Tensor) -> Tensor:
    """float64 [B, H, shares], of received [B, H, K] and the number of visible keys [B]."""
    import torch

    ordered = received.double().sort(-1, descending=True)[0].cumsum(-1)
    shares = torch.tensor(SHARES, dtype=torch.float64, device=received.device)
    # 0.1 · 30 is slightly more than 3 in floating point.
    count = (shares * keys.to(received.device)[:, None] - 1e-9).ceil().long().clamp(min=1)
    at = (count - 1)[:, None].expand(-1, received.shape[1], -1)
    return ordered.gather(2, at) / or_nan(ordered[..., -1:])


def _read(layer: Layer) -> Numbers:
    sums = layer.sums
    keys = (sums.visibility("eligible") > 0).sum(-1)
    uniform = top_share(sums.visibility("uniform")[:, None], keys)
    return Numbers(top_share(sums.received, keys), uniform=uniform)


TOP_SHARE = Measure(
    name="top_share",
    range=SHARE,
    description="share of the attention to all keys that the most attended keys receive; `item` is "
    "the share of the visible keys, rounded up",
    level="head",
    items=tuple(f"{share:g}" for share in SHARES),
    default="0.2",
    function=_read,
)
