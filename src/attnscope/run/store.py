"""Reading a run: `open_run` gives its tables as polars frames, and SQL over them.

The right side of the wall begins here, so this module must not know torch, transformers, or how
anything was measured. Writing is `writer.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.question.spec import Experiment
from attnscope.question.yaml import read_experiment
from attnscope.run.schemas import CELLS, POSITIONS, TOKENS, VALUES

__all__ = ["TABLES", "Run", "cell_file", "open_run"]

TABLES = {"values": "", "tokens": ".tokens", "positions": ".positions"}
"""A table's name to what its files have between the cell's ID and `.parquet`."""
HELD = 4_000_000
"""Tables of up to so many rows are read once and held: opening many files takes longer."""
_SCHEMAS = {"values": VALUES, "tokens": TOKENS, "positions": POSITIONS}


def cell_file(folder: Path, cell: str, table: str) -> Path:
    """Where a cell's part of a table is, in the run directory `folder`."""
    return folder / "cells" / f"{cell}{TABLES[table]}.parquet"


@dataclass(frozen=True, eq=False)
class Run:
    """A run directory, read. The frames are lazy: ask, then `collect()`."""

    path: Path
    experiment: Experiment
    """What was asked, every default written out."""
    environment: dict[str, Any]
    """Versions, device, and an entry per model."""
    complete: bool
    """Whether every cell is there. What is there can be read in any case."""
    ids: tuple[str, ...]
    """The cells that are there."""

    @cached_property
    def values(self) -> pl.LazyFrame:
        """One row per number."""
        return self._table("values")

    @cached_property
    def tokens(self) -> pl.LazyFrame:
        """One row per token of a prompt."""
        return self._table("tokens")

    @cached_property
    def positions(self) -> pl.LazyFrame:
        """One row per token, layer and head, where profiles were asked for."""
        return self._table("positions")

    @cached_property
    def cells(self) -> pl.DataFrame:
        """One row per cell."""
        manifest = _json(self.path / "manifest.json") if self.complete else {}
        if self.complete:
            return pl.DataFrame(manifest["cells"], schema=CELLS, orient="row")
        files = [cell_file(self.path, id, "tokens") for id in self.ids]
        found = [
            _summary(id, pl.read_parquet(file)) for id, file in zip(self.ids, files, strict=True)
        ]
        return pl.concat(found) if found else CELLS.to_frame()

    def sql(self, query: str) -> pl.DataFrame:
        """The answer to an SQL query over `values`, `positions`, `tokens` and `cells`."""
        tables = {
            "values": self.values,
            "positions": self.positions,
            "tokens": self.tokens,
            "cells": self.cells.lazy(),
        }
        try:
            with pl.SQLContext(tables) as context:
                answer = context.execute(query)
                return answer.collect()
        except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
            columns = "\n".join(
                f"  {name}: {', '.join(schema)}"
                for name, schema in {**_SCHEMAS, "cells": CELLS}.items()
            )
            raise InputError(
                f"the query does not work: {error}\nThe tables and their columns are\n{columns}"
            ) from error

    def _table(self, table: str) -> pl.LazyFrame:
        files = [cell_file(self.path, id, table) for id in self.ids]
        if table == "positions":  # a run has them for every cell, or for none
            files = [file for file in files if file.exists()]
        if not files:
            return _SCHEMAS[table].to_frame().lazy()
        scan = pl.scan_parquet(files, schema=_SCHEMAS[table], glob=False)
        rows = scan.select(pl.len()).collect().item()
        return scan.collect().lazy() if rows <= HELD else scan


def open_run(folder: str | Path) -> Run:
    """Open a run directory, finished or not."""
    folder = Path(folder)
    asked = folder / "experiment.yaml"
    if not asked.is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/experiment.yaml"))
        hint = f"; there are runs inside it: {', '.join(inside)}" if inside else ""
        raise InputError(
            f"{folder} is not a run directory: it has no experiment.yaml{hint}"
            if folder.is_dir()
            else f"there is no directory {folder}"
        )
    environment = folder / "environment.json"
    complete = (folder / "manifest.json").is_file()
    there = {
        path.name.removesuffix(".parquet")
        for path in (folder / "cells").glob("*.parquet")
        if path.name.count(".") == 1
    }
    ids = sorted(there)
    if complete:
        ids = [cell[0] for cell in _json(folder / "manifest.json")["cells"]]
        lost = [id for id in ids if id not in there]
        if lost:
            raise InputError(
                f"{folder} is damaged: its manifest lists {len(ids)} cells, and {len(lost)} of "
                f"them are gone (such as {cell_file(folder, lost[0], 'values')}); delete its "
                "manifest.json and run the experiment again to measure them anew"
            )
    return Run(
        path=folder,
        experiment=read_experiment(asked),
        environment=_json(environment) if environment.is_file() else {},
        complete=complete,
        ids=tuple(ids),
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is damaged: {error}") from error


def _summary(id: str, tokens: pl.DataFrame) -> pl.DataFrame:
    """The row of `cells` for a cell, from its tokens."""
    return tokens.select(
        pl.lit(id).alias("cell"),
        pl.col("model", "prompt", "condition").first(),
        pl.len().alias("tokens"),
        (pl.col("role") == "filler").sum().alias("filler_tokens"),
        (pl.col("role") == "seam").sum().alias("seam_tokens"),
    ).cast(dict(CELLS))  # type: ignore[arg-type]
