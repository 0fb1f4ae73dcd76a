"""Reads the arguments of modules, and decides which keyword arguments affect attention."""

import dis
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from torch import nn
from transformers.integrations.eager_paged import eager_paged_attention_forward
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# The mask already contains these, or they do not change the result.
REDUNDANT = {
    "cache_position",
    "deterministic",
    "enable_gqa",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "sliding_window",
    "use_cache",
}
_KNOWN = {"dropout", "scaling", "is_causal", "softcap", "s_aux", "position_bias"}
_SUPPORTED = _KNOWN | REDUNDANT


def argument(module: nn.Module, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """An argument of a module's call, by position or keyword; None if it was not passed."""
    if name in kwargs or not args:
        return kwargs.get(name)
    return inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get(name)


def unsupported_kwargs(function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """The names of keyword arguments that the function reads and attnscope does not support."""
    return [
        name
        for name, value in options.items()
        if name not in _SUPPORTED and value is not None and reads_kwarg(function, name)
    ]


@lru_cache(maxsize=256)
def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters of a function."""
    return tuple(inspect.signature(function).parameters)


@lru_cache(maxsize=1024)
def reads_kwarg(function: Callable[..., Any], name: str) -> bool:
    """Whether an attention function can read a keyword argument of this name."""
    if name in parameters(function):
        return True
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    if function is sdpa_attention_forward:
        return name in code.co_consts
    catch_all = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.VAR_KEYWORD
    ]
    # A function that never reads its `**kwargs` ignores the argument.
    return any(step.argval in catch_all for step in dis.get_instructions(code))


_SHIPPED = (
    sdpa_attention_forward,
    flash_attention_forward,
    flex_attention_forward,
    eager_paged_attention_forward,
)


def is_shipped(function: Any) -> bool:
    """Whether transformers ships an attention function, or it is attnscope's version of sdpa.

    Compares function objects, because any function may be registered under a known name.
    """
    if isinstance(function, partial):  # transformers bound a kernel to it
        function = function.func
    ours = getattr(function, "__module__", "") == "attnscope.interception.dense_fallback"
    return ours or any(function is known for known in _SHIPPED)
