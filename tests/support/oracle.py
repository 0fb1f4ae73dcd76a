"""The definitions once more, in plain numpy loops over a dense matrix: what results must equal.

Shares no code with the package on purpose.
"""

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


def statistics(A: Array, visible: Array, counted: Array, first: int) -> dict[str, Array]:
    """All statistics of one head of one sequence.

    A [n, n] with padding rows and columns zero, visible [n, n] bool, counted [n] bool.
    """
    n = A.shape[0]
    queries = np.flatnonzero(counted)
    received, average = np.zeros(n), np.full(n, np.nan)
    eligible, uniform = np.zeros(n), np.zeros(n)
    for j in range(n):
        received[j] = sum(A[i, j] for i in queries)
        eligible[j] = sum(1 for i in queries if visible[i, j])
        uniform[j] = sum(1 / visible[i].sum() for i in queries if visible[i, j])
        later = [i for i in queries if i > j and visible[i, j]]
        if later:
            average[j] = sum(A[i, j] for i in later) / len(later)
    size = len(queries) or np.nan  # a mean over nothing is no number
    entropy = sum(-sum(a * np.log(a) for a in A[i] if a > 0) for i in queries) / size
    return {
        "received": received,
        "average": average,
        "eligible": eligible,
        "uniform": uniform,
        "entropy": np.array(entropy),
        "first_token": np.array(sum(A[i, first] for i in queries) / size),
        "self_mass": np.array(sum(A[i, i] for i in queries) / size),
        "distance": np.array(sum(A[i, j] * (i - j) for i in queries for j in range(n)) / size),
        "learned_sink_mass": np.array(sum(1 - A[i].sum() for i in queries) / size),
    }


def mass(A: Array, counted: Array, classes: Array, n: int) -> Array:
    queries = np.flatnonzero(counted)
    return np.array(
        [sum(A[i, classes == c].sum() for i in queries) / len(queries) for c in range(n)]
    )


def flow(A: Array, counted: Array, classes: Array, n: int) -> Array:
    table = np.full((n, n), np.nan)
    for c in range(n):
        if (counted & (classes == c)).any():
            table[c] = mass(A, counted & (classes == c), classes, n)
    return table


def compare(
    scope: Any,
    attentions: dict[int, torch.Tensor],
    real: torch.Tensor,
    counted: torch.Tensor,
    tolerance: float,
) -> None:
    """Every statistic of every layer, head and sequence against dense weights [B, H, n, n].

    Eager attention makes a padding row uniform over all keys; padding is cut out here.
    """
    keep = real.numpy()
    for layer, weights in attentions.items():
        dense = weights.double().numpy()
        got = {
            name: getattr(scope, name)(layer).cpu().double().numpy()
            for name in (
                "received",
                "average",
                "eligible",
                "uniform",
                "entropy",
                "first_token",
                "self_mass",
                "distance",
                "learned_sink_mass",
            )
        }
        for b in range(dense.shape[0]):
            A = dense[b] * keep[b][None, :, None] * keep[b][None, None, :]
            visible = (A > 0).any(0)
            for h in range(A.shape[0]):
                first = int(np.argmax(keep[b]))
                wanted = statistics(A[h], visible, counted[b].numpy() & keep[b], first)
                for name, value in wanted.items():
                    per_head = name not in ("eligible", "uniform")
                    mine = got[name][b, h] if per_head else got[name][b]
                    scale = max(1.0, float(np.max(np.abs(np.nan_to_num(value)))))
                    np.testing.assert_allclose(
                        mine,
                        value,
                        rtol=0,
                        atol=tolerance * scale,
                        err_msg=f"{name}, layer {layer}, sequence {b}, head {h}",
                    )
