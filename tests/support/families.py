"""Tiny random models of every kind of attention we claim, built from their configs."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

VOCABULARY = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

Maker = Callable[[], tuple[type[PreTrainedModel], Any]]


def _plain(config: type[Any], model: type[PreTrainedModel], **more: Any) -> Maker:
    return lambda: (model, config(**{**_COMMON, **more}))


def _gpt2() -> tuple[type[PreTrainedModel], Any]:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=256, eos_token_id=None
    )
    return hf.GPT2LMHeadModel, config


def _bert() -> tuple[type[PreTrainedModel], Any]:
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=256,
    )
    return hf.BertModel, config


def _modernbert() -> tuple[type[PreTrainedModel], Any]:
    config = hf.ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        local_attention=8,
        global_attn_every_n_layers=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=3,
        sep_token_id=4,
    )
    return hf.ModernBertModel, config


def _deepseek() -> tuple[type[PreTrainedModel], Any]:
    config = hf.DeepseekV3Config(
        **{
            **_COMMON,
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        }
    )
    return hf.DeepseekV3ForCausalLM, config


def _qwen3_next() -> tuple[type[PreTrainedModel], Any]:
    config = hf.Qwen3NextConfig(
        **{
            **_COMMON,
            "num_hidden_layers": 4,
            "layer_types": [
                "linear_attention",
                "full_attention",
                "linear_attention",
                "full_attention",
            ],
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }
    )
    return hf.Qwen3NextForCausalLM, config


def _falcon(*, alibi: bool) -> Maker:
    def make() -> tuple[type[PreTrainedModel], Any]:
        config = hf.FalconConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            alibi=alibi,
            eos_token_id=None,
        )
        return hf.FalconForCausalLM, config

    return make


def _bloom() -> tuple[type[PreTrainedModel], Any]:
    config = hf.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4, eos_token_id=None
    )
    return hf.BloomForCausalLM, config


def _gptj() -> tuple[type[PreTrainedModel], Any]:
    config = hf.GPTJConfig(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=3,
        n_head=4,
        rotary_dim=4,
        n_positions=256,
        eos_token_id=None,
    )
    return hf.GPTJForCausalLM, config


STREAMED: dict[str, Maker] = {
    "qwen2": _plain(hf.Qwen2Config, hf.Qwen2ForCausalLM),
    "multi-query llama": _plain(hf.LlamaConfig, hf.LlamaForCausalLM, num_key_value_heads=1),
    "llama": _plain(hf.LlamaConfig, hf.LlamaForCausalLM, num_key_value_heads=4),
    "qwen3": _plain(hf.Qwen3Config, hf.Qwen3ForCausalLM, head_dim=12),
    "mistral": _plain(hf.MistralConfig, hf.MistralForCausalLM, sliding_window=5),
    "gemma2": _plain(
        hf.Gemma2Config,
        hf.Gemma2ForCausalLM,
        head_dim=8,
        sliding_window=6,
        attn_logit_softcapping=1.5,
        query_pre_attn_scalar=4,
    ),
    "gemma3": _plain(
        hf.Gemma3TextConfig,
        hf.Gemma3ForCausalLM,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": _plain(hf.Phi3Config, hf.Phi3ForCausalLM),
    "gpt2": _gpt2,
    "gpt-neox": _plain(hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM),
    "olmo2": _plain(hf.Olmo2Config, hf.Olmo2ForCausalLM),
    "mixtral": _plain(hf.MixtralConfig, hf.MixtralForCausalLM, num_local_experts=4),
    "qwen3-moe": _plain(hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM, num_experts=4, **_EXPERTS),
    "gpt-oss": _plain(
        hf.GptOssConfig,
        hf.GptOssForCausalLM,
        head_dim=8,
        sliding_window=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "llama4": _plain(
        hf.Llama4TextConfig,
        hf.Llama4ForCausalLM,
        head_dim=8,
        num_hidden_layers=4,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=7,
        layer_types=[
            "chunked_attention",
            "chunked_attention",
            "full_attention",
            "chunked_attention",
        ],
    ),
    "deepseek-v3": _deepseek,
    "qwen3-next": _qwen3_next,
    "bert": _bert,
    "modernbert": _modernbert,
    "falcon": _falcon(alibi=False),  # calls sdpa by itself
}
FALLBACK: dict[str, Maker] = {
    "falcon with alibi": _falcon(alibi=True),
    "bloom": _bloom,
    "gptj": _gptj,
}
FAMILIES = {**STREAMED, **FALLBACK}
ENCODERS = {"bert", "modernbert"}
# Families whose stock sdpa does not exist (soft-caps, sinks): their own attention is eager.
NO_SDPA = {"gemma2", "gpt-oss"}


def build(name: str, implementation: str | None = None, seed: int = 0) -> PreTrainedModel:
    """The family's model, random but the same every time, sharp enough to attend unevenly."""
    kind, config = FAMILIES[name]()
    if implementation is not None:
        config._attn_implementation = implementation
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if (
                parameter.ndim > 1
                and "embed" not in parameter_name
                and "router" not in parameter_name
            ):
                parameter.mul_(6.0)
            if "sinks" in parameter_name:
                parameter.normal_()
    return model
