"""Check whether a model fits in memory before its weights are read.

A system without free memory kills the process without a message. So the sizes in the headers of
the files are compared with the free memory.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnscope import memory
from attnscope.errors import ModelError

HEADROOM = 256 << 20
"""Bytes to leave free for other data."""


class NotEnoughMemoryError(ModelError):
    """A model that does not fit in memory."""

    code = "not-enough-memory"


def numbers_in(files: Sequence[Path]) -> int:
    """The number of weights in safetensors files, from their headers."""
    total = 0
    for path in files:
        with path.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            head: dict[str, Any] = json.loads(opened.read(length))
        for name, tensor in head.items():
            if name != "__metadata__":
                count = 1
                for side in tensor["shape"]:
                    count *= side
                total += count
    return total


def check_memory(numbers: int, width: int, name: str, device: str = "cpu") -> None:
    """Refuse a model whose weights (`numbers` of `width` bytes) do not fit on the device."""
    free = memory.free(device)
    needed = numbers * width + HEADROOM
    if free is not None and needed > free:
        raise NotEnoughMemoryError(
            f"{name} does not fit in memory: {numbers / 1e9:.2f} billion weights of {width} bytes "
            f"need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on {device}. Choose a "
            "smaller model, use dtype='bfloat16', or end other programs",
            needed=needed,
            free=free,
        )
