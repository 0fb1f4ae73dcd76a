"""The names that the code of a module uses: whether it computes attention, and how."""

import inspect
from functools import lru_cache
from typing import Any

from torch import nn

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
ATTENTION = {"scaled_dot_product_attention", "softmax"}


def forward_names(module: nn.Module) -> frozenset[str]:
    """The names that the `forward` of a module and of its class use."""
    return _of_forward(type(module).forward) | _names_of(_own_forward(module))


def always_calls_interface(module: nn.Module) -> bool:
    """Whether a module uses the attention interface for eager attention too."""
    replaced = _own_forward(module)
    names = _of_forward(type(module).forward) if replaced is None else _names_of(replaced)
    return {INTERFACE, "get_interface"} <= names


def method_names(module: nn.Module) -> frozenset[str]:
    """The names that the methods of a module use."""
    cls: Any = type(module)
    return _of_class(cls) | _names_of(_own_forward(module))


@lru_cache(maxsize=1024)
def _of_class(cls: Any) -> frozenset[str]:
    classes = [c for c in cls.__mro__ if not c.__module__.startswith(("torch.", "builtins"))]
    methods = [method for c in classes for method in vars(c).values() if callable(method)]
    return frozenset().union(*map(_names_of, methods))


@lru_cache(maxsize=4096)  # a model has hundreds of modules and few classes
def _of_forward(forward: Any) -> frozenset[str]:
    return _names_of(forward)


def _names_of(function: Any) -> frozenset[str]:
    code = None if function is None else getattr(inspect.unwrap(function), "__code__", None)
    return frozenset(() if code is None else code.co_names)


def _own_forward(module: nn.Module) -> Any:
    """The `forward` that was set on the instance; None if it uses that of its class."""
    instance_forward = module.__dict__.get("forward")
    return getattr(instance_forward, "__func__", instance_forward)


def structure(named: dict[str, nn.Module]) -> int:
    """A hash of the modules of a model: their names, their classes and their `forward`."""
    classes: tuple[type[nn.Module], ...] = tuple(map(type, named.values()))
    forwards = tuple(id(_own_forward(m)) for m in named.values() if "forward" in m.__dict__)
    return hash((tuple(named), classes, forwards, frozenset((c, c.forward) for c in classes)))
