"""How often the built-in claims are supported when they are false, and when they are true.

    python benchmarks/nulls.py [--sets 400] [--claim NAME] [--write]

Every set is a run made of random numbers, judged as any run is. `--write` puts the table into
docs/statistics.md. The tests go through the same cases with fewer sets.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from attnscope.measures.slope import slope
from attnscope.measures.spikes import spikes
from attnscope.question.claims import built_in
from attnscope.question.spec import Experiment, made
from attnscope.run.schemas import VALUES
from attnscope.stats.verdicts import judge

PROMPTS, HEADS, TOKENS = 24, 8, 60
Array = np.ndarray[Any, np.dtype[np.float64]]
Random = np.random.Generator

CLAIMS = {claim.name: claim for claim in built_in()}


def asked() -> Experiment:
    """Two models and three conditions, as the claims are about."""
    return made(
        name="made",
        models={"one": "one", "two": "two"},
        prompts={"source": "math", "count": PROMPTS},
        conditions={
            "base": {},
            "filler": {"insert": {"kind": "repeat", "unit": "/", "count": 20}},
            "sentence": {"insert": {"kind": "sentence", "count": 20}},
        },
        measures=["mass", "lambda", "even_slope", "spikes", "uniformity", "affine"],
    )


def table(
    measure: str,
    value: Array,
    *,
    model: str = "one",
    condition: str = "filler",
    item: str | None = None,
    **columns: Any,
) -> pl.DataFrame:
    """Values [prompts, layers, heads] (or [prompts, layers]) as a run has them."""
    whole = value.ndim == 2
    prompt, layer, *head = np.indices(value.shape).reshape(value.ndim, -1)
    data: dict[str, Any] = {
        **dict.fromkeys(VALUES.names()),
        "model": model,
        "condition": condition,
        "queries": "all",
        "keys": "all",
        "measure": measure,
        "item": item,
        "tokens": 40.0,
        **columns,
    }
    series = {
        "prompt": prompt,
        "layer": layer,
        "head": None if whole else head[0],
        "value": value.reshape(-1),
    }
    frame = pl.DataFrame({"value": series.pop("value")})
    made_of = {**data, **series}
    made_of.pop("value")
    frame = frame.with_columns(
        pl.Series(name, what) if isinstance(what, np.ndarray) else pl.lit(what).alias(name)
        for name, what in made_of.items()
    )
    return frame.select(VALUES.names()).cast(dict(VALUES))  # type: ignore[arg-type]


def per_head(rng: Random, mean: Any, spread: float) -> Array:
    """[prompts, 1 layer, heads] about a mean, which may be one for each head."""
    return np.asarray(mean + spread * rng.normal(size=(PROMPTS, 1, HEADS)))


def tokens(
    rng: Random,
    factor: Callable[[Array], Array],
    *,
    noise: tuple[float, float] = (0.05, 0.05),
    even: float = 0.8,
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
    evens = even * np.exp(0.01 * rng.normal(size=(PROMPTS, 1))) * np.ones((1, HEADS))
    parts = {"lambda": found, "lambda_ratio": ratio, "lambda_r2": r2, "even_ratio": evens}
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


def fits(rng: Random, r2: Any, spread: float = 0.02, measure: str = "affine_r2") -> pl.DataFrame:
    """R² of the affine fit in three layers."""
    mean = np.broadcast_to(np.asarray(r2, dtype=float), (3,))
    return table(measure, np.minimum(mean + spread * rng.normal(size=(PROMPTS, 3)), 1.0))


def against_sentence(rng: Random, measure: str, ratio: Any, spread: float = 0.1) -> pl.DataFrame:
    """A filler, and a sentence whose values are those over a ratio, head by head."""
    level = np.exp(0.2 * rng.normal(size=(PROMPTS, 1, HEADS)))
    sides = [
        level * factor * np.exp(spread * rng.normal(size=level.shape)) for factor in (ratio, 1.0)
    ]
    names = ("filler", "sentence")
    return pl.concat(
        [table(measure, side, condition=name) for side, name in zip(sides, names, strict=True)]
    )


def random_signs(rng: Random, size: float) -> Array:
    """A ratio for each head: above 1 or below, by chance."""
    return np.asarray((1 + size) ** rng.choice([-1.0, 1.0], HEADS))


def two_models(rng: Random, keys: str, item: str, ratio: float) -> pl.DataFrame:
    """Masses of two models in one layer, the second's times a ratio."""
    level = 0.1 * np.exp(0.3 * rng.normal(size=(PROMPTS, 1, HEADS)))
    return pl.concat(
        [
            table(
                "mass",
                level * factor * np.exp(0.1 * rng.normal(size=level.shape)),
                model=model,
                condition="base",
                keys=keys,
                classes="default",
                item=name,
                uniform=0.1,
            )
            for model, factor in (("one", 1.0), ("two", ratio))
            for name in ((item,) if item != "hash" else ("hash", "star"))
        ]
    )


