"""Stores the verdicts on the claims of a run, so that each claim is judged once.

The verdicts come from `attnscope.stats`; figures and the report share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from attnscope.errors import AttnscopeError
from attnscope.figures.blocks import Items, Section
from attnscope.measures.registry import COLUMNS
from attnscope.spec.claims import Claim
from attnscope.stats.resampling import ResamplingUnits
from attnscope.stats.run_stats import claims_of_run, judge_run, sensitivity_of_run
from attnscope.stats.sensitivity import CHOICES, robustness_summary
from attnscope.stats.verdicts import Verdict

if TYPE_CHECKING:
    from attnscope.run.store import Run


class VerdictCache:
    """Verdicts on the claims of one run and on the built-in ones, also under several choices."""

    def __init__(self, run: Run, **units: Any) -> None:
        self._run = run
        self.claims = claims_of_run(run)
        self.of_run = {claim.name for claim in run.claims}
        """Names of the claims of the run."""
        ResamplingUnits(
            run.prompts, **units
        )  # an unknown fact is an error at once, and of no one figure
        self._units = units
        self._verdicts: dict[str, list[Verdict]] = {}
        self._choices: dict[str, pl.DataFrame | AttnscopeError] = {}

    def verdicts(self, names: Sequence[str] | None = None) -> list[Verdict]:
        """The verdicts on these claims or on all; without built-in claims that cannot be judged."""
        claims = [c for c in self.claims if names is None or c.name in names]
        new = [claim for claim in claims if claim.name not in self._verdicts]
        verdicts = judge_run(self._run, new, **self._units) if new else []
        for claim in new:
            self._verdicts[claim.name] = [
                v
                for v in verdicts
                if v.claim == claim.name and (v.claim in self.of_run or v.verdict != "not measured")
            ]
        return [verdict for claim in claims for verdict in self._verdicts[claim.name]]

    def claims_on(self, measures: Sequence[str]) -> list[str]:
        """The claims on these measures, whichever of their columns they name."""
        named = {COLUMNS[m].name for m in measures if m in COLUMNS}
        return [
            claim.name
            for claim in self.claims
            if named & {COLUMNS[measure].name for measure in claim.measures}
        ]

    def under_choices(self, claim: Claim) -> pl.DataFrame:
        """A claim under the choices that the run has."""
        if claim.name not in self._choices:
            try:
                self._choices[claim.name] = sensitivity_of_run(self._run, claim, **self._units)
            except AttnscopeError as error:
                self._choices[claim.name] = error
        result = self._choices[claim.name]
        if isinstance(result, AttnscopeError):
            raise result
        return result

    def robustness(self) -> pl.DataFrame:
        """One row per claim that the run can judge under more than one choice."""
        lines = []
        for claim in self.claims:
            try:
                table = self.under_choices(claim)
            except AttnscopeError:
                continue
            if table.select(*CHOICES).n_unique() > 1:
                lines.append(robustness_summary(table))
        overturned = {"overturned_by": pl.List(pl.String())}
        return pl.DataFrame(lines, schema_overrides=overturned, infer_schema_length=None)

    def section(self, names: Sequence[str]) -> Section | None:
        """The verdicts on the claims of a figure; None if none was judged."""
        try:
            verdicts = self.verdicts(names) if names else []
        except AttnscopeError:
            return None
        lines = [str(v) for v in verdicts if v.verdict != "not measured"]
        if not lines:
            return None
        return Section("Claims", ["The verdicts use the whole run.", Items(lines)])
