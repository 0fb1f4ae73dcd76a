"""`record`: statistics of the activations of a model's layers, in constant memory.

Two points of every layer: `mlp`, the output of the MLP's non-linearity, and `residual`, the
residual stream after the layer. Sums are exact (float64). Quantiles and the Gini coefficient come
from a log-binned histogram with a stated error bound.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnscope.capture import patches, sites
from attnscope.capture.log_histogram import LogHistogram
from attnscope.capture.mlps import (
    PassInput,
    decoder_layers,
    hook_with_tokens,
    nonlinearities,
    track_inputs,
)
from attnscope.capture.token_sums import FIELDS, TokenSums, epsilon
from attnscope.errors import InputError, ScopeError, describe, unknown

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
    largest: list[MaxActivation | None] = field(default_factory=list)


class Recording:
    """Statistics of all that was recorded, by point, layer and class: [classes] each."""

    def __init__(self, points: tuple[str, ...], layers: list[int], classes: int):
        self.points = points
        self.layers = layers
        self.classes = classes
        self.forwards = 0
        """Forward passes recorded."""
        self._totals: dict[tuple[str, int], _RunningTotals] = {}

    def tokens(self, point: str, layer: int) -> Tensor:
        """How many tokens there were."""
        return self._of(point, layer).tokens

    def l1(self, point: str, layer: int) -> Tensor:
        """The mean over tokens of the L1 norm of their activations."""
        model_sites = self._of(point, layer)
        return self._field(model_sites, "absolute") / model_sites.tokens

    def l2(self, point: str, layer: int) -> Tensor:
        """The mean over tokens of the L2 norm of their activations."""
        model_sites = self._of(point, layer)
        return model_sites.norms / model_sites.tokens

    def variance(self, point: str, layer: int) -> Tensor:
        """Of all activations, around their mean."""
        model_sites = self._of(point, layer)
        n = self._field(model_sites, "width")
        return self._field(model_sites, "squares") / n - (self._field(model_sites, "sum") / n) ** 2

    def near_zero(self, point: str, layer: int) -> Tensor:
        """The share of activations with |a| below the threshold given as `near`: exact. Without
        one, below their own `epsilon`: to within a bin of the sketch."""
        model_sites = self._of(point, layer)
        share = self._field(model_sites, "near") / self._field(model_sites, "width")
        return (
            model_sites.histogram.below(epsilon(model_sites.histogram))
            if share.isnan().all()
            else share
        )

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

    def _field(self, model_sites: _RunningTotals, name: str) -> Tensor:
        return model_sites.sums[:, FIELDS.index(name)]

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

    def _add(self, point: str, layer: int, token_sums: TokenSums, pass_input: PassInput) -> None:
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
        of, tokens = token_sums.group[counted], token_sums.tokens[counted]
        running.sums.index_add_(0, of, tokens)
        running.norms.index_add_(0, of, tokens[:, FIELDS.index("squares")].sqrt())
        running.tokens.index_add_(0, of, torch.ones_like(tokens[:, 0]))
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
                    at // pass_input.tokens,
                    at % pass_input.tokens + pass_input.past,
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
    if len(model_sites.stacks) > 1:
        raise InputError(
            "this model has an encoder and a decoder; record model.get_encoder() or "
            "model.get_decoder()",
            code="encoder-decoder",
            stacks=list(model_sites.stacks),
        )
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
        raise InputError(
            "classes must be an int tensor [batch, tokens] with -1 for no class; got "
            f"{describe(ids)}",
            code="wrong-shape",
            argument="classes",
            got=describe(ids),
        )
    chosen_layers = sites.validate_layers(model_sites, layers)
    recording = Recording(
        chosen_points, sorted(chosen_layers), 1 if ids is None else max(int(ids.max()) + 1, 1)
    )
    hook_points = _hook_points(model, model_sites, chosen_points, chosen_layers)
    return _recording(model_sites.base_model, recording, hook_points, ids, near or {})


Limits = dict[int, tuple[Tensor, Tensor]]
"""By layer, of every sequence [B]: the sizes below which an activation is near zero, and above
which it is large."""


def limits_of(token_sums_by_layer: Mapping[int, TokenSums]) -> Limits:
    """`epsilon`, and the 99th percentile of sizes; sketched."""
    return {
        layer: (epsilon(token_sums.histogram), token_sums.histogram.quantile(0.99, absolute=True))
        for layer, token_sums in token_sums_by_layer.items()
    }


@contextmanager
def summing_tokens(
    model: nn.Module, layers: Any = None, limits: Limits | None = None
) -> Iterator[dict[int, TokenSums]]:
    """The sums of every token at the point `mlp` of the last pass, by layer.

    Activations are counted as near zero or large only if limits are given.
    """
    model_sites = sites.find(model)
    token_sums_by_layer: dict[int, TokenSums] = {}
    with ExitStack() as undo:
        undo.enter_context(patches.uncompiled())
        pass_input = track_inputs(model_sites.base_model, undo)

        def begin(this: nn.Module, args: Any) -> None:
            if this is model_sites.base_model and pass_input.is_running():
                token_sums_by_layer.clear()

        undo.callback(model_sites.base_model.register_forward_pre_hook(begin).remove)

        def callback(layer: int, rows: Tensor, which: Tensor) -> None:
            if layer not in token_sums_by_layer:
                sequence = torch.arange(pass_input.batch)[:, None]
                group = torch.where(pass_input.real, sequence, -1).flatten()
                token_sums_by_layer[layer] = TokenSums(
                    "mlp", layer, group, pass_input.batch, rows.device
                )
            near, large = (None, None) if limits is None else limits[layer]
            token_sums_by_layer[layer].add(rows, which, near, large)

        for layer, some in nonlinearities(
            model, model_sites, sites.validate_layers(model_sites, layers)
        ).items():
            for one in some:
                hook_with_tokens(one, pass_input, partial(callback, layer), undo)
        yield token_sums_by_layer


def _hook_points(
    model: nn.Module, model_sites: sites.Sites, points: tuple[str, ...], layers: frozenset[int]
) -> list[tuple[str, int, Any]]:
    """The points to hook: point, layer, and a non-linearity or the module of a layer."""
    hook_points: list[tuple[str, int, Any]] = []
    if "mlp" in points:
        for layer, some in nonlinearities(model, model_sites, layers).items():
            hook_points += [("mlp", layer, one) for one in some]
    if "residual" in points:
        behind = decoder_layers(model, model_sites)
        hook_points += [("residual", layer, behind[layer]) for layer in sorted(layers)]
    return hook_points


@contextmanager
def _recording(
    base: nn.Module,
    recording: Recording,
    hook_points: list[tuple[str, int, Any]],
    ids: Tensor | None,
    near: Mapping[tuple[str, int], Tensor],
) -> Iterator[Recording]:
    token_sums_by_layer: dict[tuple[str, int], TokenSums] = {}
    with ExitStack() as undo:
        undo.enter_context(patches.uncompiled())
        pass_input = track_inputs(base, undo)

        def callback(point: str, layer: int, rows: Tensor, which: Tensor) -> None:
            key = point, layer
            if key not in token_sums_by_layer:
                token_sums_by_layer[key] = TokenSums(
                    point, layer, _groups(pass_input, ids), recording.classes, rows.device
                )
            limit = near.get(key)
            token_sums_by_layer[key].add(
                rows, which, None if limit is None else limit.to(rows.device), None
            )

        def end(this: nn.Module, args: Any, output: Any) -> None:
            if this is base and pass_input.is_running():
                if output is None:  # the pass failed
                    token_sums_by_layer.clear()
                for (point, layer), token_sums in token_sums_by_layer.items():
                    recording._add(point, layer, token_sums, pass_input)
                recording.forwards += bool(token_sums_by_layer)
                token_sums_by_layer.clear()

        for point, layer, where in hook_points:
            if point == "mlp":
                hook_with_tokens(where, pass_input, partial(callback, point, layer), undo)
            else:
                _hook_residual(where, partial(callback, point, layer), pass_input, undo)
        undo.callback(base.register_forward_hook(end, always_call=True).remove)
        yield recording


def _hook_residual(
    module: nn.Module, callback: Any, pass_input: PassInput, undo: ExitStack
) -> None:
    """Hook the output of a layer, the residual stream."""

    def hook(this: nn.Module, args: Any, output: Any) -> None:
        if this is module and pass_input.is_running():
            stream = output[0] if isinstance(output, tuple) else output
            rows = stream.reshape(-1, stream.shape[-1])
            callback(rows, torch.arange(len(rows), device=rows.device))

    undo.callback(module.register_forward_hook(hook).remove)


def _groups(pass_input: PassInput, ids: Tensor | None) -> Tensor:
    """int64 [tokens of all sequences]: the class of each, -1 for padding."""
    if ids is None:
        return torch.where(pass_input.real, 0, -1).flatten()
    counted = ids[:, pass_input.past : pass_input.past + pass_input.tokens]
    if counted.shape != (pass_input.batch, pass_input.tokens):
        raise InputError(
            f"classes has shape {list(ids.shape)}; this forward pass has batch "
            f"{pass_input.batch} and {pass_input.tokens} tokens",
            code="wrong-shape",
            argument="classes",
            got=list(ids.shape),
        )
    return torch.where(pass_input.real, counted.long().cpu(), -1).flatten()


def brown_forsythe(one: Recording, other: Recording, point: str, layer: int) -> Tensor:
    """float64 [classes]: the Brown–Forsythe statistic F(1, n − 2) of equal variances, the medians
    being the sketches'. Its n counts activations, which are not independent: read it as a size, and
    test over prompts."""
    parts = [_spread(each._of(point, layer).histogram) for each in (one, other)]
    n = sum(count for count, _, _ in parts)
    grand = sum(count * mean for count, mean, _ in parts) / n
    between = sum(count * (mean - grand) ** 2 for count, mean, _ in parts)
    within = sum(squares - count * mean**2 for count, mean, squares in parts)
    return torch.as_tensor(between / (within / (n - 2)))


def _spread(histogram: LogHistogram) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean, and sum of squares of the distances from the median, bin by bin."""
    centres = histogram.sums / histogram.counts.where(histogram.counts > 0, torch.nan)
    away = (centres - histogram.quantile(0.5)[:, None]).abs().nan_to_num()
    n = histogram.count
    return n, (away * histogram.counts).sum(1) / n, (away**2 * histogram.counts).sum(1)
