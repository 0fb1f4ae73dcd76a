"""Checks two conservation laws on every pass.

The weights of a head add up to the number of queries, within rounding. A key that no query sees
receives exactly 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscope.capture.sums import LayerAccumulator, StackedSums
from attnscope.errors import ConservationError, ModelError
from attnscope.kernels import AttentionSums, KernelRows

# How far the weights of a row may add up to something other than 1, by the type the model
# computes in; in 16 bits torch's attention uses a rougher exponential.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 2e-3, torch.float16: 2e-3}
# Allowed multiples of the float32 rounding of the largest score. All dtypes add up products in
# float32; the measured error of the log-sum-exp of fused kernels is 1 to 2 such units.
ROUNDINGS = 8


# Wider dtypes to try if a model computes infinite numbers.
WIDER = {torch.float16: ["bfloat16", "float32"], torch.bfloat16: ["float32"]}


def compare_unseen(rows: KernelRows, sums: AttentionSums) -> AttentionSums:
    """The sums of these rows, or of several layers with the same bounds, with what keys received
    that no row sees. Runs on the device; the result is read with the other checks."""
    unseen = _unseen(rows)
    return sums if unseen is None else received_unseen(sums, unseen)


def received_unseen(sums: AttentionSums, unseen: Tensor) -> AttentionSums:
    """The same, where the keys that no row sees are known, bool [B, 1 or H, K]."""
    H, K = sums.received.shape[1:]
    received = sums.received.reshape(-1, len(unseen), H, K)
    mass, key = received.abs().where(unseen, 0.0).max(-1)
    return replace(sums, unseen_mass=mass.flatten(0, 1), unseen_key=key.flatten(0, 1))


def _unseen(rows: KernelRows) -> Tensor | None:
    """bool [B, 1 or H, K]: keys that no row sees; None where that is none of them. Of several
    links, each is taken by itself: a key that only two together hide is not among these."""
    M, K = rows.q.shape[2], rows.k.shape[2]
    if (
        rows.causal
        and rows.real is None
        and M + rows.diagonal_offset == K
        and not rows.score_biases
    ):
        return None
    start, stop, _ = rows.bounds()
    key = "unseen", rows.real is None
    cached = rows.cache.get(key)
    if (
        cached is None
        or cached[0] is not start
        or cached[1] is not stop
        or cached[2] is not rows.real
    ):
        unseen = ~_covered(start, stop, K)
        if rows.real is not None:
            unseen = unseen | ~rows.real
        cached = rows.cache[key] = start, stop, rows.real, unseen[:, None]
    unseen = cached[3]
    for link in rows.score_biases:
        hidden = link.bias == -torch.inf
        if link.queries is not None:  # from some rows: what the others see is seen
            others = _covered(start, torch.where(link.queries, start, stop), K)
            hidden = hidden & ~others[:, None]
        unseen = unseen | hidden
    return unseen


def _covered(start: Tensor, stop: Tensor, keys: int) -> Tensor:
    """bool [B, keys]: which keys lie in an interval: more of them opened than closed there."""
    order = torch.arange(keys, device=start.device, dtype=start.dtype).repeat(len(start), 1)
    opened, closed = (
        torch.searchsorted(bound.sort(1).values, order, right=True) for bound in (start, stop)
    )
    return opened > closed


def check(
    layers: Sequence[int],
    deviation: Tensor,
    reach: Tensor,
    dtype: torch.dtype,
    what: str,
    unseen: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Raise an error if the sums of a layer are wrong.

    They are wrong if `deviation` [layers, B, H] exceeds the rounding of scores up to `reach`, or if
    they are not finite. They are also wrong if a key that no query sees received attention:
    `unseen` has the amount and the key, [layers, B, H].
    """
    allowed = TOLERANCE.get(dtype, 2e-3) + ROUNDINGS * torch.finfo(torch.float32).eps * reach
    wrong = ~(deviation <= allowed)
    if unseen is not None:
        wrong = wrong | ~(unseen[0] == 0)
    if not bool(wrong.any()):
        return
    at = int(wrong.flatten(1).any(1).int().argmax())  # the first: others follow it
    layer = layers[at]
    if not bool(reach[at].isfinite().all()):
        name, wider = str(dtype).removeprefix("torch."), WIDER.get(dtype, [])
        raise ModelError(
            f"layer {layer}: the model computed NaN or infinite queries or keys, so there is no "
            "attention to measure; its weights may be damaged, or too large for "
            f"{name}{' (try ' + ' or '.join(wider) + ')' if wider else ''}",
            code="not-finite",
            layer=layer,
            dtype=name,
            wider=wider,
        )
    report = (
        "If the KV cache was changed between passes, leave it as it is; otherwise this is a bug: "
        "please report it. backend='reference' gives the definition for short texts."
    )
    if unseen is not None and not bool((unseen[0][at] == 0).all()):
        amount, key = (each[at].flatten() for each in unseen)
        worst = int(amount.argmax())
        raise ConservationError(
            f"layer {layer}: key {int(key[worst])} received {float(amount[worst]):.3g}, and no "
            f"query sees it. {report}",
            code="unseen-key-received",
            layer=layer,
            key=int(key[worst]),
            amount=float(amount[worst]),
        )
    raise ConservationError(
        f"layer {layer}: {what} {float(deviation[at].max()):.3g}, where rounding explains "
        f"{float(allowed[at].max()):.3g}. {report}",
        layer=layer,
        deviation=float(deviation[at].max()),
    )


