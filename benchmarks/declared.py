"""The worlds that follow from a claim's declaration: in one of them it is true, in the others one
of its parts is exactly at what it has to exceed, or its heads are of either sign, or nothing
differs.

A world is a level for every value that the claim is about; a run is drawn around it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from attnscope.measures.registry import COLUMNS
from attnscope.run.schemas import VALUES
from attnscope.spec.claims import Claim, ClaimPart
from attnscope.spec.experiment import Experiment, make_experiment
from attnscope.stats.evidence import item_of, measures

PROMPTS, HEADS = 24, 8
SHARED, OWN = 0.2, 0.05
"""How far prompts differ, in all their values alike and in each by itself."""
Array = np.ndarray[Any, np.dtype[np.float64]]
Random = np.random.Generator
Key = tuple[str, str, str, int, str | None]
"""Measure, model, condition, layer, item."""


@dataclass(frozen=True)
class Case:
    """A way the world may be, in which a claim is false or true."""

    claim: Claim
    world: str
    true: bool
    draw: Callable[[Random], pl.DataFrame]


def declared(claim: Claim) -> Iterator[Case]:
    """The worlds of a claim."""

    def case(world: str, true: bool, states: list[str]) -> Case:
        return Case(claim, world, true, lambda rng: drawn(claim, states, rng))

    true = ["true"] * len(claim.parts)
    yield case("by half as much again as it asks for", True, true)
    if any(part.comparison.over and not part.rule.bounds for part in claim.parts):
        yield case("nothing differs", False, ["equal"] * len(claim.parts))
    for number, part in enumerate(claim.parts):
        states = ["bound"] if part.rule.bounds or not votes(part) else ["bound", "either sign"]
        for state in states:
            yield case(
                f"{describe(part)}: {WORDS[state]}",
                False,
                [state if at == number else "true" for at in range(len(claim.parts))],
            )


WORDS = {"bound": "so much and no more", "either sign": "heads of either sign"}


def votes(part: ClaimPart) -> bool:
    """Whether the heads of a part are a sample of heads."""
    return part.rule.share_of == "population" and part.scope.heads == "each"


def describe(part: ClaimPart) -> str:
    """What a part asks for, in short."""
    against: tuple[Any, ...] = part.comparison.pair or ("the first",)
    if part.comparison.over is None:
        against = (f"{part.comparison.threshold:g}",)
    if part.rule.bounds:
        return (
            f"`{part.quantity.measure}` within {part.rule.bounds[0]:g} to {part.rule.bounds[1]:g}"
        )
    by = f" by {part.comparison.by:g}" if part.comparison.by else ""
    over = part.comparison.over if part.comparison.over in ("layer", "item") else None
    of = f" of {over} {against[1]}" if over else ""
    return f"`{part.quantity.measure}`{of} {part.direction}{by} than {against[0]}"


def condition_of(selector: str) -> str:
    """A condition's name, for how a claim speaks of it."""
    return "repeat" if selector == "variant" else selector.removeprefix("kind:")


def default_of(claim: Claim) -> str:
    """The condition of what is not compared over conditions."""
    of_pairs = all(COLUMNS[m].compares_to_base for part in claim.parts for m in measures(part))
    return condition_of(claim.condition or ("variant" if of_pairs else "base"))


def sides(claim: Claim, part: ClaimPart) -> list[tuple[Key | float, Key]]:
    """What a part compares: the first of a pair, or a threshold, and the second."""
    over, pair = part.comparison.over, part.comparison.pair
    item = item_of(part) or ("+".join(part.quantity.item) if part.quantity.item else None)
    own = {"measure": part.quantity.measure, "model": "one", "condition": default_of(claim)}
    layers = part.scope.layers if isinstance(part.scope.layers, tuple) else (0,)
    both = []
    for layer in layers if over != "layer" else (0,):
        two = []
        for at, side in enumerate(pair or ("one", "two")):
            place: dict[str, Any] = {**own, "layer": layer, "item": item}
            if over is not None:
                place[over] = condition_of(str(side)) if over == "condition" else side
            two.append(tuple(place.values()))
            if over is None and at == 0:
                two[0] = float(part.comparison.threshold or 0.0)
        both.append((two[0], two[1]))
    return both


