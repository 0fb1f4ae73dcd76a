"""Options that several commands share, and functions that parse their text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.errors import InputError
from attnscope.paths import is_remote, to_path

if TYPE_CHECKING:
    from attnscope.run.store import Run

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model: zoo:NAME, a hub id, a folder, a .gguf file, or BASE+ADAPTER.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:N, mps or auto. Default: the first GPU, else the CPU."),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, or auto: that of the weights, but float32 on a CPU."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

Bos = Annotated[
    bool, typer.Option("--bos", help="Put the begin-of-sequence token in front of every text.")
]
BeyondPositions = Annotated[
    bool,
    typer.Option(
        "--beyond-positions", help="Allow more tokens than the model's maximum number of positions."
    ),
]

Cluster = Annotated[
    str | None,
    typer.Option(
        help="Prompt metadata column to cluster by, for example document. Default: each prompt is "
        "its own cluster."
    ),
]
Strata = Annotated[
    str | None,
    typer.Option(
        help="Prompt metadata column to stratify by, for example level. Default: no strata."
    ),
]


def listed(text: str | None) -> list[str] | None:
    """The parts of a text between commas."""
    return None if text is None else [part.strip() for part in text.split(",")]


def numbers(what: str, text: str | None) -> list[int] | None:
    """The integers of a text between commas."""
    parts = listed(text)
    if parts is None:
        return None
    for part in parts:
        if not part.isdecimal():
            raise InputError(
                f"--{what} takes integers from 0, separated by commas, such as 0,1,7; not {text!r}",
                code="bad-option",
                option=what,
                value=text,
            )
    return [int(part) for part in parts]


def without_none(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def units_of(cluster: str | None, strata: str | None) -> dict[str, Any]:
    """The arguments `cluster` and `strata` of the statistics, if the options are set."""
    return without_none(cluster=cluster, strata=strata)


def opened(folder: str | Path) -> Run:
    """Open a run; prints a note if the run is not finished."""
    from attnscope.run.store import open_run

    run = open_run(folder)
    if not run.complete:
        print(
            f"note: the run is not finished; it has {run.cells.height} cells so far. "
            f"To continue it: attnscope run {run.path / 'experiment.yaml'} --out {run.path}",
            file=sys.stderr,
        )
    return run


def on_disk(folder: str | Path) -> Path:
    """A local directory for figures and reports."""
    path = to_path(folder)
    if is_remote(path):
        raise InputError(
            f"{path} is a remote address; figures and reports need a local directory: "
            "give one with --out",
            code="remote-path",
            path=str(path),
        )
    return path
