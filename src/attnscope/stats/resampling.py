"""Labels prompts with clusters and strata from their metadata (level, action, document …).

Warns if a metadata column that was not used explains much of the variance.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown
from attnscope.run.schemas import REPEATS
from attnscope.stats.clusters import intraclass

MUCH = 0.1
"""Share of the variance above which a column causes a warning: with 10 prompts per value, the
variance of the mean is then nearly twice that of independent prompts."""


@dataclass(frozen=True, slots=True)
class ResamplingUnits:
    """Prompt metadata, and the columns that define clusters and strata."""

    metadata: pl.DataFrame | None = None
    """A column `prompt`, and one for each metadata column."""
    cluster: str | None = None
    """Metadata column to cluster by. By default repeats of a prompt are one cluster."""
    strata: str | None = None
    """Metadata column to stratify by: a new sample would have the same proportions."""

    def __post_init__(self) -> None:
        for name in self.chosen:
            if name not in self.names:
                raise unknown("metadata column", name, self.names or ["none"])

    @property
    def names(self) -> list[str]:
        """The metadata columns."""
        return [] if self.metadata is None else [c for c in self.metadata.columns if c != "prompt"]

    @property
    def chosen(self) -> list[str]:
        """The columns that the user chose for clusters and strata."""
        return [name for name in (self.cluster, self.strata) if name]

    @property
    def column(self) -> str | None:
        """The column whose values are the units; None if every prompt is one."""
        return self.cluster or (REPEATS if REPEATS in self.names else None)

    def of(self, cluster: str | None) -> "ResamplingUnits":
        """The same units, or clusters by this column if the user chose none."""
        return self if self.cluster or not cluster else replace(self, cluster=cluster)

    @property
    def settings(self) -> dict[str, Any]:
        """As `compare` and `summary` take them."""
        return {"prompts": self.metadata, "cluster": self.cluster, "strata": self.strata}

    def count(self, prompts: Sequence[int]) -> int:
        """The number of units of these prompts."""
        of = self.labels(prompts)["cluster"]
        return len(prompts) if of is None else len(set(of))

    def describe(self, prompts: Sequence[int]) -> str:
        """Clusters and strata as text; empty if every prompt is a unit."""
        parts = [f"in {self.count(prompts)} clusters ({self.column})"] if self.column else []
        return " ".join([*parts, *([] if self.strata is None else [f"in strata ({self.strata})"])])

    def labels(self, prompts: Sequence[int]) -> dict[str, NDArray[Any] | None]:
        """`cluster` and `strata` of prompts, as `units` takes them."""
        names = {"cluster": self.column, "strata": self.strata}
        if self.cluster and self.cluster != REPEATS and REPEATS in self.names:
            repeats, clusters = self._of(REPEATS, prompts), self._of(self.cluster, prompts)
            if len(set(zip(repeats, clusters, strict=True))) > len(set(repeats)):
                raise InputError(
                    f"prompts with the same text have different values of {self.cluster!r}, and "
                    "they are one unit; cluster by another column",
                    code="clusters-not-nested",
                    inner=REPEATS,
                    outer=self.cluster,
                )
        return {key: None if not name else self._of(name, prompts) for key, name in names.items()}

    def similar(self, x: NDArray[np.float64], prompts: Sequence[int]) -> dict[str, float]:
        """Unused columns whose prompts are alike in a sample [prompts, columns], with the median of
        their intraclass correlations."""
        shares = {}
        for name in self.names:
            if name in (self.cluster, self.strata, REPEATS):
                continue
            columns = intraclass(x, self._of(name, prompts, missing=""))
            columns = columns[~np.isnan(columns)]
            if len(columns) and (share := float(np.median(columns))) > MUCH:
                shares[name] = share
        return shares

    def warnings(self, x: NDArray[np.float64], prompts: Sequence[int]) -> list[str]:
        """A sentence for each unused column whose prompts are alike."""
        return [
            f"prompts of one {name} are alike (intraclass correlation {share:.2f}): compare with "
            f"--cluster {name}"
            for name, share in self.similar(x, prompts).items()
        ]

    def _of(self, name: str, prompts: Sequence[int], missing: str | None = None) -> NDArray[Any]:
        assert self.metadata is not None
        known = dict(self.metadata.select("prompt", pl.col(name).cast(pl.String())).iter_rows())
        repeats = name == REPEATS  # a prompt that repeats no other is its own cluster
        values = [known.get(prompt) or (str(prompt) if repeats else None) for prompt in prompts]
        without = [p for p, value in zip(prompts, values, strict=True) if value is None]
        if without and missing is None:
            raise InputError(
                f"{len(without)} prompts have no {name!r}, the first is prompt {without[0]}; to "
                "cluster or stratify by a column, every prompt needs a value",
                code="missing-metadata",
                name=name,
                prompts=without,
            )
        return np.array([missing if value is None else value for value in values], dtype=str)