def level(part: ClaimPart, first: Array, state: str, rng: Random) -> Array:
    """What the second is, in each head."""
    sign = -1 if part.direction == "less" else 1
    ratio, by = part.comparison.scale == "ratio", part.comparison.by
    if state == "equal":
        return first
    if part.rule.bounds is not None:
        low, high = part.rule.bounds
        centre = np.sqrt(low * high) if ratio else (low + high) / 2
        to = high if state == "bound" else centre
        return first * to if ratio else first + to
    bound = first * (1 + by) ** sign if ratio else first + sign * by
    if state == "bound":
        return np.asarray(bound)
    beyond = bound * 1.5**sign if ratio else bound + sign * np.abs(first) / 2
    if state == "true":
        return np.asarray(beyond)
    other = first**2 / beyond if ratio else 2 * first - beyond
    return np.where(rng.random(HEADS) < part.rule.share, beyond, other)


def drawn(claim: Claim, states: list[str], rng: Random) -> pl.DataFrame:
    """A run: levels in which the parts are as their states say, the false one set last."""
    levels: dict[Key, Array] = {}
    parts = list(zip(claim.parts, states, strict=True))
    for part, state in sorted(parts, key=lambda two: two[1] != "true"):
        for first, second in sides(claim, part):
            if isinstance(first, float):
                if first <= 0:
                    raise ValueError(f"{claim.name}: a threshold of 0 needs worlds of its own")
                before = np.full(HEADS, first)
                if part.comparison.scale == "ratio":  # what has this mean of logarithms
                    before = before * np.exp((SHARED**2 + OWN**2) / 2)
            else:
                before = levels.setdefault(first, np.ones(HEADS))
            levels[second] = level(part, before, state, rng)
    alike = np.exp(SHARED * rng.normal(size=(PROMPTS, HEADS)) - SHARED**2 / 2)
    quantity = {m: part.quantity for part in claim.parts for m in measures(part)}
    made_of = []
    for (measure, model, condition, layer, item), mean in levels.items():
        value = mean * alike * np.exp(OWN * rng.normal(size=alike.shape) - OWN**2 / 2)
        if COLUMNS[measure].level == "layer":
            value = value[:, :1]
        about, classes = quantity[measure], "classes" in COLUMNS[measure].per
        names = [item] if not classes else (item or "all").split("+")
        made_of += [
            table(
                measure,
                value[:, None] / (len(names) if measure == "mass" else 1),
                model=model,
                condition=condition,
                item=name,
                first_layer=layer,
                whole=COLUMNS[measure].level == "layer",
                keys=about.keys or "all",
                queries=about.queries or "all",
                classes=(about.classes or "default") if classes else None,
                uniform=0.1,
            )
            for name in names
        ]
    return pl.concat(made_of)


def asked(claim: Claim) -> Experiment:
    """The experiment that has what a claim is about."""
    found = [key for part in claim.parts for two in sides(claim, part) for key in two]
    names = dict.fromkeys(["base", *(key[2] for key in found if isinstance(key, tuple))])
    models = dict.fromkeys(key[1] for key in found if isinstance(key, tuple))
    quantities = [part.quantity for part in claim.parts]
    return make_experiment(
        name="made",
        models={name: name for name in models},
        prompts={"source": "math", "count": PROMPTS},
        conditions={
            name: {} if name == "base" else {"insert": {"kind": name, "count": 20}}
            for name in names
        },
        queries=list(dict.fromkeys(q.queries or "all" for q in quantities)),
        keys=list(dict.fromkeys(q.keys or "all" for q in quantities)),
    )


def table(
    measure: str,
    value: Array,
    *,
    model: str = "one",
    condition: str = "repeat",
    item: str | None = None,
    first_layer: int = 0,
    whole: bool = False,
    **columns: Any,
) -> pl.DataFrame:
    """Values [prompts, layers, heads] as a run has them; of `whole` layers there is no head."""
    prompt, layer, head = np.indices(value.shape).reshape(3, -1)
    known: dict[str, Any] = {
        **{"model": model, "condition": condition, "queries": "all", "keys": "all"},
        **{"measure": measure, "item": item, "tokens": 40.0},
        **columns,
        **{"prompt": prompt, "layer": layer + first_layer, "head": None if whole else head},
    }
    frame = pl.DataFrame({"value": value.reshape(-1)}).with_columns(
        pl.Series(name, what) if isinstance(what, np.ndarray) else pl.lit(what).alias(name)
        for name, what in ({**dict.fromkeys(set(VALUES.names()) - {"value"}), **known}).items()
    )
    return frame.select(VALUES.names()).cast(dict(VALUES))  # type: ignore[arg-type]
