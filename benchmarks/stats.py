"""Statistics at full size, and how often the intervals cover the truth.

    python benchmarks/stats.py              time and peak memory of comparisons
    python benchmarks/stats.py --coverage   coverage of the intervals, a minute or two

Each size runs in a process of its own, because peak memory only ever grows.
"""

import argparse
import os
import resource
import subprocess
import sys
import time

import numpy as np

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
    return made.select(VALUES.names()).cast(dict(VALUES))


def one(what: str, items: int) -> None:
    from attnscope.stats.paired import compare
    from attnscope.stats.summary import summary

    values = table(items)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    if what == "compare":
        rows = compare(values, resamples=RESAMPLES).height
    elif what == "compare, heads by mean":
        rows = compare(values, combine="mean", resamples=RESAMPLES).height
    elif what == "compare, unpaired":
        rows = compare(values, paired=False, resamples=RESAMPLES).height
    else:
        rows = summary(values, resamples=RESAMPLES).height
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"| {what} | {items} | {values.height:,} | {rows:,} | {seconds:.1f} s "
        f"| {before:,.0f} MiB | {peak:,.0f} MiB |",
        flush=True,
    )


def coverage(sets: int = 10_000) -> None:
    from attnscope.stats.intervals import bca

    def draws(n: int):  # type: ignore[no-untyped-def]
        rng = np.random.default_rng([0, n])
        yield rng.normal(0.3, 1, (n, sets)), 0.3
        yield rng.gamma(4, size=(n, sets)), 4.0
        yield rng.exponential(size=(n, sets)), 1.0
        yield rng.lognormal(size=(n, sets)), np.exp(0.5)

    print("| prompts | normal | gamma (skewness 1) | exponential (2) | lognormal (6) |")
    print("| --- | --- | --- | --- | --- |")
    for n in (6, 8, 10, 15, 20, 30, 50, 100, 200, 400):
        shares = []
        for x, truth in draws(n):
            both = []
            for expand in (True, False):
                low, high = bca(x, resamples=4000, expand=expand)
                both.append(f"{100 * ((low <= truth) & (truth <= high)).mean():.1f}")
            shares.append(f"{both[0]} ({both[1]})")
        print(f"| {n} | {' | '.join(shares)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--one", nargs=2)
    options = parser.parse_args()
    if options.coverage:
        return coverage()
    if options.one:
        return one(options.one[0], int(options.one[1]))
    print(f"{LAYERS} layers × {HEADS} heads × {PROMPTS} prompts, {RESAMPLES:,} resamples,")
    print(f"{len(os.sched_getaffinity(0))} cores; peak memory of the process, its table included\n")
    print("| what | classes | rows in | rows out | time | table | peak |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    sizes = [
        ("compare", 1),
        ("compare, unpaired", 1),
        ("compare, heads by mean", 1),
        ("summary", 1),
        ("compare", 4),
    ]
    for what, items in sizes:
        command = [sys.executable, __file__, "--one", what, str(items)]
        subprocess.run(command, check=True)
    return None


if __name__ == "__main__":
    main()
