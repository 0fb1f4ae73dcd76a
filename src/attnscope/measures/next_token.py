"""The effect of a condition on the next token: how far its probabilities move."""

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import ANY, POSITIVE, SHARE, Measure


def _read(layer: Layer) -> Tensor:
    """[B, 1, 3], from log-probabilities [B, vocabulary] of base and variant."""
    import torch

    base = layer.baseline.recorded["next_token"].double()
    variant = layer.recorded["next_token"].to(base)
    kl = (base.exp() * (base - variant)).nan_to_num(0.0).sum(-1).clamp(min=0)
    likely = base.argmax(-1, keepdim=True)
    change = (variant.gather(-1, likely) - base.gather(-1, likely))[:, 0]
    another = (variant.argmax(-1) != likely[:, 0]).to(kl)
    return torch.stack([kl, change, another], -1)[:, None]


NEXT_TOKEN = Measure(
    name="next_token",
    range={
        "next_token_kl": POSITIVE,
        "next_token_logprob": ANY,
        "next_token_changed": SHARE,
    },
    description="effect of a condition on the token that follows the text",
    level="text",
    needs=frozenset({"next_token"}),
    columns={
        "next_token_kl": "Kullback–Leibler divergence of the next token, KL(base ‖ condition), in "
        "nats",
        "next_token_logprob": "change of the log-probability of the base's most likely next token",
        "next_token_changed": "1 if another token is the most likely one, else 0",
    },
    compares_to_base=True,
    function=_read,
)
