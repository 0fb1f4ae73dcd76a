"""The attention row or column of one token in one layer.

The values come from the queries and keys that the view keeps, or from another forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnscope.errors import InputError
from attnscope.web.measuring import between_layers, last_logits
from attnscope.web.model_cache import Loaded
from attnscope.web.views import Float32s, View

if TYPE_CHECKING:
    from attnscope.scope.scope import Scope

LAYERS = 2
"""A view without queries and keys keeps those of at most this many requested layers."""


def attention_row(
    view: View, token: int, layer: int, load: Callable[[], Loaded], stop: Callable[[], None]
) -> Float32s:
    """[H, K]: the weights of one token on all others; 0 on tokens outside its visible range."""
    scope = _scope_of_layer(view, token, layer, load, stop)
    row: Float32s = scope.row(layer, token).cpu().numpy()
    return row


def attention_column(
    view: View, token: int, layer: int, load: Callable[[], Loaded], stop: Callable[[], None]
) -> Float32s:
    """[H, K]: the weights of all tokens on one; nan for tokens that cannot see it."""
    import torch

    scope = _scope_of_layer(view, token, layer, load, stop)
    positions = scope.query_positions(layer)
    weights = scope.weight(layer, torch.full_like(positions, token))[0]
    column = torch.full((len(weights), view.read), torch.nan)
    column[:, positions[0].cpu()] = weights.cpu()
    if bool((column[:, :token].nan_to_num() == 0).all()):  # causal attention
        column[:, :token] = torch.nan
    return column.numpy()


def _scope_of_layer(
    view: View, token: int, layer: int, load: Callable[[], Loaded], stop: Callable[[], None]
) -> Scope:
    """A scope that keeps the queries and keys of a layer."""
    view.index_of(layer)
    if not 0 <= token < view.read:
        raise InputError(
            f"the model did not read token {token}; it read tokens 0 to {view.read - 1}",
            code="unknown-token",
            token=token,
            tokens=view.read,
        )
    if view.scope is not None:
        return view.scope
    if layer not in view.by_layer:
        while len(view.by_layer) >= LAYERS:
            view.by_layer.pop(next(iter(view.by_layer)))
        view.by_layer[layer] = _run_again(view, load().model, layer, stop)
    return view.by_layer[layer]


def _run_again(view: View, model: Any, layer: int, stop: Callable[[], None]) -> Scope:
    """Run another forward pass that keeps one layer."""
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
