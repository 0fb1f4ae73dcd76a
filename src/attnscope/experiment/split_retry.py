"""A batch that fails as a whole is measured in parts: half by half, down to single prompts.

So a batch too large for the memory goes through, and one prompt that nothing can be measured of
does not take the others with it. What was divided is recorded, since the last digits of a sum
depend on what it was measured with.
"""

import traceback
from collections.abc import Callable
from pathlib import Path

from attnscope.errors import AttnscopeError
from attnscope.experiment.cells import Batch
from attnscope.experiment.executor import MeasuredPart
from attnscope.experiment.results import Measured

NO_MEMORY = "out of memory"
"""How the error of a cell begins that is too large."""


def split_and_retry(
    batch: Batch, measure: Callable[[Batch], dict[str, Measured]]
) -> tuple[list[MeasuredPart], dict[int, str]]:
    """The batch as it could be measured, and the prompts that could not be, with their errors."""
    try:
        return [MeasuredPart(batch, measure(batch))], {}
    except Exception as error:
        why = one_line(error)
        traceback.clear_frames(error.__traceback__)  # or they hold what filled the memory
    if len(batch.numbers) == 1:
        return [], {batch.numbers[0]: why}
    parts: list[MeasuredPart] = []
    failed: dict[int, str] = {}
    for half in batch.halves():
        measured, not_measured = split_and_retry(half, measure)
        parts += measured
        failed |= not_measured
    return parts, failed


def one_line(error: BaseException) -> str:
    """An error in a line. What is not ours comes with where it happened."""
    message = " ".join(str(error).split())[:400]
    if _is_out_of_memory(error, message):
        return f"{NO_MEMORY}: {message or type(error).__name__}"
    if isinstance(error, AttnscopeError):
        return message
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{location}"


def _is_out_of_memory(error: BaseException, message: str) -> bool:
    """CUDA's has a name of its own; torch's on a CPU is any RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, RuntimeError) and any(word in message for word in words)
