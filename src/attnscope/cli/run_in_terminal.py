"""Run a plan from the terminal: progress, stop signals, failures and exit codes.

Exit codes: 0 complete, 1 some cells failed, 2 wrong input, 130 stopped. A shard is complete if its
own part is complete.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from attnscope.cli.output import print_json
from attnscope.paths import is_remote

if TYPE_CHECKING:
    from attnscope.experiment.execute import Outcome
    from attnscope.experiment.plan import Plan


def carry_out(plan: Plan, folder: Path, *, quiet: bool, **options: Any) -> Outcome:
    """Run a plan and print its progress. After Ctrl-C or SIGTERM the run can be continued."""
    from attnscope.cli.progress import shown
    from attnscope.experiment.execute import run_plan

    try:
        with shown(plan.experiment.name, plan.size, quiet=quiet) as progress, _stop() as stop:
            outcome = run_plan(plan, folder, progress=progress, stop=stop, **options)
    except KeyboardInterrupt:
        raise _stopped(folder) from None
    if outcome.stopped:
        raise _stopped(folder)
    return outcome


@contextmanager
def _stop() -> Iterator[Callable[[], bool]]:
    """A function that returns whether SIGINT or SIGTERM arrived. A second signal stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    stopping = False

    def on_signal(number: int, frame: Any) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        print("stopping after this batch; press Ctrl-C again to stop at once", file=sys.stderr)

    before = {kind: signal.signal(kind, on_signal) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: stopping
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _stopped(folder: Path) -> typer.Exit:
    print(
        f"stopped. Finished batches are in {folder}; the same command continues the run.",
        file=sys.stderr,
    )
    return typer.Exit(130)


def print_outcomes(
    outcomes: dict[str, Outcome], *, json: bool, drawn: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Print the results, figures and failures of runs; exits with code 1 after a failure."""
    figures = drawn or {}
    if json:
        print_json([_as_json(name, o, figures.get(name, ())) for name, o in outcomes.items()])
    else:
        for name, outcome in outcomes.items():
            _print_outcome(name, outcome, figures.get(name, ()))
    for name, outcome in outcomes.items():
        _print_failures(name, outcome)
    if any(outcome.failed for outcome in outcomes.values()):
        raise typer.Exit(1)


def _as_json(name: str, outcome: Outcome, figures: Sequence[str]) -> dict[str, Any]:
    content: dict[str, Any] = {
        "name": name,
        "out": str(outcome.folder),
        "cells": outcome.cells,
        "measured": outcome.measured,
    }
    if figures:
        content["figures"] = [str(outcome.folder / "figures" / f"{one}.png") for one in figures]
        content["report"] = str(outcome.folder / "report.html")
    if outcome.failed:
        content["failed"] = outcome.failed
    if not outcome.complete:
        content["complete"] = False
    return content


def _print_outcome(name: str, outcome: Outcome, figures: Sequence[str]) -> None:
    already = outcome.cells - outcome.measured - len(outcome.failed)
    note = f" ({already} from before)" if already else ""
    print(f"{name}: {outcome.cells - len(outcome.failed)} cells{note} in {outcome.folder}")
    if not outcome.complete and not outcome.failed and not is_remote(outcome.folder):
        print("  other parts of the run are missing; the last one completes it")
    for figure in figures:
        print(f"  figure  {outcome.folder / 'figures' / figure}.png, svg, pdf, html, csv, md")
    if figures:
        print(f"  report  {outcome.folder / 'report.html'}")


def _print_failures(name: str, outcome: Outcome) -> None:
    if not outcome.failed:
        return
    print(f"error: {name}: {len(outcome.failed)} of {outcome.cells} cells failed:", file=sys.stderr)
    for why, times in Counter(outcome.failed.values()).most_common(5):
        print(f"  {times} × {why}", file=sys.stderr)
    print(
        f"  The other cells are in {outcome.folder}; the same command retries the failed ones",
        file=sys.stderr,
    )


def no_bars() -> None:
    """Disable the progress bars of transformers, because attnscope prints its own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
