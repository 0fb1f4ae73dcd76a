"""Groups prompts into batches: how many tokens a batch has, and how much padding."""

from collections.abc import Iterator
from typing import Any

# TOGETHER: tokens per batch by default. PADDING: largest ratio of padding to tokens. A GPU is
# faster with large batches. On a CPU, padding costs as much time as text. Large batches are 10 to
# 20 % slower on a CPU, because the allocator returns large activations to the system and requests
# them again.
TOGETHER = {"cpu": 2048}
PADDING = {"cpu": 0.1}


def default_tokens(device: str) -> int:
    """Tokens per batch, if the experiment does not say how many."""
    return TOGETHER.get(kind_of(device), 8192)


def kind_of(device: str) -> str:
    """The type of a device, without its number: `cuda:1` gives `cuda`."""
    return device.partition(":")[0]


def by_length(widths: list[int], budget: Any, padding: float) -> Iterator[list[int]]:
    """Group prompts of similar length into batches. The budget of a batch includes padding."""
    batch: list[int] = []
    tokens = 0
    for number in sorted(range(len(widths)), key=lambda n: (widths[n], n)):
        padded = (len(batch) + 1) * widths[number]
        if batch and padded > min(budget, (1 + padding) * (tokens + widths[number])):
            yield batch
            batch, tokens = [], 0
        batch.append(number)
        tokens += widths[number]
    yield batch
