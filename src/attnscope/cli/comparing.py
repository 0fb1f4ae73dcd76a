"""`attnscope compare`: the statistics of a run."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from attnscope.cli.options import Json
from attnscope.errors import InputError, unknown

__all__ = ["compare"]


def compare(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    over: Annotated[
        str | None, typer.Option(help="model or condition; else models if they are two.")
    ] = None,
    pair: Annotated[
        str | None, typer.Option(help="FIRST,SECOND of what is compared: second against first.")
    ] = None,
    combine: Annotated[
        str | None, typer.Option(help="Heads: mean, sum, max or each; else as the experiment says.")
    ] = None,
    normalise: Annotated[
        str | None, typer.Option(help="Masses: mass, per-token, share or lift; else as above.")
    ] = None,
    claims: Annotated[
        str | None, typer.Option(help="A YAML file of claims, in place of the built-in ones.")
    ] = None,
    sensitivity: Annotated[
        str | None, typer.Option(help="A claim to judge again under every choice the run allows.")
    ] = None,
    json: Json = False,
) -> None:
    """Is the difference real? Paired statistics of a run, and verdicts on claims about it."""
    from rich.console import Console

    from attnscope.run.store import open_run
    from attnscope.stats import on_run, printing
    from attnscope.stats.claims import built_in, load_claims

    two = tuple(pair.split(",")) if pair is not None else None
    if two is not None and len(two) != 2:
        raise InputError(f"--pair {pair}: two names with a comma between them, first and second")
    judged = built_in() if claims is None else load_claims(claims)
    varied = [claim for claim in judged if claim.name == sensitivity]
    if sensitivity is not None and not varied:
        raise unknown("claim", sensitivity, [claim.name for claim in judged])
    opened = open_run(run)
    several = len(opened.experiment.models) > 1 or len(opened.experiment.conditions) > 1
    compared = (
        on_run.compare_run(opened, over=over, pair=two, combine=combine, normalise=normalise)
        if several
        else None
    )
    models = None if two is None or two[0] not in opened.experiment.models else two
    verdicts = on_run.judge_run(opened, judged, pair=models)
    choices = on_run.sensitivity_of_run(opened, varied[0], pair=models) if varied else None
    if json:
        print(printing.as_json(compared, verdicts, choices))
    else:
        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = 160  # into a file or a pipe: nobody says how wide that is
        narrow = console.width < 100
        console.print(printing.as_tables(compared, verdicts, choices, narrow=narrow))
