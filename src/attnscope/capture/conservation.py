"""Conservation: what the rows of a head must add up to, and by how much rounding may move it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnscope.capture.totals import Joint, LayerTotals
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


def check_joint(joint: Joint, dtype: torch.dtype, what: str) -> None:
    """Layers that were reduced together: what the keys received is the number of queries, and every
    row agrees with the log-sum-exp that the model's own attention had."""
    sums, L = joint.sums, len(joint.layers)
    # On the CPU: one copy takes less than starting a kernel for each of these operators.
    mass = sums.mass.view(L, -1, sums.mass.shape[1]).cpu()
    count = joint.selection.count[:, None]
    off = (mass - count).abs() / count.clamp(min=1)
    if sums.drift is not None:
        off = torch.maximum(off, sums.drift.cpu().view_as(mass))
    reach = mass * 0 if sums.reach is None else sums.reach.cpu().view_as(mass)
    check(joint.layers, off, reach, dtype, what)


def check_totals(layers: Mapping[int, LayerTotals], dtype: torch.dtype, what: str) -> None:
    """The same of single layers whose sums are made, with what their sinks took."""
    alike: dict[Any, list[tuple[int, Tensor, Tensor, Tensor, Tensor]]] = {}
    for layer, totals in layers.items():
        if totals.sums is None:
            continue
        mass = totals.sums.mass if totals.sink is None else totals.sums.mass + totals.sink
        count = totals.count()
        if totals.sampled:  # estimates add up only on average; their rows are audited instead
            mass, count = torch.zeros_like(mass), torch.zeros_like(count)
        drift = torch.zeros_like(mass) if totals.drift is None else totals.drift
        reach = mass * 0 if totals.reach is None else totals.reach
        of = layer, mass, count, drift, reach
        alike.setdefault((mass.device, mass.shape), []).append(of)
    for (device, _), parts in alike.items():
        numbers, masses, counts, drifts, reaches = zip(*parts, strict=True)
        wanted = torch.stack(counts).to(device)[..., None]
        off = (torch.stack(masses) - wanted).abs() / wanted.clamp(min=1)
        off = torch.maximum(off, torch.stack(drifts))
        check(numbers, off, torch.stack(reaches), dtype, what)
