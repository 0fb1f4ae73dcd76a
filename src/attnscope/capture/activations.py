"""`record`: hold what the attention layers of a model make in a forward pass: their value vectors
and their outputs. Only of the last pass, and only inside the `with` block; the model stays as it
was. Works beside `watch`, in either order. Must not know what is computed from them.

Value vectors are taken where every family hands them over, at the call of transformers' attention
interface; outputs behind the layer's output projection, before anything is added to them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from attnscope.capture import sites
from attnscope.errors import InputError, ScopeError

__all__ = ["Activations", "record"]


class Activations:
    """What the attention layers made in the last forward pass; a new pass forgets the one before.

    Tensors are the model's own (its dtype and device, no copies): read them, do not write.
    """

    def __init__(self, layers: list[int]):
        self.layers = layers
        self._values: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._complete = False

    def values(self, layer: int) -> Tensor:
        """Value vectors [batch, key/value heads, keys, size], as the keys were attended to."""
        return self._held(self._values, layer, "value vectors")

    def outputs(self, layer: int) -> Tensor:
        """Attention outputs [batch, tokens, hidden], after the output projection."""
        return self._held(self._outputs, layer, "attention outputs")

    def _held(self, held: dict[int, Tensor], layer: int, what: str) -> Tensor:
        if layer not in self.layers:
            raise InputError(f"layer {layer!r} is not recorded; recorded: {self.layers}")
        if not self._complete:
            raise ScopeError("no forward pass was recorded; call the model inside the with block")
        if layer not in held:
            raise ScopeError(f"layer {layer} made no {what} that attnscope can see")
        return held[layer]

    def _forget(self) -> None:
        self._values.clear()
        self._outputs.clear()
        self._complete = False


def record(model: nn.Module, layers: Any = None) -> AbstractContextManager[Activations]:
    """Hold value vectors and attention outputs of each forward pass, inside a `with` block.

        with record(model, layers=[0]) as activations:
            model(**inputs)
            activations.values(0)            # [batch, key/value heads, keys, size]
            activations.outputs(0)           # [batch, tokens, hidden]

    After the block they are gone, so that no model's worth of activations is kept by accident.
    Meant for passes over whole prompts; of a pass that continues a cache, outputs are those of
    its new tokens.
    """
    found = sites.find(model)
    return _recording(found, Activations(sorted(sites.restrict(found, layers))))


@contextmanager
def _recording(found: sites.Sites, held: Activations) -> Iterator[Activations]:
    with ExitStack() as undo:
        # A compiled graph would not call us: compiled parts run as written while recorded.
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.callback(held._forget)

        def begin(module: nn.Module, args: Any) -> None:
            held._forget()

        def end(module: nn.Module, args: Any, output: Any) -> None:
            held._complete = True

        undo.callback(found.base.register_forward_pre_hook(begin).remove)
        undo.callback(found.base.register_forward_hook(end).remove)
        parents = {child: module for module in found.base.modules() for child in module.children()}
        for module, layer in found.modules.items():
            if layer not in held.layers:
                continue
            _take_outputs(module, parents.get(module), layer, held, undo)
            if found.interface:
                _listen(module, _keep(held._values, layer), undo)
            else:
                _take_projected_values(module, layer, held, undo)
        yield held


def _keep(where: dict[int, Tensor], layer: int) -> Callable[[Tensor], None]:
    def keep(tensor: Tensor) -> None:
        where[layer] = tensor.detach()

    return keep


# The output projection goes by these names, inside the attention module.
_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "Wo")


def _take_outputs(
    module: nn.Module, parent: nn.Module | None, layer: int, held: Activations, undo: ExitStack
) -> None:
    """Behind the projection, because some modules add the residual before they return, and
    BERT's project in the module beside.
    """
    found = next((getattr(module, name) for name in _PROJECTIONS if hasattr(module, name)), None)
    beside = getattr(getattr(parent, "output", None), "dense", None)
    source: nn.Module = found if found is not None else beside if beside is not None else module

    def take(module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        held._outputs[layer] = tensor.detach()

    undo.callback(source.register_forward_hook(take).remove)


# Whom to tell the value vectors of a module's attention call. `get_interface` is ours while
# anybody listens, and that of transformers again when nobody does, in whatever order they leave.
_listeners: dict[nn.Module, list[Callable[[Tensor], None]]] = {}
_get_interface = AttentionInterface.get_interface


def _telling(self: AttentionInterface, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    attention = _get_interface(self, *args, **kwargs)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for tell in _listeners.get(module, ()):
            tell(kwargs["value"] if "value" in kwargs else args[2])
        return attention(module, *args, **kwargs)

    return call


def _listen(module: nn.Module, tell: Callable[[Tensor], None], undo: ExitStack) -> None:
    _listeners.setdefault(module, []).append(tell)
    AttentionInterface.get_interface = _telling

    def stop() -> None:
        _listeners[module].remove(tell)
        if not _listeners[module]:
            del _listeners[module]
        if not _listeners:
            AttentionInterface.get_interface = _get_interface

    undo.callback(stop)


def _take_projected_values(module: Any, layer: int, held: Activations, undo: ExitStack) -> None:
    """Families without the interface: from the projection that makes their value vectors."""
    fused = getattr(module, "query_key_value", None)
    source = getattr(module, "v_proj", None) if fused is None else fused
    if source is None:
        return

    def take(projection: nn.Module, args: Any, made: Tensor) -> None:
        if fused is None:  # gptj
            made = made.view(*made.shape[:2], -1, module.head_dim).transpose(1, 2)
        elif hasattr(module, "_reshape"):  # bloom
            made = module._reshape(made)[2]
        elif hasattr(module, "_split_heads"):  # falcon
            made = module._split_heads(made)[2].transpose(1, 2)
        else:
            return
        held._values[layer] = made.detach()

    undo.callback(source.register_forward_hook(take).remove)