@dataclass(frozen=True)
class Case:
    """A way the world may be, in which a claim is false or true."""

    claim: str
    world: str
    true: bool
    draw: Callable[[Random], pl.DataFrame]


def cases() -> list[Case]:
    """Every built-in claim has some of both."""
    made_of: list[Case] = []

    def case(claim: str, world: str, draw: Callable[[Random], pl.DataFrame], true: bool) -> None:
        made_of.append(Case(claim, world, true, draw))

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
        "no fall but the even one",
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

    for world, ratio in (
        ("no difference", lambda rng: 1.0),
        ("heads of either sign", lambda rng: random_signs(rng, 0.2)),
        ("less by 0.05, no more", lambda rng: 1 / 1.05),
    ):
        for claim, measure in (
            ("fall-beyond-sentence", "lambda_ratio"),
            ("uniform-filler", "uniformity"),
        ):
            case(
                claim,
                world,
                lambda rng, m=measure, r=ratio: against_sentence(rng, m, r(rng)),
                False,
            )
    for claim, measure in (
        ("fall-beyond-sentence", "lambda_ratio"),
        ("uniform-filler", "uniformity"),
    ):
        case(claim, "less by a fifth", lambda rng, m=measure: against_sentence(rng, m, 0.8), True)

    case("one-factor", "no fall at all", lambda rng: tokens(rng, steps(1, 1)), False)
    case("one-factor", "no fall but the even one", lambda rng: tokens(rng, steps(0.8, 0.8)), False)
    case(
        "one-factor",
        "one factor, below the even one by 0.05",
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

    for claim, measure in (("affine", "affine_r2"), ("affine-heads", "affine_heads_r2")):
        for r2, true in ((0.9, False), (0.85, False), (0.93, True)):
            case(
                claim,
                f"R² {r2:g}",
                lambda rng, m=measure, r=r2: fits(rng, r, measure=m),
                true,
            )
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

    for claim, keys, item in (("maps", "maps", "all"), ("map-characters", "all", "hash")):
        for ratio in (1.0, 1.05):
            case(
                claim,
                f"the second has {ratio:g} times as much",
                lambda rng, k=keys, i=item, r=ratio: two_models(rng, k, i, r),
                False,
            )
        case(
            claim,
            "the second has 1.2 times as much",
            lambda rng, k=keys, i=item: two_models(rng, k, i, 1.2),
            True,
        )
    return made_of


def rates(case: Case, sets: int, seed: int = 0, resamples: int = 1000) -> dict[str, float]:
    """How often each verdict is given."""
    experiment = asked()
    counts: dict[str, int] = {}
    for number in range(sets):
        rng = np.random.default_rng([seed, number, sum(map(ord, case.claim + case.world))])
        (verdict,) = judge(
            [CLAIMS[case.claim]],
            case.draw(rng),
            experiment=experiment,
            resamples=resamples,
            seed=number,
        )
        assert verdict.verdict != "not measured", verdict.reason
        counts[verdict.verdict] = counts.get(verdict.verdict, 0) + 1
    return {name: count / sets for name, count in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=400)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--claim")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    lines = [
        f"{PROMPTS} prompts, {HEADS} heads, {chosen.sets} sets a row, seed {chosen.seed}; per "
        "cent of sets.",
        "",
        "| claim | what is the case | the claim is | supported | contradicted | undetermined |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    for case in cases():
        if chosen.claim not in (None, case.claim):
            continue
        found = rates(case, chosen.sets, chosen.seed)
        shares = [
            f"{100 * found.get(name, 0.0):.1f}"
            for name in ("supported", "contradicted", "undetermined")
        ]
        what = "true" if case.true else "false"
        shares[0] = shares[0] if case.true else f"**{shares[0]}**"
        lines.append(f"| `{case.claim}` | {case.world} | {what} | {' | '.join(shares)} |")
        print(lines[-1], flush=True)
    if chosen.write:
        from pages import put

        put("nulls", lines)


if __name__ == "__main__":
    main()