def check_stacked(stacked: StackedSums, dtype: torch.dtype, what: str) -> None:
    """Check layers that were reduced together.

    The keys received the number of queries, every row agrees with the log-sum-exp of the fused
    attention, and keys that no query sees received 0.
    """
    sums, L = stacked.sums, len(stacked.layers)
    shape = L, -1, sums.mass.shape[1]
    # On the CPU: one copy takes less than starting a kernel for each of these operators.
    if sums.unseen_mass is None or sums.unseen_key is None:
        mass, unseen = sums.mass.view(shape).cpu(), None
    else:
        mass, amount = torch.stack([sums.mass, sums.unseen_mass]).cpu().view(2, *shape)
        unseen = amount, sums.unseen_key.view(shape)
    count = stacked.selection.count[:, None]
    deviation = (mass - count).abs() / count.clamp(min=1)
    if sums.lse_error is not None:
        deviation = torch.maximum(deviation, sums.lse_error.cpu().view_as(mass))
    reach = mass * 0 if sums.score_bound is None else sums.score_bound.cpu().view_as(mass)
    check(stacked.layers, deviation, reach, dtype, what, unseen)


def check_totals(layers: Mapping[int, LayerAccumulator], dtype: torch.dtype, what: str) -> None:
    """Check single layers whose sums are computed, learned sinks included."""
    groups: dict[Any, list[tuple[int, Tensor, Tensor, Tensor, Tensor]]] = {}
    for layer, totals in layers.items():
        if totals.sums is None:
            continue
        mass = totals.sums.mass if totals.sink is None else totals.sums.mass + totals.sink
        count = totals.count()
        if totals.sampled:  # estimates add up on average alone; `spot_check` checks rows
            mass, count = torch.zeros_like(mass), torch.zeros_like(count)
        drift = torch.zeros_like(mass) if totals.drift is None else totals.drift
        reach = mass * 0 if totals.reach is None else totals.reach
        entry = layer, mass, count, drift, reach
        groups.setdefault((mass.device, mass.shape), []).append(entry)
    for (device, _), parts in groups.items():
        numbers, masses, counts, drifts, reaches = zip(*parts, strict=True)
        expected = torch.stack(counts).to(device)[..., None]
        deviation = (torch.stack(masses) - expected).abs() / expected.clamp(min=1)
        deviation = torch.maximum(deviation, torch.stack(drifts))
        unseen_by_layer = [layers[number].unseen for number in numbers]
        unseen = None
        if any(unseen_by_layer):
            shape = deviation.shape[1:]
            none = (
                deviation.new_zeros(shape, dtype=torch.float32),
                deviation.new_zeros(shape).long(),
            )
            amounts, keys = zip(*(each or none for each in unseen_by_layer), strict=True)
            unseen = torch.stack(amounts), torch.stack(keys)
        check(numbers, deviation, torch.stack(reaches), dtype, what, unseen)
