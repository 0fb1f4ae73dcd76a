"""`record`: statistics of the activations of a model's layers, in constant memory.

Two points of every layer: `mlp`, the output of the MLP's non-linearity, and `residual`, the
residual stream after the layer. Sums are exact (float64). Quantiles and the Gini coefficient come
from a log-binned histogram with a stated error bound.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from attnscope.activations.mlps import (
    Nonlinearity,
    TokenHook,
    decoder_layers,
    hook_with_tokens,
    nonlinearities,
)
from attnscope.activations.recording import Recording
from attnscope.activations.token_sums import TokenSums, epsilon
from attnscope.errors import InputError, unknown, wrong_shape
from attnscope.interception import sites
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.intercept import register

Point = Literal["mlp", "residual"]
POINTS: tuple[Point, ...] = ("mlp", "residual")


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

    Examples:
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
    hook_points = _hook_points(model_sites, chosen_points, chosen_layers)
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
    hook_points = _hook_points(model_sites, ("mlp",), chosen_layers)
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
    model_sites: sites.Sites, points: tuple[str, ...], layers: frozenset[int]
) -> list[tuple[str, Nonlinearity]]:
    """The modules to hook at each point."""
    model = model_sites.model
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
