"""Carrying out a plan from the terminal: progress, being stopped, what failed, exit codes.

0 is complete; 1 is a run that lacks cells which could not be measured; 2 is a wrong input; 130 is
a run that was stopped. A shard that did all of its part is complete, whatever the others did.
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

from attnscope.cli.tables import print_json
from attnscope.paths import is_far

if TYPE_CHECKING:
    from attnscope.experiment.execute import Outcome
    from attnscope.experiment.plan import Plan


def carry_out(plan: Plan, folder: Path, *, quiet: bool, **options: Any) -> Outcome:
    """Run a plan with its progress on the terminal. Ctrl-C, or what a cluster sends before it
    ends a job, leaves it to be continued."""
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
    """Whether the user, or the system, has asked to stop. Asked twice, it stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("stopping when this batch is finished; again: at once", file=sys.stderr)

    before = {kind: signal.signal(kind, ask) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _stopped(folder: Path) -> typer.Exit:
    print(
        f"stopped. What is finished is kept in {folder}; the same command continues there.",
        file=sys.stderr,
    )
    return typer.Exit(130)


def print_outcomes(
    outcomes: dict[str, Outcome], *, json: bool, drawn: Mapping[str, Sequence[str]] | None = None
) -> None:
    """What was done and which figures were drawn of it, and what could not be: then the exit code
    is 1."""
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
    told: dict[str, Any] = {
        "name": name,
        "out": str(outcome.folder),
        "cells": outcome.cells,
        "measured": outcome.measured,
    }
    if figures:
        told["figures"] = [str(outcome.folder / "figures" / f"{one}.png") for one in figures]
        told["report"] = str(outcome.folder / "report.html")
    if outcome.failed:
        told["failed"] = outcome.failed
    if not outcome.complete:
        told["complete"] = False
    return told


def _print_outcome(name: str, outcome: Outcome, figures: Sequence[str]) -> None:
    already = outcome.cells - outcome.measured - len(outcome.failed)
    there = f" ({already} were there already)" if already else ""
    print(f"{name}: {outcome.cells - len(outcome.failed)} cells{there} in {outcome.folder}")
    if not outcome.complete and not outcome.failed and not is_far(outcome.folder):
        print("  other parts of the run are not there yet; the last one finishes it")
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
        f"  The others are kept in {outcome.folder}; the same command tries these again",
        file=sys.stderr,
    )


def no_bars() -> None:
    """Only our own progress: transformers draws a bar for every model it loads."""
    from transformers.utils import logging

    logging.disable_progress_bar()
