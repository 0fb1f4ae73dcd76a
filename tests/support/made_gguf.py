"""A folder's Qwen2 model as a GGUF file, written by GGUF's own package."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def save_gguf(
    folder: str,
    file: Path,
    *,
    family: str = "qwen2",
    quantised: bool = False,
    without: str | None = None,
) -> Path:
    config = json.loads((Path(folder) / "config.json").read_text())
    writer = gguf.GGUFWriter(file, family)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, folder)
    for name, tensor in load_file(Path(folder) / "model.safetensors").items():
        if name == without:
            continue
        values = tensor.float().numpy()
        if quantised and values.ndim == 2 and values.shape[1] % 32 == 0:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_renamed(name), packed, raw_dtype=kind)
        else:
            writer.add_tensor(_renamed(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _renamed(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, number, rest = name.split(".", 3)
    for ours, theirs in NAMES.items():
        if rest.startswith(ours):
            return f"blk.{number}.{rest.replace(ours, theirs)}"
    raise AssertionError(name)


def _add_tokenizer(writer: Any, folder: str) -> None:
    content = json.loads((Path(folder) / "tokenizer.json").read_text())
    words = {
        **content["model"]["vocab"],
        **{t["content"]: t["id"] for t in content["added_tokens"]},
    }
    special = {t["content"] for t in content["added_tokens"]}
    ordered = sorted(words, key=lambda word: words[word])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(ordered)
    writer.add_token_types([3 if word in special else 1 for word in ordered])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(words["<s>"])
    writer.add_eos_token_id(words["</s>"])
    writer.add_pad_token_id(words["<pad>"])
    writer.add_add_bos_token(True)
    writer.add_chat_template((Path(folder) / "chat_template.jinja").read_text())
