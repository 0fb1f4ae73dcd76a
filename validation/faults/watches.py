"""A thousand watches in one process: memory stays flat, and the model is as it was.

python validation/faults/watches.py [1000]
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import torch

import attnscope
from results import keep


def resident() -> float:
    """MB of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main(number: int) -> None:
    begun = time.monotonic()
    model, tokenizer = attnscope.load("zoo:math-qwen2")
    inputs = tokenizer(["Tom has 12 apples and 3 pears.", "How many?"], padding=True,
                       return_tensors="pt")  # fmt: skip
    with torch.no_grad():
        before = model(**inputs).logits
        memory = []
        for n in range(number):
            with attnscope.watch(model, queries=("all", "last")[n % 2]) as scope:
                model(**inputs)
            scope.received(0)
            if n % 100 == 99:
                gc.collect()
                memory.append(resident())
        after = model(**inputs).logits
    same = torch.equal(before, after)
    grown = memory[-1] - memory[0]
    flat = grown < 5
    outcome = (
        f"{memory[0]:.0f} MB after 100, {memory[-1]:.0f} after all; outputs the same to the bit"
    )
    keep("watches in one process", number, outcome if same and flat else f"WRONG: {outcome}",
         time.monotonic() - begun)  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
