"""Computes the statistics of the recipes' papers from a run, beside the published numbers.

Confidence intervals resample prompts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from attnscope.prompts.needle import recall
from attnscope.run.store import Run
from attnscope.stats.arrays import Floats
from attnscope.stats.focus import SEVERAL, Focus, focus, shares
from attnscope.stats.run_stats import judge_run

Statistic = Callable[[Floats], float]
RESAMPLES = 2000
SINK = 0.3
"""The published threshold of a sink; also used for induction."""
RETRIEVAL = 0.1
"""The published threshold of a retrieval head."""
CLEAN, HARMLESS = "clean", "harmless"
"""Texts without an attack: nothing inserted, and a sentence without an instruction."""
TRACKER = "1.00 and 0.98, Qwen2-1.5B"


@dataclass(frozen=True)
class PublishedStatistic:
    """A statistic with its interval and the published number."""

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


def published_statistics(run: Run) -> list[PublishedStatistic]:
    """The statistics of a recipe's run; empty for other runs."""
    statistics = _OF.get(run.experiment.name)
    return [] if statistics is None else statistics(run)


def reproduced_lines(run: Run) -> list[str]:
    """The lines that `attnscope reproduce` prints: statistics, and verdicts on the run's claims."""
    return [
        *map(str, published_statistics(run)),
        *map(str, judge_run(run)),
    ]


def by_head(run: Run, measure: str, **where: Any) -> tuple[Floats, list[int]]:
    """[prompts, heads] of a measure, and which prompts; a prompt without a value is left out."""
    rows = run.values.filter(pl.col("measure") == measure).filter(**where).collect()
    rows = rows.sort("layer", "head")
    wide = rows.pivot(["layer", "head"], index="prompt", values="value").sort("prompt")
    table = wide.drop("prompt").to_numpy().astype(np.float64)
    good = ~np.isnan(table).any(axis=1)
    return table[good], [p for p, kept in zip(wide["prompt"], good, strict=True) if kept]


def _resampled(table: Floats, statistic: Statistic) -> tuple[float, float, float]:
    """The statistic, and its 95 % percentile interval; nan below 6 prompts."""
    draw = np.random.default_rng(0)
    if len(table) < 6:
        return statistic(table), float("nan"), float("nan")
    picks = draw.integers(0, len(table), (RESAMPLES, len(table)))
    low, high = np.quantile([statistic(table[pick]) for pick in picks], [0.025, 0.975])
    return statistic(table), float(low), float(high)


def share_above(threshold: float) -> Callable[[Floats], float]:
    """The share of heads whose mean over prompts is above a threshold."""
    return lambda table: float((table.mean(axis=0) > threshold).mean())


def sink_share(table: Floats) -> float:
    """As published: the share of heads above the threshold in a prompt, mean over prompts."""
    return float((table > SINK).mean())


def _sinks(run: Run) -> list[PublishedStatistic]:
    statistics = []
    for model in run.experiment.models:
        for condition in run.experiment.conditions:
            table, prompts = by_head(run, "first_token", model=model, condition=condition)
            what = f"{model}, {condition}: share of heads with first-token mass above {SINK}"
            known = "GPT2-XL 0.703, LLaMA3-8B 0.912" if condition == "random" else ""
            statistics.append(
                PublishedStatistic(what, *_resampled(table, sink_share), len(prompts), known)
            )
    return statistics


def _induction(run: Run) -> list[PublishedStatistic]:
    statistics = []
    for model in run.experiment.models:
        table, prompts = by_head(run, "induction", model=model)
        what = f"{model}: share of heads with an induction score above {SINK}"
        statistics.append(
            PublishedStatistic(what, *_resampled(table, share_above(SINK)), len(prompts), "")
        )
    return statistics


def _needle(run: Run) -> list[PublishedStatistic]:
    """The share of needles found, and the share of retrieval heads."""
    statistics = []
    what = f"share of heads with a retrieval score above {RETRIEVAL}"
    for model in run.experiment.models:
        right = found_needles(run, model)
        table, prompts = by_head(run, "retrieval", model=model)
        correct = np.array([right[prompt] for prompt in prompts])
        of = correct[:, None].astype(np.float64)
        several = _resampled(of, lambda some: float(some.mean()))
        statistics.append(
            PublishedStatistic(f"{model}: share of needles found", *several, len(correct), "")
        )
        for where, some, known in (
            ("where the needle was found", table[correct], "below 0.05"),
            ("in all prompts", table, ""),
        ):
            if len(some):
                numbers = _resampled(some, share_above(RETRIEVAL))
                statistics.append(
                    PublishedStatistic(f"{model}: {what}, {where}", *numbers, len(some), known)
                )
    return statistics


def found_needles(run: Run, model: str) -> dict[int, bool]:
    """By prompt, whether more than half of the needle's words were generated, as published."""
    spans = run.tokens.filter(pl.col("regions").list.contains("answer"), model=model).collect()
    needles = spans.group_by("prompt", maintain_order=True).agg(pl.col("text").str.join(""))
    completions = dict(run.cells.filter(model=model).select("prompt", "generated").rows())
    return {
        prompt: recall(text, completions[prompt] or "") > 0.5 for prompt, text in needles.rows()
    }


