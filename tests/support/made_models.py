"""Tiny random models with tokenizers, saved into folders: what an experiment loads by name."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import made_tokenizers

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, {}),
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {}),
    "gemma3": (
        hf.Gemma3TextConfig,
        hf.Gemma3ForCausalLM,
        {"head_dim": 8, "sliding_window": 24},
    ),
    "bert": (hf.BertConfig, hf.BertModel, {}),
}
TEMPLATES = {"qwen2": "chatml", "llama": "llama3", "gemma3": "gemma"}


def save_model(
    folder: Path,
    kind: str = "qwen2",
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    chat: bool = True,
    seed: int = 0,
) -> str:
    """A model sharp enough to attend unevenly, and its tokenizer; the folder's path.

    Not so sharp that a weight underflows to 0: a weight above 0 means "could be seen" to tests.
    """
    tokenizer = save_tokenizer(folder, TEMPLATES[kind] if chat else None)
    config_class, model_class, more = KINDS[kind]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=8 * heads,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(48.0 / max(4, heads))
    model.save_pretrained(folder)
    return str(folder)


def save_tokenizer(folder: Path, template: str | None = None) -> Any:
    """A tokenizer of 540 tokens, saved beside a model."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(
            made_tokenizers.made("byte-level").backend_tokenizer.to_str()
        ),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    if template is not None:
        tokenizer.chat_template = made_tokenizers.CHAT_TEMPLATES[template]
    tokenizer.save_pretrained(folder)
    return tokenizer


def biased_model(
    dtype: torch.dtype = torch.float32, times: float = 1.0, layers: int = 2
) -> hf.PreTrainedModel:
    """A Qwen2 whose query and key biases are as large as those of Qwen2.5 (or `times` that): in a
    few dimensions."""
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
    )
    model = hf.Qwen2ForCausalLM(config).eval()
    for layer in model.model.layers:
        for projection, top in ((layer.self_attn.q_proj, 81.0), (layer.self_attn.k_proj, 145.0)):
            bias = torch.randn_like(projection.bias) * 2
            few = torch.randperm(len(bias))[: len(bias) // 16]
            bias[few] = top * torch.randn(len(few)).sign()
            projection.bias.data = bias * times
    return model.to(dtype)
