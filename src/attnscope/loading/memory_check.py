"""Whether there is memory for a model before any of it is read.

A system that runs out of memory ends the process without a word; so what the files say of
themselves is held against what is free. This module must not know names of models.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnscope import memory
from attnscope.errors import ModelError

HEADROOM = 256 << 20
"""Bytes that are left for everything else."""


class NotEnoughMemoryError(ModelError):
    """A model that does not fit in memory."""

    code = "not-enough-memory"


def numbers_in(files: Sequence[Path]) -> int:
    """How many numbers the tensors of safetensors files are, by their heads."""
    found = 0
    for path in files:
        with path.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            head: dict[str, Any] = json.loads(opened.read(length))
        for name, tensor in head.items():
            if name != "__metadata__":
                count = 1
                for side in tensor["shape"]:
                    count *= side
                found += count
    return found


def check_room(numbers: int, width: int, name: str, device: str = "cpu") -> None:
    """Refuse so many numbers of so many bytes each where they cannot fit."""
    there = memory.free(device)
    needed = numbers * width + HEADROOM
    if there is not None and needed > there:
        raise NotEnoughMemoryError(
            f"{name} does not fit in memory: {numbers / 1e9:.2f} billion weights of {width} bytes "
            f"need {needed / 1e9:.1f} GB, and {there / 1e9:.1f} GB are free on {device}. Choose a "
            "smaller model, or dtype='bfloat16' for half of it, or end other programs"
        )
