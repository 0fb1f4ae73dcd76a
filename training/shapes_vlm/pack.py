"""Split the base model into files that are small enough to carry to another machine.

    python training/shapes_vlm/pack.py MODEL.gguf TOKENIZER_FOLDER build/base

The quantised blocks of the GGUF file are stored unchanged, in the row order of transformers, under
the names of transformers; `base.py` turns them into numbers. Needs the extra `[gguf]`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PART = 48_500_000


def name_of(gguf: str) -> str:
    """The name of a tensor in transformers, inside the language model."""
    if gguf == "token_embd.weight":
        return "embed_tokens.weight"
    if gguf == "output_norm.weight":
        return "norm.weight"
    _, layer, part, _ = gguf.split(".")
    return f"layers.{layer}.{NAMES[part]}.weight"


def ordered(rows: NDArray[np.uint8], heads: int) -> NDArray[np.uint8]:
    """Rows of a query or key projection in the order of transformers.

    GGUF interleaves the two halves of each head's rotary dimensions.
    """
    width = rows.shape[-1]
    return rows.reshape(heads, -1, 2, width).swapaxes(1, 2).reshape(-1, width)


def main() -> None:
    """Write the parts, and copy the tokenizer and the configuration."""
    from gguf import GGUFReader

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path, help="with config.json and tokenizer.json")
    parser.add_argument("out", type=Path)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(chosen.model)
    heads = {
        kind: int(reader.fields[f"llama.attention.{field}"].contents())
        for kind, field in (("attn_q", "head_count"), ("attn_k", "head_count_kv"))
    }
    part: dict[str, torch.Tensor] = {}
    number = 0
    for tensor in [*reader.tensors, None]:
        if tensor is None or sum(t.nbytes for t in part.values()) + tensor.n_bytes > PART:
            save_file(part, chosen.out / f"part{number}.safetensors")
            part, number = {}, number + 1
        if tensor is None:
            break
        data = np.array(tensor.data)
        kind = tensor.tensor_type.name
        for rotary, count in heads.items():
            if f".{rotary}." in tensor.name:
                data = ordered(data, count)
        part[f"{name_of(tensor.name)}:{kind}"] = torch.from_numpy(np.ascontiguousarray(data))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chosen.folder / name, chosen.out / name)


if __name__ == "__main__":
    main()
