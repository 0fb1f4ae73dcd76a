"""A token's gaze in one layer: what it looks at, and who looks at it. One row or one column at a
time, from the queries and keys that were kept, or from a pass of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnscope.errors import InputError
from attnscope.web.measuring import between_layers, last_logits
from attnscope.web.model_cache import Loaded
from attnscope.web.views import Float32s, View

if TYPE_CHECKING:
    from attnscope.capture.scope import Scope

LAYERS = 2
"""Of a view that keeps none, so many layers' queries and keys are kept when asked for."""


def looks_at(
    view: View, token: int, layer: int, load: Callable[[], Loaded], stop: Callable[[], None]
) -> Float32s:
    """[H, K]: the weights of a token on all others; 0 on those that it does not see."""
    scope = _kept(view, token, layer, load, stop)
    row: Float32s = scope.row(layer, token).cpu().numpy()
    return row


def looked_at_by(
    view: View, token: int, layer: int, load: Callable[[], Loaded], stop: Callable[[], None]
) -> Float32s:
    """[H, K]: the weights of all tokens on one; nan for those that cannot see it."""
    import torch

    scope = _kept(view, token, layer, load, stop)
    positions = scope.query_positions(layer)
    weights = scope.weight(layer, torch.full_like(positions, token))[0]
    column = torch.full((len(weights), view.read), torch.nan)
    column[:, positions[0].cpu()] = weights.cpu()
    if bool((column[:, :token].nan_to_num() == 0).all()):  # nobody looks ahead
        column[:, :token] = torch.nan
    return column.numpy()


def _kept(
    view: View, token: int, layer: int, load: Callable[[], Loaded], stop: Callable[[], None]
) -> Scope:
    """The queries and keys of a layer."""
    view.at(layer)
    if not 0 <= token < view.read:
        raise InputError(f"token {token} was never read by the model; it read 0 to {view.read - 1}")
    if view.scope is not None:
        return view.scope
    if layer not in view.by_layer:
        while len(view.by_layer) >= LAYERS:
            view.by_layer.pop(next(iter(view.by_layer)))
        view.by_layer[layer] = _again(view, load().model, layer, stop)
    return view.by_layer[layer]


def _again(view: View, model: Any, layer: int, stop: Callable[[], None]) -> Scope:
    """A pass of its own, which keeps one layer."""
    import torch

    import attnscope

    ids = torch.tensor([view.ids[: view.read]], device=model.device)
    with (
        torch.no_grad(),
        between_layers(model, stop),
        attnscope.watch(model, layers=layer, queries="all", keep=True) as scope,
    ):
        last_logits(model, {"input_ids": ids})
    return scope
