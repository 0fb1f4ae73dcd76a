"""How often the claims of recipes are supported when they are false, and when they are true.

    python benchmarks/nulls_recipes.py --sets 100       from the next seed, all worlds
    python benchmarks/nulls_recipes.py --only "50 %"    worlds with this in their name
    python benchmarks/nulls_recipes.py --pages          what was counted, into the page

A set is a run of random numbers with as many layers, heads and prompts as the recipe has on
SmolLM2, judged as the run is. Every claim is about a share of heads or of layers, so the worlds are
populations of these: one in which as many are beyond the bound as the claim has to exceed, and the
others as far on the other side; one in which all are exactly at the bound; for differences one in
which nothing differs; and one in which the claim is true. Scores of needles are counts of tokens
that a model says or does not, and get worlds of their own.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent))  # for those who load this file by its path

from attnscope.recipes import BUNDLED, RECIPES, claims_of
from attnscope.spec.claims import Claim, ClaimPart
from attnscope.stats.verdicts import VERDICTS, judge
from declared import Array, Case, Random, table
from pages import Counts, put

LAYERS, HEADS = 30, 9
SHARED, OWN = 0.2, 0.1
"""How far prompts differ, in all their values alike and in each by itself."""
FILE = Path(__file__).with_name("counts_recipes.json")
PAGE = Path(__file__).parents[1] / "docs" / "recipes" / "README.md"
PAPERS = [name for name in RECIPES if name not in BUNDLED]
PROMPTS = {n: int(signature(RECIPES[n]).parameters["prompts"].default) for n in PAPERS}
RECIPE = {claim: recipe for recipe in PAPERS for claim in claims_of(recipe)}
"""Of every claim its recipe: read once, because a file of claims takes longer than a verdict."""
CLAIMS = {claim.name: claim for claim in RECIPE}
TOKENS, GENERATED = 8, 0.8
"""Tokens of a needle, and the share of needles that is generated."""


def units(part: ClaimPart, of_unit: Array) -> Array:
    """[layers, heads] of what every head, or every layer, has."""
    if part.scope.heads == "each":
        return of_unit.reshape(LAYERS, HEADS)
    return np.repeat(of_unit[:LAYERS, None], HEADS, axis=1)


def beyond(part: ClaimPart, state: str, rng: Random) -> Array:
    """[layers, heads]: by which factor the second is that of the first, or of the threshold."""
    sign = -1 if part.direction == "less" else 1
    bound = (1 + part.comparison.by) ** sign
    far = bound * 1.5**sign
    if state == "equal":
        return np.ones((LAYERS, HEADS))
    if state == "bound":
        return np.full((LAYERS, HEADS), bound)
    share = part.rule.share if state == "share" else min(1.0, 2 * part.rule.share + 0.05)
    return units(part, np.where(rng.random(LAYERS * HEADS) < share, far, bound * 1.5**-sign))


def drawn(claim: Claim, states: list[str], rng: Random) -> pl.DataFrame:
    """A run in which the parts of a claim are as their states say."""
    n = PROMPTS[RECIPE[claim]]
    shape = (n, LAYERS, HEADS)

    def noise() -> Array:
        return np.exp(OWN * rng.normal(size=shape) - OWN**2 / 2)

    shared = np.exp(SHARED * rng.normal(size=(n, 1, 1)) - SHARED**2 / 2)
    first_of: dict[str, Array] = {}
    rows = []
    for part, state in zip(claim.parts, states, strict=True):
        factor, of = beyond(part, state, rng), part.comparison
        columns: dict[str, Any] = {"condition": claim.condition or "base", "uniform": 0.1}
        if part.quantity.measure == "mass":
            columns |= {"item": "token", "classes": "whole"}
        if part.quantity.keys:
            columns["keys"] = part.quantity.keys
        if of.over is None:
            value = float(of.threshold or 0) * factor * shared * noise()
            rows.append(table(part.quantity.measure, value, **columns))
            continue
        assert of.pair is not None
        a, b = (str(side) for side in of.pair)
        if a not in first_of:
            first_of[a] = 0.1 * shared * noise()
            rows.append(table(part.quantity.measure, first_of[a], **{**columns, of.over: a}))
        second = 0.1 * factor * shared * noise()
        rows.append(table(part.quantity.measure, second, **{**columns, of.over: b}))
    return pl.concat(rows)


def needles(rng: Random, chance: Array) -> pl.DataFrame:
    """Scores of a model that generates some of the needles. A head attends to each token of a
    generated needle with its chance; a needle that is not generated has no score."""
    n = PROMPTS["needle"]
    generated = rng.random((n, 1, 1)) < GENERATED
    hits = rng.binomial(TOKENS, np.broadcast_to(chance, (n, LAYERS, HEADS)))
    return table("retrieval", generated * hits / TOKENS, condition="base", keys="answer")


def cases() -> list[Case]:
    """The worlds of every claim."""
    made = [one for claim in CLAIMS.values() for one in _declared(claim)]
    needle = CLAIMS["needle"]
    above, below = 0.5 / GENERATED, 0.05 / GENERATED

    def population(share: float) -> Callable[[Random], pl.DataFrame]:
        def draw(rng: Random) -> pl.DataFrame:
            far = rng.random((LAYERS, HEADS)) < share
            return needles(rng, np.where(far, above, below))

        return draw

    made += [
        Case(needle, "needles: 1 % of heads copy 0.5, others 0.05", False, population(0.01)),
        Case(
            needle,
            "needles: every head copies a tenth",
            False,
            lambda rng: needles(rng, np.array(0.1 / GENERATED)),
        ),
        Case(needle, "needles: 7 % of heads copy 0.5, others 0.05", True, population(0.07)),
    ]
    return made


def _declared(claim: Claim) -> Iterator[Case]:
    def case(world: str, true: bool, states: list[str]) -> Case:
        return Case(claim, world, true, lambda rng: drawn(claim, states, rng))

    several = len(claim.parts)
    yield case("true", True, ["true"] * several)
    if any(part.comparison.over for part in claim.parts):
        yield case("nothing differs", False, ["equal"] * several)
    for number, part in enumerate(claim.parts):
        which = f", part {number + 1}" if several > 1 else ""
        what = "heads" if part.scope.heads == "each" else "layers"
        for state, world in (
            ("share", f"{100 * part.rule.share:g} % of {what} beyond, the rest far below"),
            ("bound", f"all {what} exactly at the bound"),
        ):
            states = [state if at == number else "true" for at in range(several)]
            yield case(f"{world}{which}", False, states)


def verdicts(case: Case, sets: int, seed: int = 0, resamples: int = 500) -> list[str]:
    """The verdict on each of so many sets."""
    found = []
    for number in range(sets):
        rng = np.random.default_rng([seed, number, sum(map(ord, case.claim.name + case.world))])
        (verdict,) = judge([case.claim], case.draw(rng), resamples=resamples, seed=number)
        assert verdict.verdict != "not measured", verdict.reason
        found.append(verdict.verdict)
    return found


def chance(rows: int, share: float) -> str:
    """How many of so many heads or layers have to be beyond, and how often they are by chance where
    each is with the chance that has to be exceeded: what a rate below comes to with many sets."""
    least = next(k for k in range(1, rows + 1) if stats.beta.ppf(0.05, k, rows - k + 1) > share)
    return f"{least} of {rows}, {100 * stats.binom.sf(least - 1, rows, share):.1f} %"


def lines(every: list[Case], counts: Counts) -> list[str]:
    """The table, of all seeds."""
    lines_of_page = [
        f"{LAYERS} layers, {HEADS} heads, as many prompts as the recipe has; seeds "
        f"{counts.seeds_text}; "
        "per cent of sets, ± one standard error.",
        "",
        "Where every head or layer is beyond with exactly the chance that has to be exceeded, a "
        "vote is lost or won by how many there happen to be. Needed, and how often that happens: "
        f"half of the layers {chance(LAYERS, 0.5)}; half of the heads "
        f"{chance(LAYERS * HEADS, 0.5)}; 1 % of the heads {chance(LAYERS * HEADS, 0.01)}. Rows "
        "whose rate might have been above 5 % after 400 sets were given more.",
        "",
        "| claim | what is the case | the claim is | sets | supported | contradicted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case in every:
        row = f"{case.claim.name}: {case.world}"
        n, share, error = counts.all(row, "supported")
        if n:
            mark = "" if case.true else "**"
            lines_of_page.append(
                f"| `{case.claim.name}` | {case.world} | {'true' if case.true else 'false'} | {n} "
                f"| {mark}{share:.1f}{mark} ± {error:.1f} "
                f"| {counts.all(row, 'contradicted')[1]:.1f} |"
            )
    return lines_of_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=100, help="by seed")
    parser.add_argument("--seed", type=int, help="else the next")
    parser.add_argument("--only", default="", help="worlds with this in their name")
    parser.add_argument("--pages", action="store_true", help="no simulation; write the table")
    given = parser.parse_args()
    every, counts = cases(), Counts("recipes", FILE)
    if given.pages:
        put("nulls", lines(every, counts), PAGE)
        return
    seed = max(map(int, counts.seeds), default=0) + 1 if given.seed is None else given.seed

    def counted() -> Iterator[tuple[str, str, Any]]:
        for case in (case for case in every if given.only in case.world):
            found = np.array(verdicts(case, given.sets, seed))
            for name in VERDICTS[:3]:
                yield f"{case.claim.name}: {case.world}", name, found == name

    counts.keep(seed, counted())
    print("\n".join(lines(every, counts)))


if __name__ == "__main__":
    main()
