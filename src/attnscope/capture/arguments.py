"""Which arguments of an attention function count: those of transformers that we know, and those
that the function could make something of.
"""

import dis
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from transformers.integrations.eager_paged import eager_paged_attention_forward
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# What these say, the mask has said already, or it changes nothing that is computed.
_REDUNDANT = {
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
_SUPPORTED = _KNOWN | _REDUNDANT


def unsupported_kwargs(function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """The names of arguments that we do not know and the function heeds."""
    return [
        name
        for name, value in options.items()
        if name not in _SUPPORTED and value is not None and reads_kwarg(function, name)
    ]


@lru_cache(maxsize=256)
def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of its parameters."""
    return tuple(inspect.signature(function).parameters)


@lru_cache(maxsize=1024)
def reads_kwarg(function: Callable[..., Any], name: str) -> bool:
    """Whether an attention function can make anything of an argument of this name."""
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
    # A function that never reads what it swallowed cannot heed it.
    return any(step.argval in catch_all for step in dis.get_instructions(code))


_SHIPPED = (
    sdpa_attention_forward,
    flash_attention_forward,
    flex_attention_forward,
    eager_paged_attention_forward,
)


def is_shipped(function: Any) -> bool:
    """Whether an attention function is one that transformers ships, or ours in place of torch's;
    a name does not tell, because anything may be registered under it."""
    if isinstance(function, partial):  # a kernel that was chosen in advance
        function = function.func
    ours = getattr(function, "__module__", "") == "attnscope.capture.dense_fallback"
    return ours or any(function is known for known in _SHIPPED)