def _lookback(run: Run) -> list[PublishedStatistic]:
    statistics = []
    for model in run.experiment.models:
        for measure, what in (
            ("lookback_per_token", "lookback ratio, mean over heads, per token as published"),
            ("lookback", "lookback ratio, mean over heads, of masses"),
        ):
            table, prompts = by_head(run, measure, model=model)
            numbers = _resampled(table, lambda some: float(some.mean()))
            statistics.append(PublishedStatistic(f"{model}: {what}", *numbers, len(prompts), ""))
    return statistics


def _fall(run: Run, axis: str, published: str) -> list[PublishedStatistic]:
    """Lift (uniform attention gives 1) of the first and last position, and of the ends over the
    middle."""
    places = list(getattr(run.experiment, axis))
    statistics = []
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
        lifts: dict[str, Callable[[Floats], float]] = {
            f"lift of {places[0]}": lambda some: float(some[:, 0].mean()),
            f"lift of {places[-1]}": lambda some: float(some[:, -1].mean()),
        }
        if axis == "keys":
            both = np.stack([ends.mean(1), middle.mean(1)], axis=1)
            numbers = _resampled(both, lambda some: float(some[:, 0].mean() / some[:, 1].mean()))
            what = f"{model}: the ends' lift over the middle's"
            statistics.append(PublishedStatistic(what, *numbers, len(table), published))
        for what, statistic in lifts.items():
            numbers = _resampled(table, statistic)
            statistics.append(PublishedStatistic(f"{model}: {what}", *numbers, len(table), ""))
    return statistics


def _drift(run: Run) -> list[PublishedStatistic]:
    return _fall(run, "queries", "falls within eight rounds")


def _position(run: Run) -> list[PublishedStatistic]:
    return _fall(run, "keys", "a U: above 1")


def _injection(run: Run) -> list[PublishedStatistic]:
    """The focus score, with heads selected as published, and with harmless insertions as calm."""
    statistics = []
    conditions = [name for name in run.experiment.conditions if name != run.experiment.base]
    texts_of = list(dict.fromkeys(name.rpartition("-")[0] for name in conditions))
    attacks = [text for text in texts_of if text != HARMLESS]
    for model in run.experiment.models:
        scores = {name: _focus_scores(run, model, name) for name in run.experiment.conditions}
        clean = {CLEAN: scores[run.experiment.base]}
        texts = [{k: scores[f"{k}-{n}"] for k in texts_of} | clean for n in (1, 2)]
        ways = {
            "heads as published": focus(*texts, calm=[CLEAN], attack=attacks[0]),
            "heads chosen against harmless too": focus(
                *texts, calm=[CLEAN, HARMLESS], attack=attacks[0], fewest=SEVERAL
            ),
        }
        for way, scored in ways.items():
            numbers = np.arange(len(scored.of[CLEAN]), dtype=np.float64)
            statistics += [
                PublishedStatistic(
                    f"{model}, {what}", *_resampled(numbers, statistic), len(numbers), known
                )
                for what, statistic, known in _focus_statistics(way, scored, attacks)
            ]
    return statistics


def _focus_statistics(
    way: str, scored: Focus, attacks: list[str]
) -> list[tuple[str, Statistic, str]]:
    """Name, statistic and published number of each result for a selection of heads."""
    known = TRACKER if "published" in way else ""
    every = f"{way} ({scored.heads}): AUROC of all attacks against clean"
    statistics = [(every, scored.auroc_against(CLEAN, attacks), known)]
    statistics += [
        (f"{way}: AUROC of {k} against clean", scored.auroc_against(CLEAN, [k]), "")
        for k in attacks
    ]
    statistics += [
        (f"{way}: AUROC of {what} against {calm}", scored.auroc_against(calm, which), "")
        for what, calm, which in (
            (HARMLESS, CLEAN, [HARMLESS]),
            ("all attacks", HARMLESS, attacks),
        )
    ]
    statistics += [
        (f"{way}: share of {what} flagged", scored.flagged(which), "")
        for what, which in ((CLEAN, [CLEAN]), (HARMLESS, [HARMLESS]), ("all attacks", attacks))
    ]
    return statistics


def _focus_scores(run: Run, model: str, condition: str) -> Floats:
    """[prompts, heads]: mass on the instruction over the mass on instruction and data."""
    where = {"model": model, "condition": condition}
    instruction, data, inserted = (
        by_head(run, "mass", **where, keys=key)[0] for key in ("system", "question", "filler")
    )
    return shares(instruction, data + inserted if len(inserted) else data)


_OF: dict[str, Callable[[Run], list[PublishedStatistic]]] = {
    "sinks": _sinks,
    "induction": _induction,
    "needle": _needle,
    "lookback": _lookback,
    "drift": _drift,
    "position": _position,
    "injection": _injection,
}
