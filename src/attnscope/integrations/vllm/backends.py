"""vLLM's attention backends, changed so that attention stays outside of CUDA graphs.

vLLM runs attention as an operator that its compiler does not enter, so hooks run between compiled
pieces of the model. Only a CUDA graph of a whole step would hide them. The metadata builders of
these backends declare that they support none, so vLLM uses piecewise graphs.
"""

from functools import cache
from typing import Any

from attnscope.errors import unknown
from attnscope.integrations.vllm.layers import BACKENDS

_STOCK = {
    "CPU_ATTN": ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend"),
    "FLASH_ATTN": ("vllm.v1.attention.backends.flash_attn", "FlashAttentionBackend"),
    "TRITON_ATTN": ("vllm.v1.attention.backends.triton_attn", "TritonAttentionBackend"),
}
"""By the name of a backend: module and class."""


def register() -> None:
    """Replace vLLM's backends by those of this module."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in BACKENDS:
        register_backend(AttentionBackendEnum[name], f"{__name__}.{name}")


@cache
def backend_class(name: str) -> Any:
    """The changed class of a backend; its stock class is imported when it is first used."""
    from importlib import import_module

    module, kind = _STOCK[name]
    stock: Any = getattr(import_module(module), kind)

    def get_builder_cls() -> Any:
        return _builder_class(stock.get_builder_cls())

    members = {"get_builder_cls": staticmethod(get_builder_cls), "__module__": __name__}
    return type(name, (stock,), members)


@cache
def _builder_class(stock: Any) -> Any:
    """A metadata builder without support for CUDA graphs."""
    from vllm.v1.attention.backend import AttentionCGSupport

    def get_cudagraph_support(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return AttentionCGSupport.NEVER

    return type(
        stock.__name__,
        (stock,),
        {
            "_cudagraph_support": AttentionCGSupport.NEVER,
            "get_cudagraph_support": classmethod(get_cudagraph_support),
            "__module__": __name__,
        },
    )


def __getattr__(name: str) -> Any:
    if name in _STOCK:
        return backend_class(name)
    if name.startswith("_"):
        raise AttributeError(name)
    raise unknown("backend", name, _STOCK)
