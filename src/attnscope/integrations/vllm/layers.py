"""The attention layers of a vLLM worker, and what of vLLM is not supported.

Everything that this module does not know is refused: a wrong number is worse than an error.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from attnscope.errors import ModelError, unknown
from attnscope.integrations.vllm.pages import PageLayout, learn_layout
from attnscope.integrations.vllm.reduction import AttentionLayer

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Attention backends of vLLM whose pages and metadata are known."""
CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")


def refused(what: str, code: str, instead: str, **values: object) -> ModelError:
    """The error for a feature of vLLM that is not supported."""
    return ModelError(f"attnscope does not support {what} of vLLM. {instead}", code=code, **values)


def check_config(config: Any) -> None:
    """Refuse settings of vLLM, a `VllmConfig`, under which attention cannot be measured."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    if config.speculative_config is not None:
        raise refused(
            "speculative decoding", "speculative-decoding", "Leave out speculative_config"
        )
    if config.kv_transfer_config is not None:
        raise refused("KV transfer", "kv-transfer", "Leave out kv_transfer_config")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise refused("context parallelism", "context-parallel", f"Use {name}=1", option=name)
    if getattr(parallel, "use_ubatching", False):
        raise refused("micro-batches", "micro-batches", "Leave out enable_dbo and ubatch_size")
    if getattr(cache, "kv_sharing_fast_prefill", False):
        raise refused("fast prefill", "fast-prefill", "Use kv_sharing_fast_prefill=False")
    if cache.cache_dtype not in CACHE_DTYPES:
        raise quantized(cache.cache_dtype)
    if model.runner_type != "generate" or model.is_encoder_decoder:
        raise refused(
            "pooling models and encoder–decoder models", "no-decoder", "Use a generative decoder"
        )
    mode = config.compilation_config.cudagraph_mode
    if mode is not None and mode.has_full_cudagraphs():
        raise refused(
            "CUDA graphs that contain attention",
            "full-graphs",
            "Start vLLM with compilation_config={'cudagraph_mode': 'PIECEWISE'}, or with "
            "VLLM_PLUGINS=attnscope, which does the same",
            mode=str(mode),
        )


def quantized(dtype: str) -> ModelError:
    """The error for a KV cache that is quantised or unknown."""
    return refused(
        f"the KV cache dtype {dtype!r}",
        "quantized-cache",
        f"Use kv_cache_dtype='auto' (known: {', '.join(CACHE_DTYPES)})",
        dtype=dtype,
    )


def find_layers(config: Any, layers: Iterable[int] | None) -> dict[str, Any]:
    """The attention modules of a worker by name, checked; those of `layers`, or all."""
    modules: dict[int, tuple[str, Any]] = {}
    for name, module in config.compilation_config.static_forward_context.items():
        if hasattr(module, "impl") and hasattr(module, "layer_name"):
            check_module(name, module)
            number = layer_number(name)
            if number in modules:
                raise refused(
                    f"two attention modules in layer {number} ({modules[number][0]}, {name})",
                    "repeated-attention",
                    "Measure another model",
                    layer=number,
                )
            modules[number] = name, module
    if not modules:
        raise refused("models without attention", "no-attention", "Measure another model")
    chosen = sorted(modules) if layers is None else list(layers)
    for number in chosen:
        if number not in modules:
            raise unknown("layer", number, sorted(modules))
    return {modules[number][0]: modules[number][1] for number in chosen}


def layer_number(name: str) -> int:
    """The layer of a module, from its name: the only number in it."""
    numbers = re.findall(r"(?<![^.])\d+(?![^.])", name)
    if len(numbers) != 1:
        raise ModelError(
            f"the name {name!r} of an attention module has no single layer number",
            code="unknown-layer-name",
            name=name,
        )
    return int(numbers[0])


def check_module(name: str, module: Any) -> None:
    """Refuse attention modules that compute something else than causal attention."""
    kind, impl = type(module).__name__, module.impl
    if kind != "Attention":
        instead = "Measure a model with plain attention"
        if kind == "MLAAttention":
            instead = "Its keys are latent vectors; measure the model with attnscope.watch in "
            instead += "transformers"
        raise refused(f"{kind} ({name})", "unsupported-attention", instead, kind=kind)
    if module.attn_type != "decoder":
        raise refused(
            f"{module.attn_type} attention ({name})", "no-decoder", "Use a generative decoder"
        )
    backend = module.attn_backend.get_name()
    if backend not in BACKENDS:
        instead = f"Use attention_backend={BACKENDS[-1]!r} (known: {', '.join(BACKENDS)})"
        raise refused(f"the backend {backend}", "unsupported-backend", instead, backend=backend)
    if module.kv_cache_dtype not in CACHE_DTYPES:
        raise quantized(module.kv_cache_dtype)
    for what, present in {
        "the square root of ALiBi": getattr(impl, "use_alibi_sqrt", False),
        "attention to both sides inside images": getattr(module, "use_mm_prefix", False),
        "ALiBi together with a soft-cap": impl.alibi_slopes is not None
        and bool(impl.logits_soft_cap),
        "ALiBi together with learned sinks": impl.alibi_slopes is not None
        and impl.sinks is not None,
    }.items():
        if present:
            raise refused(
                f"{what} ({name})", "unsupported-attention", "Measure another model", name=name
            )


def read_layers(modules: Mapping[str, Any]) -> list[AttentionLayer]:
    """What attention modules do, by name."""
    layouts: dict[tuple[Any, ...], PageLayout] = {}
    return [_read_layer(name, module, layouts) for name, module in modules.items()]


def _read_layer(
    name: str, module: Any, layouts: dict[tuple[Any, ...], PageLayout]
) -> AttentionLayer:
    impl = module.impl
    slopes = impl.alibi_slopes
    return AttentionLayer(
        name=name,
        layer=layer_number(name),
        heads=module.num_heads,
        kv_heads=module.num_kv_heads,
        scale=float(impl.scale),
        layout=_read_layout(module, layouts),
        softcap=float(impl.logits_soft_cap) if impl.logits_soft_cap else None,
        window=module.sliding_window,
        slopes=None if slopes is None else torch.as_tensor(slopes).float().cpu(),
        sinks=None if impl.sinks is None else impl.sinks.detach(),
    )


def _read_layout(module: Any, layouts: dict[tuple[Any, ...], PageLayout]) -> PageLayout:
    """The layout of a module's KV cache; caches of the same form are learned once."""
    cache = module.kv_cache
    if not isinstance(cache, torch.Tensor) or cache.ndim != 4:
        raise ModelError(
            f"{module.layer_name} has no KV cache [pages, heads, tokens, channels]; this version "
            "of vLLM is not supported",
            code="unreadable-pages",
        )
    form = type(module.impl), cache.shape, cache.stride(), cache.dtype, cache.device
    key = *form, module.head_size
    if key not in layouts:
        write = partial(module.impl.do_kv_cache_update, module)
        layouts[key] = learn_layout(write, cache, module.head_size)
    return layouts[key]
