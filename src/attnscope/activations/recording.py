"""`Recording`: the statistics that `record` returns."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnscope.activations.log_histogram import LogHistogram
from attnscope.activations.mlps import TokenHook
from attnscope.activations.token_sums import FIELDS, TokenSums, epsilon
from attnscope.errors import InputError, ScopeError, unknown


@dataclass(frozen=True, slots=True)
class MaxActivation:
    """The activation farthest from zero, and where it was."""

    value: float
    forward: int
    """Which forward pass of the block, from 0."""
    sequence: int
    position: int
    """Of the token, in the sequence (padding counted)."""
    index: int
    """Of the activation, among those of its token (of its expert)."""


@dataclass(slots=True, eq=False)
class _RunningTotals:
    """Running totals of one point of one layer, by class."""

    histogram: LogHistogram
    sums: Tensor
    """float64 [classes, fields]: over tokens."""
    norms: Tensor
    """float64 [classes]: the sum over tokens of their L2 norms."""
    tokens: Tensor
    """float64 [classes]"""
    largest: list[MaxActivation | None]

    def field(self, name: str) -> Tensor:
        """float64 [classes]: one of the sums."""
        return self.sums[:, FIELDS.index(name)]


class Recording:
    """Statistics of all that was recorded, by point, layer and class: [classes] each."""

    def __init__(self, points: tuple[str, ...], layers: list[int], classes: int):
        self.points = points
        self.layers = layers
        self.classes = classes
        self.forwards = 0
        """Forward passes recorded."""
        self._totals: dict[tuple[str, int], _RunningTotals] = {}

    def __repr__(self) -> str:
        many = "es" if self.forwards > 1 else ""
        done = f"{self.forwards} forward pass{many}" if self.forwards else "no forward pass yet"
        points = ", ".join(map(repr, self.points))
        return f"<Recording of {points} in {len(self.layers)} layers: {done}>"

    def tokens(self, point: str, layer: int) -> Tensor:
        """How many tokens there were."""
        return self._of(point, layer).tokens

    def l1(self, point: str, layer: int) -> Tensor:
        """The mean over tokens of the L1 norm of their activations."""
        totals = self._of(point, layer)
        return totals.field("absolute") / totals.tokens

    def l2(self, point: str, layer: int) -> Tensor:
        """The mean over tokens of the L2 norm of their activations."""
        totals = self._of(point, layer)
        return totals.norms / totals.tokens

    def variance(self, point: str, layer: int) -> Tensor:
        """Of all activations, around their mean."""
        totals = self._of(point, layer)
        n = totals.field("width")
        return totals.field("squares") / n - (totals.field("sum") / n) ** 2

    def near_zero(self, point: str, layer: int) -> Tensor:
        """The share of activations with |a| below the threshold given as `near`: exact. Without
        one, below their own `epsilon`: to within a bin of the sketch."""
        totals = self._of(point, layer)
        share = totals.field("near") / totals.field("width")
        sketch = totals.histogram
        return sketch.below(epsilon(sketch)) if share.isnan().all() else share

    def epsilon(self, point: str, layer: int, c: float = 0.25) -> Tensor:
        """1.4826 · c · the median distance of |a| from its median: what near zero is; sketched."""
        return epsilon(self._of(point, layer).histogram, c)

    def gini(self, point: str, layer: int) -> Tensor:
        """How unequal the sizes |a| are, from 0 to 1; to within `sketch.GINI_BOUND`."""
        return self._of(point, layer).histogram.gini()

    def quantile(self, point: str, layer: int, q: float, *, absolute: bool = False) -> Tensor:
        """A quantile of activations, or of their sizes; to within `sketch.BOUND` of itself."""
        if not 0 <= q <= 1:
            raise InputError(
                f"q={q!r} must be a number from 0 to 1", code="bad-number", argument="q", value=q
            )
        return self._of(point, layer).histogram.quantile(q, absolute=absolute)

    def histogram(self, point: str, layer: int, edges: Any) -> Tensor:
        """[classes, bins]: the share of activations between these edges."""
        return self._of(point, layer).histogram.histogram(
            torch.as_tensor(edges, dtype=torch.float64)
        )

    def largest(self, point: str, layer: int) -> list[MaxActivation | None]:
        """For every class the activation farthest from zero; None where it had no token."""
        return self._of(point, layer).largest

    def _of(self, point: str, layer: int) -> _RunningTotals:
        if point not in self.points:
            raise unknown("point", point, self.points)
        if layer not in self.layers:
            raise unknown("layer", layer, self.layers)
        if (point, layer) not in self._totals:
            raise ScopeError(
                "no forward pass was recorded; call the model inside the with block",
                code="no-forward-pass",
            )
        return self._totals[point, layer]

    def _add(self, point: str, layer: int, token_sums: TokenSums, tokens: TokenHook) -> None:
        """Add the sums of a pass."""
        key, C = (point, layer), self.classes
        if key not in self._totals:
            empty = torch.zeros(C, dtype=torch.float64, device=token_sums.tokens.device)
            sums = empty.new_zeros(C, len(FIELDS))
            self._totals[key] = _RunningTotals(
                LogHistogram(C, empty.device), sums, empty.clone(), empty.clone(), [None] * C
            )
        running = self._totals[key]
        running.histogram.counts += token_sums.histogram.counts
        running.histogram.sums += token_sums.histogram.sums
        counted = token_sums.group >= 0
        of, values = token_sums.group[counted], token_sums.tokens[counted]
        running.sums.index_add_(0, of, values)
        running.norms.index_add_(0, of, values[:, FIELDS.index("squares")].sqrt())
        running.tokens.index_add_(0, of, torch.ones_like(values[:, 0]))
        for c in range(C):
            if not bool((of == c).any()):
                continue
            best = torch.where(token_sums.group == c, token_sums.tokens[:, -1].abs(), -1.0).argmax()
            value, at = float(token_sums.tokens[best, -1]), int(best)
            old = running.largest[c]
            if old is None or abs(value) > abs(old.value):
                running.largest[c] = MaxActivation(
                    value,
                    self.forwards,
                    at // tokens.tokens,
                    at % tokens.tokens + tokens.past,
                    int(token_sums.peak[best]),
                )
