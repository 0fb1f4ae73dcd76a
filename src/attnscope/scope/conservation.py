"""Checks two conservation laws on every pass.

The weights of a head add up to the number of queries, within rounding. A key that no query sees
receives exactly 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import ConservationError, ModelError
from attnscope.kernels import AttentionSums, KernelRows
from attnscope.scope.sums import SumsBlock

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


def verify(blocks: Sequence[SumsBlock], what: str) -> None:
    """Check the computed blocks that were not checked yet, learned sinks included.

    The keys received the number of queries, every row agrees with the log-sum-exp of the fused
    attention, and keys that no query sees received 0.
    """
    groups: dict[Any, list[SumsBlock]] = {}
    for block in blocks:
        if block.sums is not None and not block.verified:
            mass = block.sums.mass
            batch = mass.shape[0] // len(block.layers)
            like = mass.device, block.dtype, batch, mass.shape[1]
            groups.setdefault(like, []).append(block)
    for (_, dtype, batch, heads), group in groups.items():
        # One copy to the CPU takes less than starting a kernel for each of these operators.
        columns = {
            name: _column(group, name) for name in ("lse_error", "score_bound", "unseen_mass")
        }
        masses = [_mass(block) for block in group]
        mass = masses[0] if len(masses) == 1 else torch.cat(masses)
        present = torch.stack([mass, *(each for each in columns.values() if each is not None)])
        mass, *values = present.cpu().double().view(len(present), -1, batch, heads)
        lse_error, score_bound, unseen = (
            mass * 0 if each is None else values.pop(0) for each in columns.values()
        )
        count = torch.cat([_expected(block) for block in group]).view(-1, batch, 1)
        deviation = torch.maximum((mass - count).abs() / count.clamp(min=1), lse_error)
        key = _column(group, "unseen_key") if bool(unseen.any()) else None
        check(
            [layer for block in group for layer in block.layers],
            deviation,
            score_bound,
            dtype,
            what,
            None if key is None else (unseen, key.view_as(unseen)),
        )
        for block in group:
            block.verified = True


def _mass(block: SumsBlock) -> Tensor:
    """[L · B, H]: what the keys and learned sinks received."""
    sums = block.computed()
    if block.sampled:  # estimates add up on average alone; `spot_check` checks rows
        return sums.mass * 0
    return sums.mass if sums.sink is None else (sums.mass + sums.sink).float()


def _column(blocks: list[SumsBlock], name: str) -> Tensor | None:
    """[N, H]: a field of the sums of several blocks, 0 if one has none; None if all have none."""
    sums = [block.sums for block in blocks if block.sums is not None]
    values = [getattr(each, name) for each in sums]
    if all(value is None for value in values):
        return None
    filled = [
        each.mass * 0 if value is None else value for each, value in zip(sums, values, strict=True)
    ]
    return filled[0] if len(filled) == 1 else torch.cat(filled)


def _expected(block: SumsBlock) -> Tensor:
    """float64 [L · B]: the number of counted queries, on the CPU."""
    return (block.count * 0 if block.sampled else block.count).repeat(len(block.layers))
