"""What a recipe's run comes to, in the paper's own statistic, with the published number beside it.

Intervals resample prompts. This module must not know models, or how anything was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.run.store import Run

Array = NDArray[np.float64]
RESAMPLES = 2000
SINK = 0.3
"""The published threshold of a sink; also asked of induction."""
RETRIEVAL = 0.1
"""The published threshold of a retrieval head."""


@dataclass(frozen=True)
class Headline:
    """One number."""

    what: str
    value: float
    low: float
    high: float
    n: int
    """Prompts."""
    published: str

    def __str__(self) -> str:
        interval = f" [{self.low:.3g}, {self.high:.3g}]" if self.low == self.low else ""
        beside = f" (published: {self.published})" if self.published else ""
        return f"{self.what}: {self.value:.3g}{interval}, n = {self.n}{beside}"


def headlines(run: Run) -> list[Headline]:
    """The numbers of a recipe's run; none where it is no recipe's."""
    found = _OF.get(run.experiment.name)
    return [] if found is None else found(run)


def by_head(run: Run, measure: str, **where: Any) -> tuple[Array, list[int]]:
    """[prompts, heads] of a measure, and which prompts; a prompt without a value is left out."""
    rows = run.values.filter(pl.col("measure") == measure).filter(**where).collect()
    wide = rows.pivot(["layer", "head"], index="prompt", values="value").sort("prompt")
    table = wide.drop("prompt").to_numpy().astype(np.float64)
    good = ~np.isnan(table).any(axis=1)
    return table[good], [p for p, kept in zip(wide["prompt"], good, strict=True) if kept]


def _resampled(
    table: Array, statistic: Callable[[Array], float], seed: int = 0
) -> tuple[float, float, float]:
    """The statistic of the prompts, and its 95 % percentile interval; none below 6 prompts."""
    draw = np.random.default_rng(seed)
    if len(table) < 6:
        return statistic(table), float("nan"), float("nan")
    picks = draw.integers(0, len(table), (RESAMPLES, len(table)))
    low, high = np.quantile([statistic(table[pick]) for pick in picks], [0.025, 0.975])
    return statistic(table), float(low), float(high)


def share_above(threshold: float) -> Callable[[Array], float]:
    """The share of heads whose mean over prompts is above a threshold."""
    return lambda table: float((table.mean(axis=0) > threshold).mean())


def _shares(run: Run, measure: str, threshold: float, published: str, what: str) -> list[Headline]:
    made = []
    for model in run.experiment.models:
        for condition in run.experiment.conditions:
            table, prompts = by_head(run, measure, model=model, condition=condition)
            if not prompts:
                continue
            told = f"{model}, {condition}: {what}"
            numbers = _resampled(table, share_above(threshold))
            made.append(Headline(told, *numbers, len(prompts), published))
    return made


def _sinks(run: Run) -> list[Headline]:
    what = f"share of heads with first-token mass above {SINK}"
    return _shares(run, "first_token", SINK, "random tokens: GPT2-XL 0.70, LLaMA3-8B 0.91", what)


def _induction(run: Run) -> list[Headline]:
    what = f"share of heads with an induction score above {SINK}"
    return _shares(run, "induction", SINK, "", what)


def _needle(run: Run) -> list[Headline]:
    what = f"share of heads with a retrieval score above {RETRIEVAL}"
    answers = run.cells.filter(pl.col("generated").is_not_null())
    said = [] if answers.is_empty() else [_answered(run)]
    return [*_shares(run, "retrieval", RETRIEVAL, "below 0.05", what), *said]


def _answered(run: Run) -> Headline:
    """How often the needle's words were said."""
    spans = run.tokens.filter(pl.col("regions").list.contains("answer")).collect()
    wanted = spans.group_by("model", "prompt", "condition", maintain_order=True).agg(
        pl.col("text").str.join("").str.strip_chars().alias("answer")
    )
    cells = run.cells.join(wanted, on=["model", "prompt", "condition"])
    right = cells.select(
        pl.col("generated").str.to_lowercase().str.contains(pl.col("answer"), literal=True)
    )
    table = right.to_series().cast(pl.Float64).to_numpy()[:, None]
    numbers = _resampled(table, lambda some: float(some.mean()))
    return Headline("share of answers with the needle's words", *numbers, len(table), "")


def _lookback(run: Run) -> list[Headline]:
    made = []
    for model in run.experiment.models:
        for measure, what in (
            ("lookback_per_token", "lookback ratio, mean over heads, per token as published"),
            ("lookback", "lookback ratio, mean over heads, of masses"),
        ):
            table, prompts = by_head(run, measure, model=model)
            numbers = _resampled(table, lambda some: float(some.mean()))
            made.append(Headline(f"{model}: {what}", *numbers, len(prompts), ""))
    return made


