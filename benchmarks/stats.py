"""What the statistics promise, measured: coverage, errors, corrections, clusters, power, cost.

    python benchmarks/stats.py                              every table, from the next seed
    python benchmarks/stats.py --table heads --seed 31      one of them, from this seed
    python benchmarks/stats.py --table heads --pages        what was counted so far, no simulation
    python benchmarks/stats.py --write                      into docs/statistics.md too

A seed's counts are kept in counts.json, and a table is made of all seeds there are: so a long one
may be run in parts. Data sets are columns, so that thousands of them are one call. Seeds are other
than the tests'.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy import special, stats

from attnscope.stats.bootstrap import bca
from attnscope.stats.contrast import ContrastSettings, paired_contrast, unpaired_contrast
from attnscope.stats.correction import corrected, false_discovery
from attnscope.stats.intervals import (
    intervals,
    moments,
    skewed_interval,
    t_interval,
    two_sided,
)
from attnscope.stats.permute import relabel, sign_flip
from attnscope.stats.power import power
from attnscope.stats.units import units
from pages import Counts, put

SETS = 1000
"""Data sets of a row, by seed."""
Array = np.ndarray[Any, np.dtype[np.float64]]
Found = Iterator[tuple[str, str, Any]]
"""Row, column, and a value for each data set."""


def distributions(n: int, seed: int, sets: int = SETS) -> dict[str, tuple[Array, float]]:
    """Samples as columns, and their true means."""
    rng = np.random.default_rng([seed, n])
    shape = (n, sets)
    mixture = np.where(rng.random(shape) < 0.1, 10.0, 1.0)
    two = rng.choice([-1.0, 1.0], shape)
    return {
        "normal": (rng.normal(0.3, 1, shape), 0.3),
        "uniform": (rng.random(shape), 0.5),
        "two peaks": (two + 0.2 * rng.normal(size=shape), 0.0),
        "symmetric, a scale per prompt": (rng.normal(size=shape) * rng.lognormal(size=shape), 0.0),
        "normal, a tenth ten times as wide": (rng.normal(size=shape) * mixture, 0.0),
        "t with 3 df": (rng.standard_t(3, shape), 0.0),
        "Laplace": (rng.laplace(size=shape), 0.0),
        "paired beta, mean .01": (
            rng.beta(0.5, 49.5, shape) - rng.beta(0.5, 49.5, shape),
            0.0,
        ),
        "ties {−1, 0, 1}": (rng.choice([-1.0, 0.0, 1.0], shape, p=[0.2, 0.6, 0.2]), 0.0),
        "counts, Poisson(1)": (rng.poisson(1, shape).astype(float), 1.0),
        "gamma, skewness 1": (rng.gamma(4, size=shape), 4.0),
        "minus gamma, skewness −1": (-rng.gamma(4, size=shape), -4.0),
        "ratios, lognormal .3": (rng.lognormal(0, 0.3, shape), float(np.exp(0.045))),
        "exponential, skewness 2": (rng.exponential(size=shape), 1.0),
        "beta, mean .01": (rng.beta(0.5, 49.5, shape), 0.01),
        "χ²(1), skewness 2.8": (rng.chisquare(1, shape), 1.0),
        "lognormal, skewness 6": (rng.lognormal(size=shape), float(np.exp(0.5))),
        "half zeros, half exponential": (
            (rng.random(shape) < 0.5) * rng.exponential(size=shape),
            0.5,
        ),
        "80 % zeros": ((rng.random(shape) < 0.2) * rng.exponential(size=shape), 0.2),
    }


def candidates(x: Array, seed: int, resamples: int = 500) -> dict[str, tuple[Array, Array]]:
    """The intervals that were tried, by name; ours is the hull of t and Hall."""
    n = len(x)
    found = moments(x)
    made = intervals(x, resamples=100)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(n, np.full(n, 1 / n), resamples) / n
    centred = x - x.mean(0)
    boot = counts @ centred
    spread = np.sqrt(np.maximum(counts @ centred**2 - boot**2, 0) / (n - 1))
    far = 1e-9 * np.abs(centred).max(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        t = np.where(spread > far, boot / spread, np.sign(boot) * np.inf)
    at = special.ndtr(-np.sqrt(n / (n - 1)) * stats.t.isf(0.025, n - 1))
    percentile = np.quantile(boot, [at, 1 - at], axis=0) + x.mean(0)
    studentised = np.quantile(t, [0.975, 0.025], axis=0, method="nearest")
    with np.errstate(invalid="ignore"):
        low, high = x.mean(0) - found.error * studentised
    return {
        "ours": (made.low, made.high),
        "t": t_interval(found),
        "Hall": skewed_interval(found),
        "BCa": bca(x, resamples=resamples),
        "percentile": (percentile[0], percentile[1]),
        "bootstrap-t": (low, high),
    }


SIZES = (6, 12, 24, 64, 200)
TRIED = ("ours", "t", "Hall", "BCa", "percentile", "bootstrap-t")


def coverage(seed: int) -> Found:
    """Whether an interval covers the truth; none counts as not covering."""
    for n in SIZES:
        for name, (x, truth) in distributions(n, seed).items():
            for how, (low, high) in candidates(x, seed).items():
                yield name, f"{how} {n}", (low <= truth) & (truth <= high)
            yield name, f"unreliable {n}", intervals(x[:, :300], resamples=500).unreliable


def coverage_lines(counts: Counts) -> list[str]:
    names = list(distributions(6, 0, 1))
    sets, _, error = counts.all("normal", "ours 12")
    lines = [
        f"Per cent of {sets:,} sets whose 95 % interval covers the mean; ± {error:.1f}. Cells: "
        f"**ours** / {' / '.join(TRIED[1:])}. Resamples: 500.",
        "",
        *header("values", SIZES),
    ]
    outside = []
    for name in names:
        cells = []
        for n in SIZES:
            shares = [counts.all(name, f"{how} {n}")[1] for how in TRIED]
            cells.append(f"**{shares[0]:.1f}** / {' / '.join(f'{s:.0f}' for s in shares[1:])}")
            if n >= 12 and not 93 <= shares[0] <= 97:
                marked = counts.all(name, f"unreliable {n}")[1]
                outside.append(f"{name}, n = {n}: {shares[0]:.1f} % ({marked:.0f} % marked)")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "How many of them the output marks as unreliable, per cent:", ""]
    lines += header("values", SIZES)
    for name in names:
        cells_text = [f"{counts.all(name, f'unreliable {n}')[1]:.0f}" for n in SIZES]
        lines.append(f"| {name} | {' | '.join(cells_text)} |")
    return [*lines, "", f"Outside 93 to 97 % from 12 prompts on: {'; '.join(outside) or 'none'}."]


def header(first: str, sizes: tuple[int, ...]) -> list[str]:
    """The head of a table with a column for each number of prompts."""
    return [
        f"| {first} | {' | '.join(f'n = {n}' for n in sizes)} |",
        f"| {' | '.join('---' for _ in first.split(' | '))} |{' --- |' * len(sizes)}",
    ]


GROUPS: dict[str, Callable[[Any], tuple[Array, Array]]] = {
    "10 and 40, spread 3 and 1": lambda r: (r.normal(0, 3, (10, SETS)), r.normal(size=(40, SETS))),
    "10 and 40, spread 1 and 3": lambda r: (r.normal(size=(10, SETS)), r.normal(0, 3, (40, SETS))),
    "20 and 20, normal": lambda r: (r.normal(size=(20, SETS)), r.normal(size=(20, SETS))),
    "12 and 30, exponential": lambda r: (
        r.exponential(size=(12, SETS)),
        r.exponential(size=(30, SETS)),
    ),
    "15 and 15, beta mean .01 and normal": lambda r: (
        100 * r.beta(0.5, 49.5, (15, SETS)),
        r.normal(1, 1, (15, SETS)),
    ),
}
TESTS = ("ours", "flips", "t")
UNPAIRED = ("ours", "Welch permuted", "plain", "Welch")


def errors(seed: int) -> Found:
    """How often a difference of 0 is called one."""
    how = ContrastSettings(resamples=1000, seed=seed)
    for n in SIZES:
        for name, (x, truth) in distributions(n, seed + 1).items():
            d = x - truth
            with np.errstate(all="ignore"):
                plain = stats.ttest_1samp(d, 0).pvalue
            found = (
                paired_contrast(np.zeros_like(d), d, np.arange(SETS), how)["p"],
                sign_flip(d, resamples=1000, seed=seed)[0],
                plain,
            )
            for test, p in zip(TESTS, found, strict=True):
                yield name, f"{test} {n}", np.nan_to_num(p, nan=1.0) < 0.05
    rng = np.random.default_rng(seed)
    for name, draw in GROUPS.items():
        a, b = draw(rng)
        found = (
            unpaired_contrast(a, b, np.arange(SETS), ContrastSettings(resamples=1000))["p"],
            relabel(a, b, resamples=1000, seed=seed)[0],
            _plainly_permuted(a, b, rng),
            stats.ttest_ind(a, b, equal_var=False).pvalue,
        )
        for test, p in zip(UNPAIRED, found, strict=True):
            yield name, test, p < 0.05


def errors_lines(counts: Counts) -> list[str]:
    sets, _, error = counts.all("normal", "ours 12")
    lines = [
        f"Differences of mean 0 called one at p < 0.05, per cent of {sets:,} sets, ± {error:.1f}: "
        "**ours** / sign flips alone / Student's t.",
        "",
        *header("values, less their mean", SIZES),
    ]
    above = []
    for name in distributions(6, 0, 1):
        cells = []
        for n in SIZES:
            shares = [counts.all(name, f"{test} {n}")[1] for test in TESTS]
            cells.append(f"**{shares[0]:.1f}** / {shares[1]:.1f} / {shares[2]:.1f}")
            if n >= 12 and shares[0] > 6:
                above.append(f"{name}, n = {n}: {shares[0]:.1f} %")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"Above 6 % from 12 prompts on: {'; '.join(above) or 'none'}.", ""]
    lines += [
        "Two independent groups of equal means: **ours** / Welch's t permuted / the plain "
        "difference permuted / Welch's t.",
        "",
        "| groups | called different |",
        "| --- | --- |",
    ]
    for name in GROUPS:
        shares = [counts.all(name, test)[1] for test in UNPAIRED]
        cells_text = " / ".join(f"{share:.1f}" for share in shares[1:])
        lines.append(f"| {name} | **{shares[0]:.1f}** / {cells_text} |")
    return lines


def _plainly_permuted(a: Array, b: Array, rng: np.random.Generator) -> Array:
    pooled = np.concatenate([a, b])
    weights = np.concatenate([np.full(len(a), -1 / len(a)), np.full(len(b), 1 / len(b))])
    drawn = rng.permuted(np.broadcast_to(weights, (1000, len(weights))), axis=1)
    observed = np.abs(weights @ pooled)
    return np.asarray(((np.abs(drawn @ pooled) >= observed).sum(0) + 1) / 1001)


def _heads(kind: str, n: int, rng: np.random.Generator, heads: int = 784) -> Array:
    own = rng.normal(size=(n, heads))
    if kind == "independent":
        return own
    if kind == "layer blocks":
        shared = np.repeat(rng.normal(size=(n, 28)), heads // 28, axis=1)
    else:
        shared = rng.normal(size=(n, 1)) * np.ones((1, heads))
    if kind == "mixed signs":
        shared = shared * rng.choice([-1.0, 1.0], heads)
    return np.asarray(np.sqrt(0.9) * shared + np.sqrt(0.1) * own)


KINDS = ("independent", "alike", "mixed signs", "layer blocks")
WORLDS = [(kind, 0, 0.0) for kind in KINDS]
WORLDS += [("independent", 78, 1.2), ("alike", 78, 1.2), ("mixed signs", 78, 1.2)]
WORLDS += [("independent", 5, 2.5)]
RUNS, SMALL, FEW = 100, 30, 3000
"""Runs of 784 heads by seed; heads of a small family, and how many such families."""
CORRECTED = ("each", "pooled", "two-level")


def heads(seed: int) -> Found:
    """784 heads at once: false discoveries, and what is found."""
    for number, (kind, effects, size) in enumerate(WORLDS):
        rng = np.random.default_rng([seed, number])
        for _ in range(RUNS):
            d = _heads(kind, 12, rng)
            d[:, :effects] += size
            skewed = two_sided(moments(d))  # as in `paired_contrast`, without its intervals
            p, stepped = sign_flip(d, family=np.zeros(784, dtype=int))
            q = false_discovery(np.maximum(p, skewed)) <= 0.05
            largest = np.maximum(stepped, skewed) <= 0.05
            row = f"{kind} {effects}"
            yield row, "false BH", q[effects:].sum() / max(q.sum(), 1)
            yield row, "false maximum", largest[effects:].any()
            if effects:
                yield row, "found BH", q[:effects].mean()
                yield row, "found maximum", largest[:effects].mean()
    for n in (12, 16):  # every pattern of signs, and drawn ones
        for kind in KINDS[:3]:
            rng = np.random.default_rng([seed, n, len(kind)])
            for _ in range(0, FEW, 50):
                d = np.concatenate([_heads(kind, n, rng, SMALL) for _ in range(50)], axis=1)
                family = np.arange(50 * SMALL) // SMALL
                draws = int(rng.integers(2**31))
                _, stepped = sign_flip(d, family=family, resamples=5000, seed=draws)
                yield f"small {kind}", str(n), (stepped.reshape(50, SMALL) <= 0.05).any(1)
    rng = np.random.default_rng(seed)
    family = np.repeat(np.arange(24), 60)
    for _ in range(5 * RUNS):
        z = rng.normal(size=1440)
        z[:6] += 4.5
        p = 2 * stats.norm.sf(np.abs(z))
        for how in CORRECTED:
            q = corrected(p, family, how) <= 0.05
            yield f"families {how}", "false", q[6:].sum() / max(q.sum(), 1)
            yield f"families {how}", "found", q[:6].mean()


def heads_lines(counts: Counts) -> list[str]:
    runs, _, _ = counts.all("independent 0", "false BH")
    lines = [
        f"784 heads, 12 prompts, {runs} runs a row; ± one standard error. False: the share of what "
        "is called different that is not (Benjamini–Hochberg), or the share of runs with any such "
        "head (maximum), per cent. Found: the share of heads with an effect, per cent.",
        "",
        "| heads | effects | false, BH | false, maximum | found, BH | found, maximum |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind, effects, size in WORLDS:
        cells_text = []
        for column in ("false BH", "false maximum", "found BH", "found maximum"):
            n, share, error = counts.all(f"{kind} {effects}", column)
            cells_text.append(f"{share:.1f} ± {error:.1f}" if n else "–")
        correlation = "" if kind == "independent" else ", correlation .9"
        what = f"{effects} of {size:g}" if effects else "none"
        lines.append(f"| {kind}{correlation} | {what} | {' | '.join(cells_text)} |")
    lines += [
        "",
        f"Families of {SMALL} heads without an effect, in which the maximum calls any different: "
        "per cent, with the 95 % interval of Clopper and Pearson.",
        "",
        "| heads | families | 12 prompts, all signs | 16 prompts, 5,000 drawn |",
        "| --- | --- | --- | --- |",
    ]
    for kind in KINDS[:3]:
        cells_text = []
        for prompts in ("12", "16"):
            n, share, _ = counts.all(f"small {kind}", prompts)
            k = round(n * share / 100)
            ends = stats.beta.ppf([0.025, 0.975], [k, k + 1], [n - k + 1, n - k])
            cells_text.append(f"{share:.2f} [{100 * ends[0]:.2f}, {100 * ends[1]:.2f}]")
        lines.append(f"| {kind} | {n:,} each | {' | '.join(cells_text)} |")
    runs, _, _ = counts.all("families each", "false")
    lines += [
        "",
        "24 families of 60 heads, 6 real heads in one; false among all that is declared, per cent "
        f"of {runs:,} runs:",
        "",
        "| families corrected | false | found |",
        "| --- | --- | --- |",
    ]
    for how in CORRECTED:
        cells = [counts.all(f"families {how}", column) for column in ("false", "found")]
        lines.append(f"| {how} | {' | '.join(f'{m:.1f} ± {e:.1f}' for _, m, e in cells)} |")
    return lines


CLUSTERS = {
    "12 of 5": np.repeat(np.arange(12), 5),
    "40 of 5": np.repeat(np.arange(40), 5),
    "15, of 1 to 9": np.repeat(np.arange(15), [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 9]),
}
ICCS = (0.0, 0.1, 0.3, 0.5)


def clusters(seed: int) -> Found:
    """Prompts that share a source: as prompts, and by cluster."""
    for name, of in CLUSTERS.items():
        for icc in ICCS:
            rng = np.random.default_rng([seed, len(of), int(100 * icc)])
            shared = rng.normal(size=(of.max() + 1, SETS))[of]
            x = np.sqrt(icc) * shared + np.sqrt(1 - icc) * rng.normal(size=(len(of), SETS))
            for what, cluster in (("prompts", None), ("clusters", of)):
                made = units(x, cluster)
                found = intervals(made.x, degrees=made.degrees, resamples=100)
                yield f"{name} {icc}", f"covers {what}", (found.low <= 0) & (found.high >= 0)
                labels = {"cluster": cluster, "strata": None}
                how = ContrastSettings(resamples=1000)
                p = paired_contrast(np.zeros_like(x), x, np.arange(SETS), how, labels)["p"]
                yield f"{name} {icc}", f"called {what}", p < 0.05


def clusters_lines(counts: Counts) -> list[str]:
    sets, _, _ = counts.all("12 of 5 0.0", "covers prompts")
    lines = [
        f"Mean 0, {sets:,} sets a row, per cent: coverage of 95 % intervals, and differences "
        "called one, with prompts taken as units and with clusters.",
        "",
        "| clusters | intraclass correlation | coverage: prompts | clusters | called one: prompts "
        "| clusters |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    columns = [f"{what} {of}" for what in ("covers", "called") for of in ("prompts", "clusters")]
    for name in CLUSTERS:
        for icc in ICCS:
            cells_text = [f"{counts.all(f'{name} {icc}', column)[1]:.1f}" for column in columns]
            lines.append(f"| {name} | {icc:g} | {' | '.join(cells_text)} |")
    return lines


def _pair(d: Array) -> tuple[Array, Array]:
    return np.zeros_like(d), d


EFFECTS: dict[str, tuple[float, str, Callable[[int, Any], tuple[Array, Array]]]] = {
    "effect, normal": (0.5, "effect", lambda n, r: _pair(r.normal(0.5, 1, (n, SETS)))),
    "effect, Laplace": (
        0.5,
        "effect",
        lambda n, r: _pair(0.5 + r.laplace(size=(n, SETS)) / np.sqrt(2)),
    ),
    "effect, exponential": (1.0, "effect", lambda n, r: _pair(r.exponential(size=(n, SETS)))),
    "ratio of means, lognormal .3": (
        1.2,
        "ratio",
        lambda n, r: (r.lognormal(0, 0.3, (n, SETS)), 1.2 * r.lognormal(0, 0.3, (n, SETS))),
    ),
    "ratio of means, exponential": (
        1.2,
        "ratio",
        lambda n, r: (r.exponential(size=(n, SETS)), 1.2 * r.exponential(size=(n, SETS))),
    ),
}


def effects(seed: int) -> Found:
    """Intervals of standardised effects and of ratios."""
    for name, (truth, what, draw) in EFFECTS.items():
        for n in SIZES[:4]:
            a, b = draw(n, np.random.default_rng([seed, n]))
            made = paired_contrast(a, b, np.arange(SETS), ContrastSettings(resamples=100))
            low, high = made[f"{what}_low"], made[f"{what}_high"]
            there = np.isfinite(low)
            yield name, f"covered {n}", ((low <= truth) & (truth <= high))[there]
            yield name, f"estimate {n}", made[what]
            yield name, f"none {n}", ~there


def effects_lines(counts: Counts) -> list[str]:
    sets, _, _ = counts.all("effect, normal", "covered 12")
    lines = [
        f"Per cent of {sets:,} sets whose 95 % interval covers the truth; in brackets the mean of "
        "the estimates.",
        "",
        *header("what | true", SIZES[:4]),
    ]
    for name, (truth, *_) in EFFECTS.items():
        cells = []
        for n in SIZES[:4]:
            covered, estimate, none = (
                counts.all(name, f"{what} {n}")[1] for what in ("covered", "estimate", "none")
            )
            few = f", none in {none:.0f} %" if none else ""
            cells.append(f"{covered:.1f} ({estimate / 100:.2f}{few})")
        lines.append(f"| {name} | {truth:g} | {' | '.join(cells)} |")
    return lines


SHAPES: dict[str, Callable[[Any, int], Array]] = {
    "normal": lambda r, n: r.normal(size=(n, SETS)),
    "Laplace": lambda r, n: r.laplace(size=(n, SETS)) / np.sqrt(2),
    "exponential": lambda r, n: r.exponential(size=(n, SETS)) - 1,
    "minus exponential": lambda r, n: 1 - r.exponential(size=(n, SETS)),
    "80 % zeros": lambda r, n: (
        ((r.random((n, SETS)) < 0.2) * r.exponential(size=(n, SETS)) - 0.2) / 0.6
    ),
}
SHIFTS = ((0.5, "0.5, the margin"), (0.0, "0"))


def equivalence(seed: int) -> Found:
    """No difference as a finding: how often it is found."""
    for name, draw in SHAPES.items():
        for shift, label in SHIFTS:
            for n in SIZES[1:]:
                d = draw(np.random.default_rng([seed, n]), n) + shift
                how = ContrastSettings(resamples=100, margin=0.5)
                made = paired_contrast(np.zeros_like(d), d, np.arange(SETS), how)
                yield f"{name} {label}", str(n), made["p_equivalence"] < 0.05


def equivalence_lines(counts: Counts) -> list[str]:
    sets, _, _ = counts.all("normal 0", "12")
    lines = [
        f"Called `no difference` or `different, but small`, with a margin "
        f"of half a standard deviation; per cent of {sets:,} sets.",
        "",
        *header("values | true difference", SIZES[1:]),
    ]
    for name in SHAPES:
        for _, label in SHIFTS:
            cells_text = [f"{counts.all(f'{name} {label}', str(n))[1]:.1f}" for n in SIZES[1:]]
            lines.append(f"| {name} | {label} | {' | '.join(cells_text)} |")
    return lines


DESIGNS = (
    (1, 1, 0.8, 12, 2000),
    (1, 1, 0.5, 34, 2000),
    (784, 78, 1.2, 12, 40),
    (784, 78, 0.6, 40, 10),
    (784, 5, 2.5, 12, 40),
    (784, 5, 1.0, 40, 10),
    (784, 1, 5.0, 12, 40),
)
"""Heads, how many have an effect, how large, prompts, and runs by seed."""


def powers(seed: int) -> Found:
    """The formula against what is found."""
    for tests, count, size, n, runs in DESIGNS:
        rng = np.random.default_rng([seed, n, count, tests])
        shift = np.where(np.arange(tests) < count, size, 0.0)
        together = max(1, 784 // tests)
        for _ in range(0, runs, together):
            d = rng.normal(size=(n, together * tests)) + np.tile(shift, together)
            family = np.arange(together * tests) // tests
            p, largest = sign_flip(d, family=family, resamples=max(10_000, 40 * tests))
            skewed = two_sided(moments(d))  # as in `paired_contrast`, without its intervals
            q, largest = corrected(np.maximum(p, skewed), family), np.maximum(largest, skewed)
            row = f"{tests} {count} {size} {n}"
            for column, found in (("BH", q), ("maximum", largest)):
                yield row, column, (found.reshape(together, tests)[:, :count] <= 0.05).mean(1)


def powers_lines(counts: Counts) -> list[str]:
    lines = [
        "Heads with an effect that are found, per cent of runs of normal differences, ± one "
        "standard error; in brackets what `power` says.",
        "",
        "| heads | effects | prompts | runs | found, BH | found, maximum |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for tests, count, size, n, _ in DESIGNS:
        cells_text, runs = [], 0
        for column, how in (("BH", "fdr"), ("maximum", "max")):
            runs, share, error = counts.all(f"{tests} {count} {size} {n}", column)
            predicted = 100 * power(size, n, tests=tests, effects=count, correction=how)
            cells_text.append(f"{share:.1f} ± {error:.1f} ({predicted:.0f})")
        lines.append(
            f"| {tests} | {count} of {size:g} | {n} | {runs:,} | {' | '.join(cells_text)} |"
        )
    return lines


LAYERS, HEADS, PROMPTS, RESAMPLES = 28, 28, 500, 10_000


def table(items: int):  # type: ignore[no-untyped-def]
    """Two models, `items` classes, every layer and head: as a run has them."""
    import polars as pl

    from attnscope.run.schemas import VALUES

    rng = np.random.default_rng(0)
    names = pl.DataFrame({"item": [f"class {n}" for n in range(items)]})
    grid = pl.DataFrame({"model": ["base", "tuned"]})
    for column, size in (("prompt", PROMPTS), ("layer", LAYERS), ("head", HEADS)):
        grid = grid.join(pl.DataFrame({column: range(size)}), how="cross")
    grid = grid.join(names, how="cross")
    made = grid.with_columns(
        pl.lit("base").alias("condition"),
        pl.lit("all").alias("queries"),
        pl.lit("all").alias("keys"),
        pl.lit("default").alias("classes"),
        pl.lit("mass").alias("measure"),
        pl.lit(None, dtype=pl.String).alias("target"),
        pl.Series("value", rng.gamma(2, 0.02, grid.height)),
        pl.lit(0.1).alias("uniform"),
        pl.lit(20.0).alias("tokens"),
    )
    absent = [pl.lit(None).alias(name) for name in VALUES.names() if name not in made.columns]
    return made.with_columns(absent).select(VALUES.names()).cast(dict(VALUES))


def one(what: str, items: int) -> None:
    """A row of the table of costs."""
    import polars as pl

    from attnscope.stats.paired import compare
    from attnscope.stats.summary import summary

    values = table(items)
    documents = [prompt // 5 for prompt in range(PROMPTS)]
    known = pl.DataFrame({"prompt": range(PROMPTS), "document": documents})
    ways: dict[str, Callable[[], Any]] = {
        "compare": lambda: compare(values, resamples=RESAMPLES),
        "compare, 100 clusters": lambda: compare(
            values, prompts=known, cluster="document", resamples=RESAMPLES
        ),
        "compare, 500 clusters": lambda: compare(
            values,
            prompts=known.with_columns(document=pl.col("prompt")),
            cluster="document",
            resamples=RESAMPLES,
        ),
        "compare, heads by mean": lambda: compare(values, combine="mean", resamples=RESAMPLES),
        "compare, unpaired": lambda: compare(values, paired=False, resamples=RESAMPLES),
        "summary": lambda: summary(values, resamples=RESAMPLES),
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start, busy = time.perf_counter(), time.process_time()
    rows = ways[what]().height
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"| {what} | {items} | {values.height:,} | {rows:,} | {seconds:.1f} s | {busy:.1f} s "
        f"| {before:,.0f} MiB | {peak:,.0f} MiB |",
        flush=True,
    )


def cost() -> list[str]:
    """Time and peak memory; each row in a process of its own, because peaks only ever grow."""
    lines = [
        f"{LAYERS} layers × {HEADS} heads × {PROMPTS} prompts, {RESAMPLES:,} resamples (31,360 "
        f"sign flips), {len(os.sched_getaffinity(0))} cores; the time that "
        "went by, and the processor time of all cores, which neighbours do not lengthen; peak "
        "memory of the process, its table included.",
        "",
        "| what | classes | rows in | rows out | time | processor | table | peak |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for what, items in [
        ("compare", 1),
        ("compare, 100 clusters", 1),
        ("compare, 500 clusters", 1),
        ("compare, unpaired", 1),
    ]:
        command = [sys.executable, __file__, "--one", what, str(items)]
        made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        lines.append(made.stdout.strip())
    return lines


TABLES: dict[str, tuple[Callable[[int], Found], Callable[[Counts], list[str]]]] = {
    "coverage": (coverage, coverage_lines),
    "errors": (errors, errors_lines),
    "heads": (heads, heads_lines),
    "clusters": (clusters, clusters_lines),
    "effects": (effects, effects_lines),
    "equivalence": (equivalence, equivalence_lines),
    "power": (powers, powers_lines),
}


def made(name: str, seed: int | None, simulate: bool) -> list[str]:
    """The lines of a table."""
    if name == "cost":
        return cost()
    simulation, lines = TABLES[name]
    counts = Counts(name)
    if simulate:
        chosen = max(map(int, counts.seeds), default=30) + 1 if seed is None else seed
        counts.keep(chosen, simulation(chosen))
    return [*lines(counts), "", f"Seeds: {counts.seeds_text}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", choices=[*TABLES, "cost"])
    parser.add_argument("--seed", type=int, help="else the next")
    parser.add_argument("--pages", action="store_true", help="of what was counted, no simulation")
    parser.add_argument("--write", action="store_true", help="into docs/statistics.md too")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return one(options.one[0], int(options.one[1]))
    for name in [options.table] if options.table else [*TABLES, "cost"]:
        lines = made(name, options.seed, not options.pages)
        print(f"\n## {name}\n", *lines, sep="\n", flush=True)
        if options.write:
            put(name, lines)
    return None


if __name__ == "__main__":
    main()
