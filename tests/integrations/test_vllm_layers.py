"""What of vLLM is refused, and how a layer is read; with made objects in place of vLLM's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnscope.errors import InputError, ModelError
from attnscope.integrations.vllm.layers import (
    check_config,
    check_module,
    find_layers,
    layer_number,
    read_layers,
)
from attnscope.integrations.vllm.worker import external_id
from paged_engine import write_plain
from support_errors import raises


def config(path: str = "", value: Any = None) -> Any:
    """A configuration that is supported, but for one value."""
    made = SimpleNamespace(
        speculative_config=None,
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(use_ubatching=False),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False, cache_dtype="auto"),
        model_config=SimpleNamespace(runner_type="generate", is_encoder_decoder=False),
        compilation_config=SimpleNamespace(cudagraph_mode=Mode(False), static_forward_context={}),
    )
    *parents, name = path.split(".")
    part = made
    for parent in parents:
        part = getattr(part, parent)
    if name:
        setattr(part, name, value)
    return made


class Mode:
    """A mode of CUDA graphs."""

    def __init__(self, full: bool) -> None:
        self.full = full

    def has_full_cudagraphs(self) -> bool:
        return self.full


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        ("speculative_config", object(), "speculative-decoding"),
        ("kv_transfer_config", object(), "kv-transfer"),
        ("parallel_config.decode_context_parallel_size", 2, "context-parallel"),
        ("parallel_config.prefill_context_parallel_size", 2, "context-parallel"),
        ("parallel_config.use_ubatching", True, "micro-batches"),
        ("cache_config.kv_sharing_fast_prefill", True, "fast-prefill"),
        ("cache_config.cache_dtype", "fp8_e4m3", "quantized-cache"),
        ("model_config.runner_type", "pooling", "no-decoder"),
        ("model_config.is_encoder_decoder", True, "no-decoder"),
        ("compilation_config.cudagraph_mode", Mode(True), "full-graphs"),
    ],
)
def test_settings_that_are_refused(path: str, value: Any, code: str) -> None:
    check_config(config())
    with raises(ModelError, code):
        check_config(config(path, value))


class Impl(SimpleNamespace):
    """A backend that stores keys before values."""

    def do_kv_cache_update(self, layer: Any, *arguments: torch.Tensor) -> None:
        write_plain(*arguments)


def attention(kind: str = "Attention", **changes: Any) -> Any:
    """An attention module; names with `impl_` are attributes of its implementation."""
    impl = {
        "alibi_slopes": None,
        "logits_soft_cap": 0,
        "sinks": None,
        "scale": 0.25,
    } | {name.removeprefix("impl_"): v for name, v in changes.items() if name.startswith("impl_")}
    backend = changes.pop("backend", "FLASH_ATTN")
    values = {
        "layer_name": "model.layers.3.self_attn.attn",
        "attn_type": "decoder",
        "attn_backend": SimpleNamespace(get_name=lambda: backend),
        "kv_cache_dtype": "auto",
        "use_mm_prefix": False,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "sliding_window": None,
        "kv_cache": torch.zeros(5, 2, 4, 16),
        "impl": Impl(**impl),
    } | {name: value for name, value in changes.items() if not name.startswith("impl_")}
    return type(kind, (SimpleNamespace,), {})(**values)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"kind": "MLAAttention"}, "unsupported-attention"),
        ({"kind": "ChunkedLocalAttention"}, "unsupported-attention"),
        ({"attn_type": "encoder_only"}, "no-decoder"),
        ({"backend": "FLASHINFER"}, "unsupported-backend"),
        ({"kv_cache_dtype": "fp8"}, "quantized-cache"),
        ({"use_mm_prefix": True}, "unsupported-attention"),
        ({"impl_use_alibi_sqrt": True}, "unsupported-attention"),
        ({"impl_alibi_slopes": [1.0], "impl_logits_soft_cap": 5.0}, "unsupported-attention"),
        ({"impl_alibi_slopes": [1.0], "impl_sinks": torch.ones(4)}, "unsupported-attention"),
    ],
)
def test_attention_that_is_refused(changes: dict[str, Any], code: str) -> None:
    check_module("model.layers.3.attn", attention())
    with raises(ModelError, code):
        check_module("model.layers.3.attn", attention(**changes))


def test_a_layer_is_read_from_its_module() -> None:
    module = attention(
        sliding_window=16,
        impl_logits_soft_cap=30.0,
        impl_sinks=torch.arange(4.0),
    )
    (layer,) = read_layers({module.layer_name: module})
    assert (layer.layer, layer.heads, layer.kv_heads, layer.scale) == (3, 4, 2, 0.25)
    assert (layer.window, layer.softcap, layer.slopes) == (16, 30.0, None)
    assert layer.sinks is not None
    assert layer.sinks.tolist() == [0, 1, 2, 3]
    assert layer.layout.strides == (0, 16, 1)


def test_caches_of_another_form_have_a_layout_of_their_own() -> None:
    one, same = attention(), attention()
    wider = attention(kv_cache=torch.zeros(5, 2, 4, 24))
    larger = attention(kv_cache=torch.zeros(5, 2, 4, 24), head_size=12)
    modules = {f"layers.{i}": each for i, each in enumerate((one, same, wider, larger))}
    layouts = [layer.layout for layer in read_layers(modules)]
    assert layouts[0] is layouts[1]
    assert [layout.size for layout in layouts] == [8, 8, 8, 12]
    assert [layout.strides for layout in layouts] == [(0, 16, 1)] * 2 + [(0, 24, 1)] * 2


def test_layers_are_found_by_number() -> None:
    modules = {
        f"model.layers.{i}.attn": attention(layer_name=f"model.layers.{i}.attn") for i in (2, 0)
    }
    made = config("compilation_config.static_forward_context", modules | {"experts": object()})
    assert list(find_layers(made, None)) == ["model.layers.0.attn", "model.layers.2.attn"]
    assert list(find_layers(made, [2])) == ["model.layers.2.attn"]
    with raises(InputError, "unknown-layer"):
        find_layers(made, [1])
    with raises(ModelError, "no-attention"):
        find_layers(config(), None)
    two = modules | {"model.layers.2.cross": attention(layer_name="model.layers.2.cross")}
    with raises(ModelError, "repeated-attention"):
        find_layers(config("compilation_config.static_forward_context", two), None)


def test_a_name_with_several_numbers_is_refused() -> None:
    assert layer_number("model.layers.12.self_attn.attn") == 12
    with raises(ModelError, "unknown-layer-name"):
        layer_number("model.blocks.1.layers.2.attn")


def test_pages_that_are_no_tensor_are_refused() -> None:
    with raises(ModelError, "unreadable-pages"):
        read_layers({"model.layers.3.attn": attention(kv_cache=[torch.zeros(1)])})


@pytest.mark.parametrize(
    ("name", "index", "sender"),
    [
        ("chatcmpl-1f-00aa11bb", 0, "chatcmpl-1f"),
        ("2_chatcmpl-1f-00aa11bb", 2, "chatcmpl-1f"),
        ("12-9a99f654", 0, "12"),
        ("cmpl-x-0", 0, "cmpl-x-0"),
    ],
)
def test_ids_of_sequences(name: str, index: int, sender: str) -> None:
    assert external_id(name) == (index, sender)
