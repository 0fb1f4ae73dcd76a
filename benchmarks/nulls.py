"""How often claims are supported when they are false, and when they are true.

    python benchmarks/nulls.py                          every built-in claim, from the next seed
    python benchmarks/nulls.py --seed 32 --sets 100     from this seed; 100 sets a row
    python benchmarks/nulls.py --open                   only what the counts leave open
    python benchmarks/nulls.py --claims mine.yaml       claims of your own
    python benchmarks/nulls.py --pages --write          what was counted, into docs/statistics.md

Every set is a run made of random numbers, judged as any run is. Every claim has the worlds that
follow from its declaration (`declared.py`); claims about single tokens have worlds here beside
them. A seed's counts are kept in counts.json, and the table is made of all seeds. The tests go
through the same cases with fewer sets.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy import stats

from attnscope.measures.slope import slope
from attnscope.measures.spikes import spikes
from attnscope.spec.claims import built_in, load_claims
from attnscope.stats.verdicts import VERDICTS, judge

sys.path.insert(0, str(Path(__file__).parent))  # for those who load this file by its path

from declared import HEADS, PROMPTS, Array, Case, Random, asked, declared, table
from pages import Counts, put

TOKENS = 60

CLAIMS = {claim.name: claim for claim in built_in()}


def tokens(
    rng: Random,
    factor: Callable[[Array], Array],
    *,
    noise: tuple[float, float] = (0.05, 0.05),
    uniform: float = 0.8,
    tail: float = 1.0,
) -> pl.DataFrame:
    """A variant made of a base token by token: all that is measured of such a pair.

    `factor` gives each token's own, from its rank in its prompt (0 is the largest, 1 the least);
    `noise` is that of base and variant.
    """
    truth = np.sort(rng.lognormal(0, tail, (PROMPTS, HEADS, TOKENS)))[..., ::-1] / TOKENS
    rank = np.broadcast_to(np.linspace(0, 1, TOKENS), truth.shape)
    base = truth * np.exp(noise[0] * rng.normal(size=truth.shape))
    variant = truth * factor(rank) * np.exp(noise[1] * rng.normal(size=truth.shape))
    keys = np.ones(truth.shape, dtype=bool)
    found, ratio, r2, _ = slope(base, variant, keys)
    uniforms = uniform * np.exp(0.01 * rng.normal(size=(PROMPTS, 1))) * np.ones((1, HEADS))
    parts = {"lambda": found, "lambda_ratio": ratio, "lambda_r2": r2, "uniform_ratio": uniforms}
    made_of = [table(name, value[:, None]) for name, value in parts.items()]
    at, rest, fall, *_ = spikes(base, variant, keys, 0.1)
    for name, value in (("spike_ratio", at), ("rest_ratio", rest), ("spike_fall", fall)):
        made_of.append(table(name, value[:, None], item="0.1"))
    return pl.concat(made_of)


def steps(spike: float, rest: float) -> Callable[[Array], Array]:
    """One factor for the largest tenth, another for the rest."""
    return lambda rank: np.where(rank < 0.1, spike, rest)


def scattered(rng: Random, factor: float, spread: float) -> Callable[[Array], Array]:
    """A factor for every token, unrelated to how large it is."""
    return lambda rank: factor * np.exp(spread * rng.normal(size=rank.shape))


def fits(rng: Random, r2: Any, spread: float = 0.02) -> pl.DataFrame:
    """R² of the affine fit in three layers."""
    mean = np.broadcast_to(np.asarray(r2, dtype=float), (3,))
    value = np.minimum(mean + spread * rng.normal(size=(PROMPTS, 3)), 1.0)
    return table("affine_r2", value[..., None], whole=True)


def cases() -> list[Case]:
    """Every built-in claim has some of both."""
    made_of = [one for claim in CLAIMS.values() for one in declared(claim)]

    def case(claim: str, world: str, draw: Callable[[Random], pl.DataFrame], true: bool) -> None:
        made_of.append(Case(CLAIMS[claim], world, true, draw))

    for noise in (0.01, 0.05, 0.1, 0.3):
        case(
            "fall",
            f"one factor for all tokens, noise {noise:g}",
            lambda rng, n=noise: tokens(rng, steps(0.6, 0.6), noise=(n, n), tail=1.5),
            False,
        )
    for noises in ((0.2, 0.02), (0.02, 0.2)):
        case(
            "fall",
            f"one factor, noise {noises[0]:g} without and {noises[1]:g} with the filler",
            lambda rng, n=noises: tokens(rng, steps(0.6, 0.6), noise=n, tail=1.5),
            False,
        )
    case(
        "fall",
        "a factor for every token, by chance",
        lambda rng: tokens(rng, scattered(rng, 0.6, 0.5), tail=1.5),
        False,
    )
    case(
        "fall",
        "no fall but the uniform one",
        lambda rng: tokens(rng, steps(0.8, 0.8), tail=1.5),
        False,
    )
    case("fall", "no fall at all", lambda rng: tokens(rng, steps(1, 1), tail=1.5), False)
    case("fall", "mostly at the rest", lambda rng: tokens(rng, steps(0.7, 0.5), tail=1), False)
    case(
        "fall",
        "spikes fall more by 0.05, no more",
        lambda rng: tokens(rng, steps(0.6 / 1.05, 0.6), tail=1.5),
        False,
    )
    case(
        "fall",
        "spikes fall to 0.4, the rest to 0.75",
        lambda rng: tokens(rng, steps(0.4, 0.75), tail=1.5),
        True,
    )

    case("one-factor", "no fall at all", lambda rng: tokens(rng, steps(1, 1)), False)
    case(
        "one-factor", "no fall but the uniform one", lambda rng: tokens(rng, steps(0.8, 0.8)), False
    )
    case(
        "one-factor",
        "one factor, below the uniform one by 0.05",
        lambda rng: tokens(rng, steps(0.8 / 1.05, 0.8 / 1.05)),
        False,
    )
    case(
        "one-factor",
        "a factor for every token, by chance",
        lambda rng: tokens(rng, scattered(rng, 0.6, 0.5)),
        False,
    )
    case(
        "one-factor",
        "spikes fall to 0.4, the rest to 0.75",
        lambda rng: tokens(rng, steps(0.4, 0.75)),
        False,
    )
    case("one-factor", "one factor 0.6, noise 0.05", lambda rng: tokens(rng, steps(0.6, 0.6)), True)

    only = "affine-first-layer-only"
    case(only, "R² 0.9 in all layers", lambda rng: fits(rng, 0.9), False)
    case(only, "R² 0.95 in all layers", lambda rng: fits(rng, 0.95), False)
    case(only, "R² 0.85 in all layers", lambda rng: fits(rng, 0.85), False)
    case(only, "R² 0.92, 0.88, 0.88", lambda rng: fits(rng, [0.92, 0.88, 0.88]), False)
    case(
        only,
        "layers alike, R² 0.9 give or take 0.03",
        lambda rng: fits(rng, 0.9 + 0.03 * rng.normal(size=3)),
        False,
    )
    case(only, "R² 0.95, 0.7, 0.8", lambda rng: fits(rng, [0.95, 0.7, 0.8]), True)

    return made_of


def verdicts(
    case: Case,
    sets: int,
    seed: int = 0,
    resamples: int = 200,
    stream: Callable[[list[int]], Any] = np.random.default_rng,
) -> list[str]:
    """The verdict on each of so many sets; for so few heads 200 resamples are enough."""
    experiment, found = asked(case.claim), []
    for number in range(sets):
        rng = stream([seed, number, sum(map(ord, case.claim.name + case.world))])
        (verdict,) = judge(
            [case.claim], case.draw(rng), experiment=experiment, resamples=resamples, seed=number
        )
        assert verdict.verdict != "not measured", verdict.reason
        found.append(verdict.verdict)
    return found


def counted(every: list[Case], sets: int, seed: int) -> Iterator[tuple[str, str, Any]]:
    """What `Counts` keeps of a seed."""
    for case in every:
        found = np.array(verdicts(case, sets, seed))
        for name in VERDICTS[:3]:
            yield f"{case.claim.name}: {case.world}", name, found == name


def ends(n: int, share: float) -> tuple[float, float]:
    """The 95 % interval of a share, both in per cent."""
    k = round(n * share / 100)
    low, high = stats.beta.ppf([0.025, 0.975], [k, k + 1], [n - k + 1, n - k])
    return 0.0 if not k else 100 * float(low), 100.0 if k == n else 100 * float(high)


def is_open(case: Case, counts: Counts) -> bool:
    """Whether the counts leave open what is promised: at most 5 % where a claim is false, most
    where it is true."""
    n, share, _ = counts.all(f"{case.claim.name}: {case.world}", "supported")
    if not n:
        return True
    low, high = ends(n, share)
    return low <= 50 if case.true else low <= 5 < high


def lines(every: list[Case], counts: Counts) -> list[str]:
    """The table, of all seeds."""
    sets = {counts.all(f"{c.claim.name}: {c.world}", "supported")[0] for c in every}
    number = " to ".join(f"{n:,}" for n in sorted({min(sets), max(sets)}))
    lines_of_page = [
        f"{PROMPTS} prompts, {HEADS} heads, {number} sets a row, seeds {counts.seeds_text}; "
        f"per cent of "
        "sets, in brackets the 95 % interval of Clopper and Pearson.",
        "",
        "| claim | what is the case | it is | sets | supported | contradicted | undetermined |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in sorted(every, key=lambda c: list(CLAIMS).index(c.claim.name)):
        row = f"{case.claim.name}: {case.world}"
        n, share, _ = counts.all(row, "supported")
        if not n:
            continue
        low, high = ends(n, share)
        mark = "" if case.true else "**"
        rest = [f"{counts.all(row, name)[1]:.1f}" for name in VERDICTS[1:3]]
        lines_of_page.append(
            f"| `{case.claim.name}` | {case.world} | {'true' if case.true else 'false'} | {n} "
            f"| {mark}{share:.1f}{mark} [{low:.1f}, {high:.1f}] | {' | '.join(rest)} |"
        )
    return lines_of_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=100, help="by seed")
    parser.add_argument("--seed", type=int, help="else the next")
    parser.add_argument("--claims", help="a YAML file of claims, in place of the built-in ones")
    parser.add_argument("--only", nargs="+", help="worlds whose name has one of these in it")
    parser.add_argument("--open", action="store_true", help="only what the counts leave open")
    parser.add_argument("--pages", action="store_true", help="of what was counted, no simulation")
    parser.add_argument("--write", action="store_true", help="into docs/statistics.md too")
    chosen = parser.parse_args()
    if chosen.claims:
        for case in (case for claim in load_claims(chosen.claims) for case in declared(claim)):
            found = verdicts(case, chosen.sets, chosen.seed or 0)
            supported = found.count("supported") / len(found)
            print(f"{case.claim.name}: {case.world} ({case.true}): supported {supported:.1%}")
        return
    every, counts = cases(), Counts("nulls")
    if not chosen.pages:
        seed = max(map(int, counts.seeds), default=30) + 1 if chosen.seed is None else chosen.seed
        some = [c for c in every if any(one in c.world for one in chosen.only or [""])]
        some = [c for c in some if not chosen.open or is_open(c, counts)]
        counts.keep(seed, counted(some, chosen.sets, seed))
    lines_of_page = lines(every, counts)
    print("\n".join(lines_of_page))
    if chosen.write:
        put("nulls", lines_of_page)


if __name__ == "__main__":
    main()
