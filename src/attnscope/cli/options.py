"""Options that several commands share, and how their text is read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.errors import InputError
from attnscope.paths import is_far, place

if TYPE_CHECKING:
    from attnscope.run.store import Run

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="zoo:NAME, hub id, folder, .gguf; BASE+ADAPTER.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

Bos = Annotated[bool, typer.Option("--bos", help="Begin texts with the begin-of-sequence token.")]
BeyondPositions = Annotated[
    bool,
    typer.Option("--beyond-positions", help="Allow texts longer than the model was made for."),
]

Cluster = Annotated[
    str | None,
    typer.Option(help="A fact of the prompts that are alike; of several, the outermost first."),
]
Strata = Annotated[
    str | None, typer.Option(help="A fact that any set of prompts holds in equal proportion.")
]


def listed(text: str | None) -> list[str] | None:
    """What stands between commas."""
    return None if text is None else [part.strip() for part in text.split(",")]


def numbers(what: str, text: str | None) -> list[int] | None:
    """Whole numbers between commas."""
    parts = listed(text)
    if parts is None:
        return None
    for part in parts:
        if not part.isdecimal():
            raise InputError(f"--{what} takes numbers from 0, with commas: 0,1,7; not {text!r}")
    return [int(part) for part in parts]


def without_none(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def units_of(cluster: str | None, strata: str | None) -> dict[str, Any]:
    """What is resampled, as far as it was said: one fact, or several between commas."""
    names = listed(cluster)
    one = names[0] if names is not None and len(names) == 1 else names
    return without_none(cluster=one, strata=strata)


def opened(folder: str | Path) -> Run:
    """The run in a directory; that it is not finished is said at once, for every command."""
    from attnscope.run.store import open_run

    run = open_run(folder)
    if not run.complete:
        print(
            f"note: the run is not finished; this is about the {run.cells.height} cells so far. "
            f"To continue it: attnscope run {run.path / 'experiment.yaml'} --out {run.path}",
            file=sys.stderr,
        )
    return run


def on_disk(where: str | Path) -> Path:
    """A directory to draw to."""
    path = place(where)
    if is_far(path):
        raise InputError(
            f"{path} is an address, and figures and reports are written to a disk: give a "
            "directory with --out"
        )
    return path