def _fall(run: Run, axis: str, published: str) -> list[Headline]:
    """Masses by place: the last over the first, and the ends over the middle; as lift, so that
    even attention gives 1."""
    places = list(getattr(run.experiment, axis))
    made = []
    for model in run.experiment.models:
        rows = run.values.filter(pl.col("measure") == "mass", pl.col("model") == model)
        lift = (
            rows.group_by("prompt", axis)
            .agg((pl.col("value").mean() / pl.col("uniform").mean()).alias("lift"))
            .collect()
            .pivot(axis, index="prompt", values="lift")
            .sort("prompt")
        )
        table = lift.select(places).drop_nulls().to_numpy().astype(np.float64)
        ends, middle = table[:, [0, -1]], table[:, len(places) // 2 - 1 : len(places) // 2 + 1]
        wanted: dict[str, Callable[[Array], float]] = {
            f"lift of {places[0]}": lambda some: float(some[:, 0].mean()),
            f"lift of {places[-1]}": lambda some: float(some[:, -1].mean()),
        }
        if axis == "keys":
            both = np.stack([ends.mean(1), middle.mean(1)], axis=1)
            numbers = _resampled(both, lambda some: float(some[:, 0].mean() / some[:, 1].mean()))
            what = f"{model}: the ends' lift over the middle's"
            made.append(Headline(what, *numbers, len(table), published))
        for what, statistic in wanted.items():
            numbers = _resampled(table, statistic)
            made.append(Headline(f"{model}: {what}", *numbers, len(table), ""))
    return made


def _drift(run: Run) -> list[Headline]:
    return _fall(run, "queries", "falls within eight rounds")


def _position(run: Run) -> list[Headline]:
    return _fall(run, "keys", "a U: above 1")


def auroc(clean: Array, attacked: Array) -> float:
    """How often a clean prompt has the larger score than an attacked one; ties are halves."""
    more = (clean[:, None] > attacked[None]).mean()
    return float(more + 0.5 * (clean[:, None] == attacked[None]).mean())


def important_heads(clean: Array, attacked: Array, spreads: float = 4.0) -> NDArray[np.bool_]:
    """Heads whose clean and attacked masses [prompts, heads] are apart by so many standard
    deviations of each, as published; the ten farthest apart where there are none."""
    apart = (clean.mean(0) - spreads * clean.std(0)) - (
        attacked.mean(0) + spreads * attacked.std(0)
    )
    if (apart > 0).any():
        return np.asarray(apart > 0)
    chosen = np.zeros(len(apart), dtype=bool)
    chosen[np.argsort(apart)[-10:]] = True
    return chosen


def _split_auroc(table: Array, calm: int) -> float:
    return auroc(table[:, :calm].ravel(), table[:, calm:].ravel())


def _injection(run: Run) -> list[Headline]:
    made = []
    base = run.experiment.base
    for model in run.experiment.models:
        masses = {
            name: by_head(run, "mass", model=model, condition=name)[0]
            for name in run.experiment.conditions
        }
        prompts = np.arange(len(masses[base]))
        choosing, trying = prompts % 2 == 0, prompts % 2 == 1
        kinds: dict[str, list[str]] = {}
        for name in run.experiment.variants:
            kinds.setdefault(name.rpartition("-")[0], []).append(name)
        harmless = kinds.pop("harmless", [])
        attacks = [name for names in kinds.values() for name in names]
        for against, calm in {"the clean text": [base], "a harmless sentence": harmless}.items():
            if not calm:
                continue
            heads = important_heads(
                np.concatenate([masses[name][choosing] for name in calm]),
                np.concatenate([masses[name][choosing] for name in attacks]),
            )
            score = {name: table[trying][:, heads].mean(1) for name, table in masses.items()}
            for kind, names in {"all attacks": attacks, **kinds}.items():
                table = np.stack([score[name] for name in (*calm, *names)], axis=1)
                split = partial(_split_auroc, calm=len(calm))
                what = f"{model}: AUROC of {kind} against {against}"
                known = "1.00 and 0.98, Qwen2-1.5B" if kind == "all attacks" else ""
                numbers = _resampled(table, split)
                made.append(
                    Headline(
                        f"{what} ({int(heads.sum())} heads, chosen on other prompts)",
                        *numbers,
                        int(trying.sum()),
                        known if calm == [base] else "",
                    )
                )
    return made


_OF: dict[str, Callable[[Run], list[Headline]]] = {
    "sinks": _sinks,
    "induction": _induction,
    "needle": _needle,
    "lookback": _lookback,
    "drift": _drift,
    "position": _position,
    "injection": _injection,
}
