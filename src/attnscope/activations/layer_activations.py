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

from attnscope.errors import ScopeError, unknown
from attnscope.interception import sites
from attnscope.interception.captured_call import CapturedCall
from attnscope.interception.families import NON_INTERFACE, OUTPUT_PROJECTIONS
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.hooks import Hook
from attnscope.interception.intercept import register
from attnscope.interception.sites import Site


class Activations:
    """The activations of the attention layers in the last forward pass; a new pass replaces them.

    Tensors are the model's own (its dtype and device, no copies): read them, do not write.
    """

    def __init__(self, layers: list[int]):
        self.layers = layers
        self._tensors: dict[tuple[str, int], Tensor] = {}
        self._pass_done = False

    def values(self, layer: int) -> Tensor:
        """Value vectors [batch, key/value heads, keys, size], as the keys were attended to."""
        return self._get("values", layer)

    def heads(self, layer: int) -> Tensor:
        """The heads' outputs side by side [batch, tokens, heads · size], as the output projection
        is given them (behind a gate, where a family has one)."""
        return self._get("heads", layer)

    def outputs(self, layer: int) -> Tensor:
        """Attention outputs [batch, tokens, hidden], after the output projection."""
        return self._get("outputs", layer)

    def _get(self, what: str, layer: int) -> Tensor:
        if layer not in self.layers:
            raise unknown("layer", layer, self.layers)
        if not self._pass_done:
            raise ScopeError(
                "no forward pass was recorded; call the model inside the with block",
                code="no-forward-pass",
            )
        if (what, layer) not in self._tensors:
            raise ScopeError(
                f"attnscope found no {what} of the attention of layer {layer}",
                code="no-activations",
                layer=layer,
                what=what,
            )
        return self._tensors[what, layer]

    def _set(self, what: str, layer: int, tensor: Tensor) -> None:
        self._tensors[what, layer] = tensor.detach()

    def _clear(self) -> None:
        self._tensors.clear()
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


class _Values(Hook):
    """The hook that keeps the value vectors of the last pass; it needs no geometry."""

    needs_geometry = False

    def __init__(self, activations: Activations):
        self.activations = activations

    def begin(self, stack: str, forward_pass: ForwardPass) -> None:
        self.activations._clear()

    def wants(self, site: Site) -> bool:
        return site.kind == "self" and site.layer in self.activations.layers

    def on_call(self, captured: CapturedCall) -> None:
        if captured.v is not None:
            self.activations._set("values", captured.site.layer, captured.v)

    def end(self, stack: str, *, finished: bool) -> None:
        self.activations._pass_done = finished


@contextmanager
def _recording(model_sites: sites.Sites, activations: Activations) -> Iterator[Activations]:
    with ExitStack() as undo:
        undo.callback(activations._clear)
        undo.enter_context(register(model_sites, _Values(activations)))
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
    beside = getattr(getattr(parent, "output", None), "dense", None)
    projection = next((one for one in (*inside, beside) if one is not None), None)

    def keep(inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        activations._set("outputs", layer, tensor)
        if projection is not None:
            activations._set("heads", layer, inputs)

    _hook_output(module if projection is None else projection, keep, undo)


def _keep_projected_values(
    module: nn.Module, layer: int, activations: Activations, undo: ExitStack
) -> None:
    """Families without the interface: from the projection that makes their value vectors."""
    family = NON_INTERFACE.get(type(module).__name__)
    if family is not None:
        _hook_output(
            getattr(module, family.projection),
            lambda _, output: activations._set("values", layer, family.values(module, output)),
            undo,
        )


def _hook_output(source: nn.Module, keep: Callable[[Any, Any], None], undo: ExitStack) -> None:
    """Keep the input and output of a module in this thread; copies of the module are ignored."""
    thread = threading.get_ident()

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if module is source and threading.get_ident() == thread:
            keep(args[0] if args else None, output)

    undo.callback(source.register_forward_hook(hook).remove)
