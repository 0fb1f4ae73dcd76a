"""Read the base language model: a folder of transformers, or the parts that `pack.py` wrote."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def read_base(folder: Path) -> dict[str, Tensor]:
    """The weights of the language model by name, without the prefix `model.`, in float32."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("part*.safetensors")):
        for name, data in load_file(file).items():
            name, kind = name.split(":")
            weights[name] = UNPACK[kind](data)
    if not weights:
        for name, data in load_file(folder / "model.safetensors").items():
            if name != "lm_head.weight":
                weights[name.removeprefix("model.")] = data.float()
    return weights


def _q4_1(data: Tensor) -> Tensor:
    """Blocks of 32 numbers: scale and offset in 16 bits, then 32 numbers of 4 bits."""
    blocks = data.reshape(data.shape[0], -1, 20)
    scale, offset = blocks[..., :4].contiguous().view(torch.float16).float().unbind(-1)
    packed = blocks[..., 4:]
    numbers = torch.cat([packed & 15, packed >> 4], -1)
    return (numbers * scale[..., None] + offset[..., None]).flatten(1)


def _q8_0(data: Tensor) -> Tensor:
    """Blocks of 32 numbers: scale in 16 bits, then 32 numbers of 8 bits."""
    blocks = data.reshape(data.shape[0], -1, 34)
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    return (blocks[..., 2:].contiguous().view(torch.int8) * scale).flatten(1)


UNPACK = {"F32": Tensor.float, "Q4_1": _q4_1, "Q8_0": _q8_0}
