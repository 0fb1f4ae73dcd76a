"""The progress of a run: a bar on a terminal, else a line every few seconds.

The remaining time is estimated from tokens, not cells, because cells are sorted by length.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Seconds between two lines if stderr is no terminal.
EVERY = 10.0

Report = Callable[[int, int, int], None]


@contextmanager
def shown(name: str, cells: int, *, quiet: bool = False) -> Iterator[Report | None]:
    """The callback for `run(progress=…)`, which prints to standard error; None if quiet."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar(name, cells) as report:
            yield report
    else:
        yield _lines(name, cells)


@contextmanager
def _bar(name: str, cells: int) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[cells]}/{task.fields[of]} cells  {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=None, cells=0, of=cells, rate="")
        speed = _Speed()

        def report(done: int, tokens: int, total: int) -> None:
            rate = speed.rate(done)
            progress.update(task, completed=tokens, total=total, cells=done, rate=rate)

        yield report


def _lines(name: str, cells: int) -> Report:
    speed = _Speed()
    printed = time.monotonic()

    def report(done: int, tokens: int, total: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= EVERY or tokens == total:
            printed = now
            left = speed.left(tokens, total)
            print(f"{name}: {done}/{cells} cells{speed.rate(done)}{left}", file=sys.stderr)

    return report


class _Speed:
    """Cells per second since the first report, and the remaining time."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.first: int | None = None

    def rate(self, done: int) -> str:
        """The rate as text; empty before the second report."""
        if self.first is None:
            self.first = done
        if done <= self.first:
            return ""
        rate = (done - self.first) / (time.monotonic() - self.start)
        return f", {rate:.1f} per second" if rate >= 1 else f", {rate * 60:.2g} per minute"

    def left(self, tokens: int, total: int) -> str:
        """The remaining time as text; empty at the start and the end."""
        if not 0 < tokens < total:
            return ""
        seconds = (time.monotonic() - self.start) * (total - tokens) / tokens
        return f", {seconds:.0f} s left"
