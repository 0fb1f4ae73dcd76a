"""Finds the non-linearities of the MLPs of a model, and the tokens of their rows.

A non-linearity is found by its class, outside the attention of a layer. transformers builds one
module for every MLP.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnscope.errors import ModelError, wrong_shape
from attnscope.interception.arguments import argument
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.hooks import Hook, HookRegistry, current
from attnscope.interception.sites import Sites

# Non-linearities of transformers and of torch are modules of these files ...
_MODULES = ("transformers.activations", "torch.nn.modules.activation")
# ... without modules that are no activation function.
_EXCLUDED = (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.Threshold)


@dataclass(frozen=True, slots=True, eq=False)
class Nonlinearity:
    """One module that computes activations: a non-linearity, or a layer with its residual."""

    layer: int
    name: str
    module: nn.Module
    experts: nn.Module | None = None
    """The experts that contain it and call it with the tokens routed to them; else None."""


def decoder_layers(model: nn.Module, model_sites: Sites) -> dict[int, nn.Module]:
    """The module of every layer with attention: an element of the list of layers."""
    if model_sites.shared_stacks:
        raise ModelError(
            f"{type(model).__name__} uses the same modules for several layers, so their "
            "activations cannot be assigned to a layer",
            code="shared-modules",
            model=type(model).__name__,
        )
    names = {module: name for name, module in model.named_modules()}
    layers: dict[int, nn.Module] = {}
    for module, site in model_sites.modules.items():
        if site.kind == "self":
            steps = names[module].split(".")
            at = next(n for n, step in enumerate(steps) if step.isdigit())
            layers[site.layer] = model.get_submodule(".".join(steps[: at + 1]))
    return layers


def nonlinearities(
    model: nn.Module, model_sites: Sites, layers: frozenset[int]
) -> dict[int, list[Nonlinearity]]:
    """The non-linearities of the MLPs of these layers; an error if a layer has none."""
    attention = {part for module in model_sites.modules for part in module.modules()}
    layer_of: dict[nn.Module, int] = {}
    points: dict[int, list[Nonlinearity]] = {}
    for layer, container in sorted(decoder_layers(model, model_sites).items()):
        if layer not in layers:
            continue
        named = dict(container.named_modules())
        points[layer] = []
        for name, module in named.items():
            if module in attention or not _is_nonlinearity(module):
                continue
            if module in layer_of:
                raise ModelError(
                    f"layers {layer_of[module]} and {layer} of {type(model).__name__} share the "
                    f"non-linearity {name}, so its activations cannot be assigned to a layer",
                    code="shared-modules",
                    model=type(model).__name__,
                    module=name,
                )
            layer_of[module] = layer
            points[layer].append(Nonlinearity(layer, name, module, _experts(name, named)))
        if not points[layer]:
            modules = [name for name, part in named.items() if name and part not in attention]
            raise ModelError(
                f"layer {layer} of {type(model).__name__} has no MLP with a non-linearity from "
                f"{' or '.join(_MODULES)}; its modules: {', '.join(modules[:12])}",
                code="no-nonlinearity",
                layer=layer,
                modules=modules,
            )
    return points


def _is_nonlinearity(module: nn.Module) -> bool:
    return type(module).__module__ in _MODULES and not isinstance(module, _EXCLUDED)


def _experts(name: str, named: dict[str, nn.Module]) -> nn.Module | None:
    """The module of packed experts around a non-linearity, if there is one."""
    parent = named[name.rpartition(".")[0]]
    packed = [p for p in vars(parent).get("_parameters", {}).values() if p is not None]
    return parent if any(p.ndim == 3 for p in packed) else None


class TokenHook(Hook):
    """The tokens of the forward pass that runs, for hooks at modules of the model."""

    def __init__(self) -> None:
        self.batch = 0
        self.tokens = 0
        """Number of tokens of each sequence in this pass."""
        self.past = 0
        """Tokens before them, in the cache."""
        self.passes = 0
        """Number of earlier passes of these sequences."""
        self.padding: Tensor | None = None
        """bool [B, tokens], False at padding; None if there is none."""
        self.running = False
        """Whether a forward pass runs; a backward pass may run layers again after it."""
        self.forward_pass = ForwardPass()
        self._registry: HookRegistry | None = None

    def begin(self, stack: str, forward_pass: ForwardPass) -> None:
        """Read the tokens of a pass."""
        mask = forward_pass.mask
        if isinstance(mask, Tensor) and mask.ndim != 2:
            raise wrong_shape("attention_mask", "[batch, tokens] with 0 at padding", mask)
        self.forward_pass, self._registry, self.running = forward_pass, current(), True
        (self.batch, self.tokens), self.past = forward_pass.shape, forward_pass.past or 0
        self.passes = 0 if self.past == 0 else self.passes + 1
        self.padding = None
        if forward_pass.padding is not None:
            real = forward_pass.padding[:, self.past : self.past + self.tokens].bool()
            self.padding = pad(real, (0, self.tokens - real.shape[1]), value=True)

    def end(self, stack: str, *, finished: bool) -> None:
        """The pass is over."""
        self.running = False

    @property
    def is_here(self) -> bool:
        """Whether this thread runs the pass, or its backward pass."""
        return self._registry is current()

    def real(self) -> Tensor:
        """bool [B, tokens] on the CPU: False at padding."""
        if self.padding is not None:
            return self.padding.cpu()
        return torch.ones(self.batch, self.tokens, dtype=torch.bool)


Callback = Callable[[Tensor, Tensor], Tensor | None]
"""From activations [rows, width] and the token of every row, int64 [rows] in 0 … B · tokens - 1, to
their replacement; None leaves them unchanged."""


def hook_with_tokens(
    point: Nonlinearity, tokens: TokenHook, callback: Callback, undo: ExitStack
) -> None:
    """Call `callback` with the activations of a non-linearity and their tokens, until undone."""
    routed = _ExpertOrder()

    def hook(module: nn.Module, args: Any, output: Any) -> Tensor | None:
        if module is not point.module or not tokens.is_here:
            return None
        tokens.forward_pass.note_layer()
        output = output[0] if isinstance(output, tuple) else output
        rows = output.reshape(-1, output.shape[-1])
        if point.experts is not None:
            which = routed.next(len(rows)).to(rows.device)
        elif len(rows) == tokens.batch * tokens.tokens:
            which = torch.arange(len(rows), device=rows.device)
        else:
            raise ModelError(
                f"{point.name} in layer {point.layer} was called with {len(rows)} rows for "
                f"{tokens.batch} × {tokens.tokens} tokens, so its rows cannot be assigned "
                "to tokens",
                code="rows-not-tokens",
                layer=point.layer,
                rows=len(rows),
            )
        replacement = callback(rows, which)
        return None if replacement is None else replacement.view(output.shape)

    undo.callback(point.module.register_forward_hook(hook).remove)
    if point.experts is not None:
        begin = partial(_route, routed, point, tokens)
        undo.callback(point.experts.register_forward_pre_hook(begin, with_kwargs=True).remove)


@dataclass(slots=True, eq=False)
class _ExpertOrder:
    """The tokens of each call of the experts' non-linearity, in order."""

    calls: list[Tensor] = field(default_factory=list)

    def next(self, rows: int) -> Tensor:
        if not self.calls or len(self.calls[0]) != rows:
            raise ModelError(
                "the experts of this model call their non-linearity in an unknown order, so their "
                "activations cannot be assigned to tokens",
                code="unknown-expert-order",
                rows=rows,
            )
        return self.calls.pop(0)


def _route(
    routed: _ExpertOrder,
    point: Nonlinearity,
    tokens: TokenHook,
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> None:
    """Compute the order in which experts process tokens, from the router's choice."""
    if module is not point.experts or not tokens.is_here:
        return
    index = argument(module, "top_k_index", args, kwargs)
    how = getattr(getattr(module, "config", None), "_experts_implementation", None) or "eager"
    if index is None or how not in ("eager", "batched_mm", "grouped_mm"):
        raise ModelError(
            f"attnscope does not support {type(module).__name__} with experts implementation "
            f"{how!r}; load the model with experts_implementation='eager'",
            code="unsupported-experts",
            value=how,
        )
    top = index.shape[-1]
    flat = index.reshape(-1)
    if how == "batched_mm":
        routed.calls = [torch.arange(len(flat)) // top]
    elif how == "grouped_mm":
        routed.calls = [torch.sort(flat)[1].cpu() // top]
    else:
        experts = int(module.num_experts)  # type: ignore[arg-type]
        hit = [e for e in flat.unique().tolist() if e < experts]
        # The order of the loop over experts: by rank of choice, then by token.
        routed.calls = [torch.where((index == e).T)[1].cpu() for e in hit]
