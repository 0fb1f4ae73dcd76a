"""Conservation: what the rows of a head must add up to, and by how much rounding may move it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnscope.errors import ConservationError, ModelError

# How far the weights of a row may add up to something other than 1, by the type the model
# computes in; in 16 bits torch's attention uses a rougher exponential.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 2e-3, torch.float16: 2e-3}
# And how many times the rounding of its largest score in float32, in which all types add up
# products: what the log-sum-exp of fused kernels was seen to be off by is 1 to 2 such units.
ROUNDINGS = 8


def check(layers: Sequence[int], off: Tensor, reach: Tensor, dtype: torch.dtype, what: str) -> None:
    """Raise where the numbers of a layer are `off` [layers, B, H] by more than rounding explains,
    given that no score is larger than `reach`; and where they are no numbers at all."""
    allowed = TOLERANCE.get(dtype, 2e-3) + ROUNDINGS * torch.finfo(torch.float32).eps * reach
    if bool((off <= allowed).all()):
        return
    at = int((~(off <= allowed)).flatten(1).any(1).int().argmax())  # the first: others follow it
    if not bool(reach[at].isfinite().all()):
        raise ModelError(
            f"layer {layers[at]}: the model computed NaN or infinite queries or keys, so there is "
            "no attention to measure; its weights may be damaged, or too large for "
            f"{str(dtype).removeprefix('torch.')} (try bfloat16 or float32)"
        )
    raise ConservationError(
        f"layer {layers[at]}: {what} {float(off[at].max()):.3g}, where rounding explains "
        f"{float(allowed[at].max()):.3g}. This is a bug: please report it. "
        "backend='reference' gives the definition for short texts."
    )
