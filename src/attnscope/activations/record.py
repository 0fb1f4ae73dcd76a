"""`record`: statistics of the activations of a model's layers, in constant memory.

Two points of every layer: `mlp`, the output of the MLP's non-linearity, and `residual`, the
residual stream after the layer. Sums are exact (float64). Quantiles and the Gini coefficient come
from a log-binned histogram with a stated error bound.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from attnscope.activations.log_histogram import LogHistogram
from attnscope.activations.mlps import (
    Nonlinearity,
    TokenHook,
    decoder_layers,
    hook_with_tokens,
    nonlinearities,
)
from attnscope.activations.token_sums import FIELDS, TokenSums, epsilon
from attnscope.errors import InputError, ScopeError, unknown, wrong_shape
from attnscope.interception import sites
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.intercept import register

Point = Literal["mlp", "residual"]
POINTS: tuple[Point, ...] = ("mlp", "residual")


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
        done = f"{self.forwards} forward passes" if self.forwards else "no forward pass yet"
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


def record(
    model: nn.Module,
    points: Point | Iterable[Point] = POINTS,
    layers: int | Iterable[int] | None = None,
    *,
    classes: Tensor | None = None,
    near: Mapping[tuple[str, int], Tensor] | None = None,
) -> AbstractContextManager[Recording]:
    """Record statistics of the activations of a model's layers, inside a `with` block.

    All forward passes of the block add up. The memory does not grow with the text.

    Args:
        model: A transformers model with one stack of layers.
        points: "mlp" (after the non-linearity of the MLP), "residual" (the residual stream after
            the layer), or both; default: both.
        layers: The layers to record, in the model's own numbering; default: all with attention.
        classes: Int [batch, tokens], -1 for tokens that do not count: statistics for each class.
            For passes over whole texts. Default: one class with all tokens.
        near: The size below which an activation is near zero, {(point, layer): [classes]};
            usually `epsilon` of another recording. Default: the recording's own `epsilon`.

    Returns:
        A context manager that gives a `Recording`.

    Raises:
        InputError: An argument has a wrong value, or the model has an encoder and a decoder.
        ModelError: The model has no MLP that can be recorded, or an activation is NaN.

    Example:
        >>> import attnscope
        >>> model, tokenizer = attnscope.load("zoo:spatial-phys")
        >>> inputs = tokenizer("The ball is left of the box.", return_tensors="pt")
        >>> with attnscope.record(model, points="mlp", layers=[0]) as activations:
        ...     _ = model(**inputs)
        >>> activations.tokens("mlp", 0).tolist()  # [classes]
        [8.0]
        >>> 0 < float(activations.near_zero("mlp", 0)) < 1
        True
    """
    model_sites = sites.find(model)
    sites.check_one_stack(model_sites)
    chosen_points = (points,) if isinstance(points, str) else tuple(points)
    for point in chosen_points:
        if point not in POINTS:
            raise unknown("point", point, POINTS)
    if not chosen_points:
        raise InputError(
            f"points=[] records nothing; known: {', '.join(POINTS)}",
            code="no-points",
            known=list(POINTS),
        )
    ids = None if classes is None else torch.as_tensor(classes)
    if ids is not None and (ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool):
        expected = "an int tensor [batch, tokens] with -1 for no class"
        raise wrong_shape("classes", expected, ids)
    chosen_layers = sites.validate_layers(model_sites, layers)
    recording = Recording(
        chosen_points, sorted(chosen_layers), 1 if ids is None else max(int(ids.max()) + 1, 1)
    )
    hook_points = _hook_points(model, model_sites, chosen_points, chosen_layers)
    limits = {key: (limit, None) for key, limit in (near or {}).items()}
    hook = _RecordHook(recording, partial(_classes_of, ids), limits)
    return _hooking(model_sites, hook, hook_points, recording)


Result = TypeVar("Result")
Limits = dict[int, tuple[Tensor, Tensor]]
"""By layer, of every sequence [B]: the sizes below which an activation is near zero, and above
which it is large."""


def limits_of(token_sums_by_layer: Mapping[int, TokenSums]) -> Limits:
    """`epsilon`, and the 99th percentile of sizes; sketched."""
    return {
        layer: (epsilon(token_sums.histogram), token_sums.histogram.quantile(0.99, absolute=True))
        for layer, token_sums in token_sums_by_layer.items()
    }


def summing_tokens(
    model: nn.Module, layers: Any = None, limits: Limits | None = None
) -> AbstractContextManager[dict[int, TokenSums]]:
    """The sums of every token at the point `mlp` of the last pass, by layer.

    Activations are counted as near zero or large only if limits are given.
    """
    model_sites = sites.find(model)
    chosen_layers = sites.validate_layers(model_sites, layers)
    hook_points = _hook_points(model, model_sites, ("mlp",), chosen_layers)
    by_layer: dict[int, TokenSums] = {}
    hook = _LastPassHook(
        by_layer, _sequences_of, {("mlp", layer): each for layer, each in (limits or {}).items()}
    )
    return _hooking(model_sites, hook, hook_points, by_layer)


class _SumsHook(TokenHook):
    """Sums the activations of every token of a pass, at some points of some layers."""

    def __init__(
        self,
        result: Any,
        groups_of: Callable[[TokenHook], tuple[Tensor, int]],
        limits: Mapping[tuple[str, int], tuple[Tensor, Tensor | None]],
    ):
        super().__init__()
        self.result = result
        self.groups_of = groups_of
        """The group of each token of a pass, -1 for none, and the number of groups."""
        self.limits = limits
        self.sums: dict[tuple[str, int], TokenSums] = {}
        """By point and layer: the sums of the running pass."""

    def begin(self, stack: str, forward_pass: ForwardPass) -> None:
        super().begin(stack, forward_pass)
        self.sums = {}

    def add(self, point: str, layer: int, rows: Tensor, which: Tensor) -> None:
        """Add rows of activations, of these tokens."""
        if not self.running:
            return
        key = point, layer
        if key not in self.sums:
            self.sums[key] = TokenSums(point, layer, *self.groups_of(self), rows.device)
        near, large = self.limits.get(key, (None, None))
        device = rows.device
        limits = (None if limit is None else limit.to(device) for limit in (near, large))
        self.sums[key].add(rows, which, *limits)


class _LastPassHook(_SumsHook):
    """Keeps the sums of the last pass, by layer."""

    def begin(self, stack: str, forward_pass: ForwardPass) -> None:
        super().begin(stack, forward_pass)
        self.result.clear()

    def end(self, stack: str, *, finished: bool) -> None:
        super().end(stack, finished=finished)
        self.result.update({layer: sums for (_, layer), sums in self.sums.items() if finished})


class _RecordHook(_SumsHook):
    """Adds the sums of every pass to a recording."""

    def end(self, stack: str, *, finished: bool) -> None:
        super().end(stack, finished=finished)
        for (point, layer), sums in self.sums.items() if finished else ():
            self.result._add(point, layer, sums, self)
        self.result.forwards += finished and bool(self.sums)


def _sequences_of(tokens: TokenHook) -> tuple[Tensor, int]:
    """The sequence of each token, -1 for padding."""
    sequence = torch.arange(tokens.batch)[:, None]
    return torch.where(tokens.real(), sequence, -1).flatten(), tokens.batch


def _classes_of(ids: Tensor | None, tokens: TokenHook) -> tuple[Tensor, int]:
    """The class of each token, -1 for padding."""
    if ids is None:
        return torch.where(tokens.real(), 0, -1).flatten(), 1
    classes = ids[:, tokens.past : tokens.past + tokens.tokens]
    if classes.shape != (tokens.batch, tokens.tokens):
        expected = f"[{tokens.batch}, {tokens.tokens}] as this forward pass"
        raise wrong_shape("classes", expected, ids)
    of_tokens = torch.where(tokens.real(), classes.long().cpu(), -1).flatten()
    return of_tokens, max(int(ids.max()) + 1, 1)


def _hook_points(
    model: nn.Module, model_sites: sites.Sites, points: tuple[str, ...], layers: frozenset[int]
) -> list[tuple[str, Nonlinearity]]:
    """The modules to hook at each point."""
    hook_points: list[tuple[str, Nonlinearity]] = []
    if "mlp" in points:
        for some in nonlinearities(model, model_sites, layers).values():
            hook_points += [("mlp", one) for one in some]
    if "residual" in points:
        for layer, module in decoder_layers(model, model_sites).items():
            if layer in layers:
                hook_points.append(("residual", Nonlinearity(layer, "residual", module)))
    return hook_points


@contextmanager
def _hooking(
    model_sites: sites.Sites,
    hook: _SumsHook,
    hook_points: list[tuple[str, Nonlinearity]],
    result: Result,
) -> Iterator[Result]:
    with ExitStack() as undo:
        for point, where in hook_points:
            hook_with_tokens(where, hook, partial(hook.add, point, where.layer), undo)
        undo.enter_context(register(model_sites, hook))
        yield result
