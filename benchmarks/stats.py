"""What the statistics promise, measured: coverage, errors, corrections, clusters, power, cost.

    python benchmarks/stats.py                       every table
    python benchmarks/stats.py --table coverage      one of them
    python benchmarks/stats.py --write               into docs/statistics.md too

Data sets are columns, so that thousands of them are one call. Seeds are other than the tests'.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special, stats

from attnscope.stats.contrast import Settings, paired_contrast, unpaired_contrast
from attnscope.stats.correction import corrected, false_discovery
from attnscope.stats.intervals import (
    bca,
    intervals,
    moments,
    skewed_interval,
    t_interval,
    two_sided,
)
from attnscope.stats.permute import relabel, sign_flip
from attnscope.stats.power import power
from attnscope.stats.units import units

SETS, SEED = 2000, 20
Array = np.ndarray[Any, np.dtype[np.float64]]


def distributions(n: int, sets: int = SETS) -> dict[str, tuple[Array, float]]:
    """Samples as columns, and their true means."""
    rng = np.random.default_rng([SEED, n])
    shape = (n, sets)
    mixture = np.where(rng.random(shape) < 0.1, 10.0, 1.0)
    return {
        "normal": (rng.normal(0.3, 1, shape), 0.3),
        "symmetric, a scale per prompt": (rng.normal(size=shape) * rng.lognormal(size=shape), 0.0),
        "normal, a tenth ten times as wide": (rng.normal(size=shape) * mixture, 0.0),
        "t with 3 df": (rng.standard_t(3, shape), 0.0),
        "Laplace": (rng.laplace(size=shape), 0.0),
        "paired beta, mean .01": (
            rng.beta(0.5, 49.5, shape) - rng.beta(0.5, 49.5, shape),
            0.0,
        ),
        "ties {−1, 0, 1}": (rng.choice([-1.0, 0.0, 1.0], shape, p=[0.2, 0.6, 0.2]), 0.0),
        "gamma, skewness 1": (rng.gamma(4, size=shape), 4.0),
        "ratios, lognormal .3": (rng.lognormal(0, 0.3, shape), float(np.exp(0.045))),
        "exponential, skewness 2": (rng.exponential(size=shape), 1.0),
        "beta, mean .01": (rng.beta(0.5, 49.5, shape), 0.01),
        "χ²(1), skewness 2.8": (rng.chisquare(1, shape), 1.0),
        "lognormal, skewness 6": (rng.lognormal(size=shape), float(np.exp(0.5))),
        "80 % zeros": ((rng.random(shape) < 0.2) * rng.exponential(size=shape), 0.2),
    }


def candidates(x: Array, resamples: int = 1000) -> dict[str, tuple[Array, Array]]:
    """The intervals that were tried, by name; ours is the hull of t and Hall."""
    n = len(x)
    found = moments(x)
    made = intervals(x, resamples=100)
    rng = np.random.default_rng(SEED)
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
        "plain BCa": bca(x, resamples=resamples, expand=False),
        "percentile": (percentile[0], percentile[1]),
        "bootstrap-t": (low, high),
    }


def coverage() -> list[str]:
    """Share of data sets whose interval covers the truth; none counts as not covering."""
    sizes = (6, 12, 24, 64, 200)
    tried = ("ours", "t", "Hall", "BCa", "percentile", "bootstrap-t")
    lines = [
        f"Per cent of {SETS:,} sets whose 95 % interval covers the mean; ± 0.5. Cells: "
        f"**ours** / {' / '.join(tried[1:])}. Resamples: 1,000.",
        "",
        f"| values | {' | '.join(f'n = {n}' for n in sizes)} |",
        f"| --- |{' --- |' * len(sizes)}",
    ]
    cells: dict[str, list[str]] = {}
    doubtful: dict[str, list[str]] = {}
    for n in sizes:
        for name, (x, truth) in distributions(n).items():
            made = candidates(x)
            shares = [
                f"{100 * np.mean((made[one][0] <= truth) & (truth <= made[one][1])):.0f}"
                for one in tried
            ]
            ours = 100 * np.mean((made["ours"][0] <= truth) & (truth <= made["ours"][1]))
            cells.setdefault(name, []).append(f"**{ours:.1f}** / {' / '.join(shares[1:])}")
            marked = intervals(x[:, :500], resamples=500).doubtful.mean()
            doubtful.setdefault(name, []).append(f"{100 * marked:.0f}")
        print(f"coverage: n = {n}", file=sys.stderr, flush=True)
    lines += [f"| {name} | {' | '.join(row)} |" for name, row in cells.items()]
    lines += [
        "",
        "How many of them the output marks as doubtful, per cent:",
        "",
        f"| values | {' | '.join(f'n = {n}' for n in sizes)} |",
        f"| --- |{' --- |' * len(sizes)}",
    ]
    return lines + [f"| {name} | {' | '.join(row)} |" for name, row in doubtful.items()]


def errors() -> list[str]:
    """How often a difference of 0 is called one."""
    sizes = (12, 24, 64, 200)
    lines = [
        f"Differences of mean 0 called one at p < 0.05, per cent of {SETS:,} sets, ± 0.5: **ours** "
        "/ sign flips alone / Student's t.",
        "",
        f"| values, less their mean | {' | '.join(f'n = {n}' for n in sizes)} |",
        f"| --- |{' --- |' * len(sizes)}",
    ]
    cells: dict[str, list[str]] = {}
    how = Settings(resamples=2000, seed=SEED)
    for n in sizes:
        for name, (x, truth) in distributions(n).items():
            d = x - truth
            ours = paired_contrast(np.zeros_like(d), d, np.arange(SETS), how)["p"]
            flips, _ = sign_flip(d, resamples=2000, seed=SEED)
            with np.errstate(all="ignore"):
                plain = stats.ttest_1samp(d, 0).pvalue
            shares = [100 * np.mean(p < 0.05) for p in (ours, flips, plain)]
            cells.setdefault(name, []).append(
                f"**{shares[0]:.1f}** / {shares[1]:.1f} / {shares[2]:.1f}"
            )
        print(f"errors: n = {n}", file=sys.stderr, flush=True)
    lines += [f"| {name} | {' | '.join(row)} |" for name, row in cells.items()]
    lines += [
        "",
        "Two independent groups of equal means: **ours** / Welch's t permuted / the plain "
        "difference permuted / Welch's t.",
        "",
        "| groups | called different |",
        "| --- | --- |",
    ]
    rng = np.random.default_rng(SEED)
    groups: dict[str, tuple[Array, Array]] = {
        "10 and 40, spread 3 and 1": (rng.normal(0, 3, (10, SETS)), rng.normal(size=(40, SETS))),
        "10 and 40, spread 1 and 3": (rng.normal(size=(10, SETS)), rng.normal(0, 3, (40, SETS))),
        "20 and 20, normal": (rng.normal(size=(20, SETS)), rng.normal(size=(20, SETS))),
        "12 and 30, exponential": (
            rng.exponential(size=(12, SETS)),
            rng.exponential(size=(30, SETS)),
        ),
        "15 and 15, beta mean .01 and normal": (
            100 * rng.beta(0.5, 49.5, (15, SETS)),
            rng.normal(1, 1, (15, SETS)),
        ),
    }
    for name, (a, b) in groups.items():
        found = (
            unpaired_contrast(a, b, np.arange(SETS), Settings(resamples=1000))["p"],
            relabel(a, b, resamples=1000, seed=SEED)[0],
            _plainly_permuted(a, b, rng),
            stats.ttest_ind(a, b, equal_var=False).pvalue,
        )
        shares = [f"{100 * np.mean(p < 0.05):.1f}" for p in found]
        lines.append(f"| {name} | **{shares[0]}** / {' / '.join(shares[1:])} |")
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


def heads(runs: int = 100) -> list[str]:
    """784 heads at once: false discoveries, and what is found."""
    lines = [
        f"784 heads, 12 prompts, {runs} runs a row. False: the share of what is called different "
        "that is not (Benjamini–Hochberg), or the share of runs with any such head (maximum), per "
        "cent. Found: the share of heads with an effect, per cent.",
        "",
        "| heads | effects | false, BH | false, maximum | found, BH | found, maximum |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    worlds = [(kind, 0, 0.0) for kind in ("independent", "alike", "mixed signs", "layer blocks")]
    worlds += [("independent", 78, 1.2), ("alike", 78, 1.2), ("mixed signs", 78, 1.2)]
    worlds += [("independent", 5, 2.5)]
    for kind, effects, size in worlds:
        rng = np.random.default_rng([SEED, effects, len(kind)])
        seen = []
        for _ in range(runs):
            d = _heads(kind, 12, rng)
            d[:, :effects] += size
            skewed = two_sided(moments(d))  # as in `paired_contrast`, without its intervals
            p, stepped = sign_flip(d, family=np.zeros(784, dtype=int))
            q = false_discovery(np.maximum(p, skewed)) <= 0.05
            largest = np.maximum(stepped, skewed) <= 0.05
            seen.append(
                (
                    q[effects:].sum() / max(q.sum(), 1),
                    largest[effects:].any(),
                    q[:effects].mean() if effects else np.nan,
                    largest[:effects].mean() if effects else np.nan,
                )
            )
        shares = 100 * np.mean(np.array(seen, dtype=float), axis=0)
        told = [f"{s:.1f}" if np.isfinite(s) else "–" for s in shares]
        correlation = "" if kind == "independent" else ", correlation .9"
        lines.append(
            f"| {kind}{correlation} | {f'{effects} of {size:g}' if effects else 'none'} "
            f"| {' | '.join(told)} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    lines += [
        "",
        "24 families of 60 heads, 6 real heads in one; false among all that is declared, per cent "
        f"of {5 * runs} runs:",
        "",
        "| families corrected | false | found |",
        "| --- | --- | --- |",
    ]
    rng = np.random.default_rng(SEED)
    family = np.repeat(np.arange(24), 60)
    kinds = ("each", "pooled", "two-level")
    told_of: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(5 * runs):
        z = rng.normal(size=1440)
        z[:6] += 4.5
        p = 2 * stats.norm.sf(np.abs(z))
        for kind in kinds:
            q = corrected(p, family, kind) <= 0.05
            told_of[kind].append((q[6:].sum() / max(q.sum(), 1), q[:6].mean()))
    for kind, some in told_of.items():
        false, found = 100 * np.mean(some, axis=0)
        lines.append(f"| {kind} | {false:.1f} | {found:.1f} |")
    return lines


def clusters() -> list[str]:
    """Prompts that share a source: as prompts, and by cluster."""
    lines = [
        f"Mean 0, {SETS:,} sets a row, per cent: coverage of 95 % intervals, and differences "
        "called one, with prompts taken as units and with clusters.",
        "",
        "| clusters | intraclass correlation | coverage: prompts | clusters | called one: prompts "
        "| clusters |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    shapes = {
        "12 of 5": np.repeat(np.arange(12), 5),
        "40 of 5": np.repeat(np.arange(40), 5),
        "15, of 1 to 9": np.repeat(np.arange(15), [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 9]),
    }
    for name, of in shapes.items():
        for icc in (0.0, 0.1, 0.3, 0.5):
            rng = np.random.default_rng([SEED, len(of), int(100 * icc)])
            shared = rng.normal(size=(of.max() + 1, SETS))[of]
            x = np.sqrt(icc) * shared + np.sqrt(1 - icc) * rng.normal(size=(len(of), SETS))
            told = []
            for cluster in (None, of):
                made = units(x, cluster)
                found = intervals(made.x, degrees=made.degrees, resamples=100)
                p = paired_contrast(
                    np.zeros_like(x),
                    x,
                    np.arange(SETS),
                    Settings(resamples=1000),
                    {"cluster": cluster, "strata": None},
                )["p"]
                told.append((((found.low <= 0) & (found.high >= 0)).mean(), (p < 0.05).mean()))
            shares = [f"{100 * told[at][what]:.1f}" for what in (0, 1) for at in (0, 1)]
            lines.append(f"| {name} | {icc:g} | {' | '.join(shares)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def effects() -> list[str]:
    """Intervals of standardised effects and of ratios."""
    sizes = (6, 12, 24, 64)
    lines = [
        f"Per cent of {SETS:,} sets whose 95 % interval covers the truth; in brackets the mean of "
        "the estimates.",
        "",
        f"| what | true | {' | '.join(f'n = {n}' for n in sizes)} |",
        f"| --- | --- |{' --- |' * len(sizes)}",
    ]
    draws: dict[str, tuple[float, str, Callable[[int, Any], tuple[Array, Array]]]] = {
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
            lambda n, r: (
                r.lognormal(0, 0.3, (n, SETS)),
                1.2 * r.lognormal(0, 0.3, (n, SETS)),
            ),
        ),
        "ratio of means, exponential": (
            1.2,
            "ratio",
            lambda n, r: (r.exponential(size=(n, SETS)), 1.2 * r.exponential(size=(n, SETS))),
        ),
    }
    for name, (truth, what, draw) in draws.items():
        cells = []
        for n in sizes:
            a, b = draw(n, np.random.default_rng([SEED, n]))
            made = paired_contrast(a, b, np.arange(SETS), Settings(resamples=100))
            low, high = made[f"{what}_low"], made[f"{what}_high"]
            there = np.isfinite(low)
            covered = ((low <= truth) & (truth <= high))[there].mean()
            few = "" if there.all() else f", none in {100 * (1 - there.mean()):.0f} %"
            cells.append(f"{100 * covered:.1f} ({np.nanmean(made[what]):.2f}{few})")
        lines.append(f"| {name} | {truth:g} | {' | '.join(cells)} |")
    return lines


def _pair(d: Array) -> tuple[Array, Array]:
    return np.zeros_like(d), d


def equivalence() -> list[str]:
    """No difference as a finding: how often it is found."""
    sizes = (12, 24, 64, 200)
    lines = [
        f"Called `no difference` or `different, but small`, with a smallest difference of interest "
        f"of half a standard deviation; per cent of {SETS:,} sets.",
        "",
        f"| values | true difference | {' | '.join(f'n = {n}' for n in sizes)} |",
        f"| --- | --- |{' --- |' * len(sizes)}",
    ]
    shapes: dict[str, Callable[[Any, int], Array]] = {
        "normal": lambda r, n: r.normal(size=(n, SETS)),
        "Laplace": lambda r, n: r.laplace(size=(n, SETS)) / np.sqrt(2),
        "exponential": lambda r, n: r.exponential(size=(n, SETS)) - 1,
    }
    for name, draw in shapes.items():
        for shift, said in ((0.5, "0.5, the smallest"), (0.0, "0")):
            cells = []
            for n in sizes:
                d = draw(np.random.default_rng([SEED, n]), n) + shift
                how = Settings(resamples=100, smallest=0.5)
                made = paired_contrast(np.zeros_like(d), d, np.arange(SETS), how)
                cells.append(f"{100 * (made['p_equal'] < 0.05).mean():.1f}")
            lines.append(f"| {name} | {said} | {' | '.join(cells)} |")
    return lines


def powers(runs: int = 20) -> list[str]:
    """The formula against what is found."""
    lines = [
        f"Heads with an effect that are found, per cent of {runs} runs of normal differences; in "
        "brackets what `power` says.",
        "",
        "| heads | effects | prompts | found, BH | found, maximum |",
        "| --- | --- | --- | --- | --- |",
    ]
    for tests, count, size, n in (
        (1, 1, 0.8, 12),
        (1, 1, 0.5, 34),
        (784, 78, 1.2, 12),
        (784, 78, 0.6, 40),
        (784, 5, 2.5, 12),
        (784, 5, 1.0, 40),
        (784, 1, 5.0, 12),
    ):
        rng = np.random.default_rng([SEED, n, count])
        d = rng.normal(size=(n, runs * tests))
        shift = np.where(np.arange(tests) < count, size, 0.0)
        d += np.tile(shift, runs)
        found = []
        for at in range(0, runs * tests, tests):
            part = d[:, at : at + tests]
            p, largest = sign_flip(
                part, family=np.zeros(tests, dtype=int), resamples=max(10_000, 40 * tests)
            )
            found.append(
                ((false_discovery(p)[:count] <= 0.05).mean(), (largest[:count] <= 0.05).mean())
            )
        share = 100 * np.mean(found, axis=0)
        said = [
            100 * power(size, n, tests=tests, effects=count, correction=how)
            for how in ("fdr", "max")
        ]
        lines.append(
            f"| {tests} | {count} of {size:g} | {n} | {share[0]:.0f} ({said[0]:.0f}) "
            f"| {share[1]:.0f} ({said[1]:.0f}) |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
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
        ("compare, heads by mean", 1),
        ("summary", 1),
        ("compare", 4),
    ]:
        command = [sys.executable, __file__, "--one", what, str(items)]
        made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        lines.append(made.stdout.strip())
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    "coverage": coverage,
    "errors": errors,
    "heads": heads,
    "clusters": clusters,
    "effects": effects,
    "equivalence": equivalence,
    "power": powers,
    "cost": cost,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", choices=list(TABLES))
    parser.add_argument("--write", action="store_true", help="into docs/statistics.md too")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return one(options.one[0], int(options.one[1]))
    for name in [options.table] if options.table else list(TABLES):
        lines = TABLES[name]()
        print(f"\n## {name}\n", *lines, sep="\n", flush=True)
        if options.write:
            from pages import put

            put(name, lines)
    return None


if __name__ == "__main__":
    main()
