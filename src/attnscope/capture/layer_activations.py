"""`capture_activations`: value vectors, head outputs and outputs of attention layers.

Only the last pass is kept, and only inside the `with` block. It works together with `watch`, in
either order. Value vectors are taken at the call of transformers' attention interface. Outputs are
taken before and after the output projection, without the residual.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from attnscope.capture import hooks, sites
from attnscope.capture.families import NON_INTERFACE, OUTPUT_PROJECTIONS
from attnscope.capture.hook_registry import CapturedCall
from attnscope.capture.sites import Site
from attnscope.errors import ScopeError, unknown


class Activations:
    """The activations of the attention layers in the last forward pass; a new pass replaces them.


    Tensors are the model's own (its dtype and device, no copies): read them, do not write.
    """

    def __init__(self, layers: list[int]):
        self.layers = layers
        self._values: dict[int, Tensor] = {}
        self._heads: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._pass_done = False

    def values(self, layer: int) -> Tensor:
        """Value vectors [batch, key/value heads, keys, size], as the keys were attended to."""
        return self._get(self._values, layer, "value vectors")

    def heads(self, layer: int) -> Tensor:
        """The heads' outputs side by side [batch, tokens, heads · size], as the output projection
        is given them (behind a gate, where a family has one)."""
        return self._get(self._heads, layer, "heads' outputs")

    def outputs(self, layer: int) -> Tensor:
        """Attention outputs [batch, tokens, hidden], after the output projection."""
        return self._get(self._outputs, layer, "attention outputs")

    def _get(self, activations: dict[int, Tensor], layer: int, what: str) -> Tensor:
        if layer not in self.layers:
            raise unknown("layer", layer, self.layers)
        if not self._pass_done:
            raise ScopeError(
                "no forward pass was recorded; call the model inside the with block",
                code="no-forward-pass",
            )
        if layer not in activations:
            raise ScopeError(
                f"attnscope found no {what} of layer {layer}",
                code="no-activations",
                layer=layer,
                what=what,
            )
        return activations[layer]

    def _clear(self) -> None:
        self._values.clear()
        self._heads.clear()
        self._outputs.clear()
        self._pass_done = False


def capture_activations(
    model: nn.Module, layers: Any = None
) -> AbstractContextManager[Activations]:
    """Capture value vectors and attention outputs of each forward pass, inside a `with` block.


        with capture_activations(model, layers=[0]) as activations:
            model(**inputs)
            activations.values(0)            # [batch, key/value heads, keys, size]
            activations.heads(0)             # [batch, tokens, heads · size], before the projection
            activations.outputs(0)           # [batch, tokens, hidden], after it

    After the block they are deleted, to free the memory. For passes over whole prompts; if a pass
    continues a KV cache, outputs are those of its new tokens.
    """
    model_sites = sites.find(model)
    return _recording(model_sites, Activations(sorted(sites.validate_layers(model_sites, layers))))


class _Values:
    """The hook that keeps the value vectors of the last pass; it needs no geometry."""

    needs_geometry = False

    def __init__(self, activations: Activations):
        self.activations = activations

    def begin(self, stack: str, cache: Any) -> None:
        self.activations._clear()

    def wants(self, site: Site) -> bool:
        return site.kind == "self" and site.layer in self.activations.layers

    def on_call(self, captured: CapturedCall) -> None:
        if captured.values is not None:
            self.activations._values[captured.site.layer] = captured.values.detach()

    def end(self, stack: str, *, finished: bool) -> None:
        self.activations._pass_done = finished


@contextmanager
def _recording(model_sites: sites.Sites, activations: Activations) -> Iterator[Activations]:
    with ExitStack() as undo:
        undo.callback(activations._clear)
        undo.enter_context(hooks.register(model_sites, observer=_Values(activations)))
        base = model_sites.base_model
        parents = {child: module for module in base.modules() for child in module.children()}
        for module, site in model_sites.modules.items():
            if site.kind == "self" and site.layer in activations.layers:
                _keep_outputs(module, parents.get(module), site.layer, activations, undo)
                if module in model_sites.non_interface:
                    _keep_projected_values(module, site.layer, activations, undo)
        yield activations


def _keep_outputs(
    module: nn.Module,
    parent: nn.Module | None,
    layer: int,
    activations: Activations,
    undo: ExitStack,
) -> None:
    """Behind the projection, because some modules add the residual before they return, and
    BERT's project in the module beside.
    """
    inside = (getattr(module, name, None) for name in OUTPUT_PROJECTIONS)
    model_sites = next((projection for projection in inside if projection is not None), None)
    beside = getattr(getattr(parent, "output", None), "dense", None)
    projection: nn.Module | None = model_sites if model_sites is not None else beside
    source = module if projection is None else projection

    def keep(inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        activations._outputs[layer] = tensor.detach()
        if projection is not None:
            activations._heads[layer] = inputs.detach()

    _hook_output(source, keep, undo)


def _keep_projected_values(
    module: nn.Module, layer: int, activations: Activations, undo: ExitStack
) -> None:
    """Families without the interface: from the projection that makes their value vectors."""
    family = NON_INTERFACE.get(type(module).__name__)
    if family is None:
        return

    def keep(inputs: Any, output: Tensor) -> None:
        activations._values[layer] = family.values(module, output).detach()

    _hook_output(getattr(module, family.projection), keep, undo)


def _hook_output(source: nn.Module, keep: Callable[[Any, Any], None], undo: ExitStack) -> None:
    """Keep the input and output of a module in this thread; copies of the module are ignored."""
    thread = threading.get_ident()

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if module is source and threading.get_ident() == thread:
            keep(args[0] if args else None, output)

    undo.callback(source.register_forward_hook(hook).remove)
