"""The numbers of a card, from its runs: of the model, of every layer and of every head.

A card is plain data, so that it can be stored as JSON and compared with another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

import attnscope
from attnscope.card.experiments import HEAD_PROMPTS, NEW_TOKENS, digest_of_texts, texts
from attnscope.figures.head_types import classify_heads
from attnscope.figures.head_types import summary as type_summary
from attnscope.figures.summary import summary
from attnscope.measures.measure import POSITIVE, SHARE, Range
from attnscope.recipes.heads import head_scores
from attnscope.recipes.sinks import SINK
from attnscope.run.tables import combine
from attnscope.stats.means import one_sample

if TYPE_CHECKING:
    from attnscope.run.store import Run

Card = dict[str, Any]
CLASSES, GENERATED = "Attention by token class", "Attention of generated tokens"
"""Groups of numbers whose parts add up to 1 with the first token."""
FORMAT = "attnscope card 1"
LARGEST = "largest value of the residual stream"
OTHERS = "other classes"
"""Token classes that at most half of the texts have tokens of."""
RATIO = "log10_residual_ratio"
"""The measure `residual_ratio` on a scale of powers of ten."""
MODEL_KEYS = (
    *("name", "revision", "architecture", "layers", "heads", "kv_heads", "parameters"),
    *("dtype", "device", "bundled"),
)


def make_card(runs: Mapping[str, Run]) -> Card:
    """The card of one model, from the runs of `card_experiments`."""
    text, completion = runs["text"], runs["completion"]
    (label,) = text.experiment.models
    about = text.environment["models"][label]
    layers = pl.concat([_depth(text), _budget(text), _of_completions(completion)])
    types = classify_heads(head_scores(runs))
    distance = _means(_rows(text, "distance"), ["layer", "head"], POSITIVE)
    heads = types.join(
        distance.select(
            pl.col("layer", "head").cast(pl.Int64),
            pl.col("value", "low", "high").name.prefix("distance_"),
        ),
        on=["layer", "head"],
        how="left",
    ).rename({"distance_value": "distance"})
    return {
        "format": FORMAT,
        "attnscope": attnscope.__version__,
        "label": label,
        "model": {key: about.get(key) for key in MODEL_KEYS},
        "settings": {
            "bos": text.experiment.bos,
            "texts": digest_of_texts(),
            "names": [one["name"] for one in texts()],
            "tokens": text.cells.sort("prompt")["tokens"].to_list(),
            "new_tokens": NEW_TOKENS,
            "head_prompts": HEAD_PROMPTS,
        },
        "numbers": [*_of_texts(text), *_generated_numbers(completion)],
        "types": type_summary(types).drop("what").to_dicts(),
        "layers": layers.fill_nan(None).to_dicts(),
        "heads": heads.fill_nan(None).to_dicts(),
    }


def _rows(run: Run, measure: str, **where: str) -> pl.DataFrame:
    """The values of a measure; `where` are values of columns."""
    chosen = [pl.col(column) == value for column, value in where.items()]
    return run.values.filter(pl.col("measure") == measure, *chosen).collect()


def _means(rows: pl.DataFrame, by: list[str], within: Range) -> pl.DataFrame:
    """Mean over texts with its interval and n."""
    defined = rows.filter(pl.col("value").is_not_nan() & pl.col("value").is_not_null())
    return summary(defined, by=by, within=within).rename({"mean": "value"})


def _per_layer(table: str, series: str, rows: pl.DataFrame, within: Range) -> pl.DataFrame:
    """Means over heads of every layer, for one line of a figure."""
    layer = pl.col("layer").cast(pl.Int64)
    return _means(rows, ["layer"], within).select(
        pl.lit(table).alias("table"), pl.lit(series).alias("series"), layer, *_SHOWN
    )


_SHOWN = ("value", "low", "high", "n")


def _depth(run: Run) -> pl.DataFrame:
    """First-token mass, massive activations, entropy and distance of every layer."""
    ratio = _rows(run, "residual_ratio").with_columns(pl.col("value").log10())
    return pl.concat(
        [
            _per_layer("depth", "first_token", _heads_mean(_rows(run, "first_token")), SHARE),
            _per_layer("depth", RATIO, ratio, POSITIVE),
            _per_layer("depth", "entropy", _heads_mean(_rows(run, "entropy")), POSITIVE),
            _per_layer("depth", "distance", _heads_mean(_rows(run, "distance")), POSITIVE),
        ]
    )


def _heads_mean(rows: pl.DataFrame) -> pl.DataFrame:
    return combine(rows, "mean")


def _budget(run: Run) -> pl.DataFrame:
    parts = pl.concat([_per_layer("classes", name, rows, SHARE) for name, rows in _classes(run)])
    # Few texts have tokens of the other classes, so their interval would cover the figure.
    none = pl.when(pl.col("series") != OTHERS)
    return parts.with_columns(none.then("low").alias("low"), none.then("high").alias("high"))


def _classes(run: Run) -> Iterator[tuple[str, pl.DataFrame]]:
    """The parts of the attention: first token, learned sinks where there are any, every class that
    more than half of the texts have tokens of, and the other classes. They add up to 1."""
    yield "first token", _heads_mean(_rows(run, "first_token"))
    sinks = _heads_mean(_rows(run, "learned_sink_mass"))
    if (sinks["value"] > 0).any():
        yield "learned sink", sinks
    mass, few = _heads_mean(_rows(run, "mass")), []
    for (name,), rows in mass.group_by("item", maintain_order=True):
        if 2 * rows.filter(pl.col("tokens") > 0)["prompt"].n_unique() > len(texts()):
            yield str(name), rows
        else:
            few.append(rows)
    if few:
        sums = pl.col("value", "uniform").sum()
        yield OTHERS, pl.concat(few).group_by("prompt", "layer", maintain_order=True).agg(sums)


def _parts(run: Run) -> dict[str, pl.DataFrame]:
    """Where the attention of generated tokens goes, by part, with heads combined."""
    keys = ["prompt", "layer"]
    first, itself = _rows(run, "first_token"), _rows(run, "self_mass")
    every, new = (_rows(run, "mass", keys=keys) for keys in ("all", "generated"))
    values = {
        name: _heads_mean(rows).select(*keys, pl.col("value").alias(name))
        for name, rows in {"all": every, "new": new, "first": first, "self": itself}.items()
    }
    table = values["all"]
    for name in ("new", "first", "self"):
        table = table.join(values[name], on=keys, how="left")
    parts = {
        "first token": pl.col("first"),
        "rest of the prompt": pl.col("all") - pl.col("new") - pl.col("first"),
        "earlier generated tokens": pl.col("new") - pl.col("self"),
        "the token itself": pl.col("self"),
    }
    return {
        # Differences of float32 sums may be a little below 0.
        name: table.select(*keys, part.clip(0.0, 1.0).alias("value"))
        for name, part in parts.items()
    }


def _of_completions(run: Run) -> pl.DataFrame:
    layers = [_per_layer("generated", name, rows, SHARE) for name, rows in _parts(run).items()]
    return pl.concat(layers)


def _number(
    group: str, name: str, rows: pl.DataFrame, within: Range, how: str = "mean", digits: int = 3
) -> dict[str, Any]:
    """A number of the model: one value per text over all layers and heads, and their mean."""
    value: pl.Expr = getattr(pl.col("value"), how)()
    table = rows.group_by("prompt").agg(value).sort("prompt")
    known = np.array(table["value"].fill_null(np.nan), dtype=float)
    values = np.full(len(texts()), np.nan)
    values[table["prompt"].to_numpy()] = known
    tested = one_sample(values[:, None], within=within)
    low, high = (float(end[0]) for end in tested.interval())
    return {
        "group": group,
        "name": name,
        "value": float(tested.estimate[0]),
        "low": _finite(low),
        "high": _finite(high),
        "n": int((~np.isnan(values)).sum()),
        "range": [_finite(end) for end in within],
        "digits": digits,
        "values": [_finite(float(one)) for one in values],
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _of_texts(run: Run) -> Iterator[dict[str, Any]]:
    first = _rows(run, "first_token")
    is_sink = first.with_columns((pl.col("value") > SINK).cast(pl.Float64).alias("value"))
    yield _number("Attention sink", "mass on the first token", first, SHARE)
    yield _number("Attention sink", f"share of heads with more than {SINK:g} on it", is_sink, SHARE)
    residual, ratio = _rows(run, "residual_largest"), _rows(run, "residual_ratio")
    yield _number("Massive activations", LARGEST, residual, POSITIVE, "max", 0)
    yield _number("Massive activations", f"{LARGEST}, over the median", ratio, POSITIVE, "max", 0)
    yield _number("Spread", "entropy (nats)", _rows(run, "entropy"), POSITIVE, digits=2)
    yield _number("Spread", "distance (tokens)", _rows(run, "distance"), POSITIVE, digits=1)
    for name, rows in _classes(run):
        if name != "first token":
            uniform = rows["uniform"].mean() if "uniform" in rows.columns else None
            one = _number(CLASSES, name, rows, SHARE) | {"uniform": uniform}
            yield one | ({"low": None, "high": None} if name == OTHERS else {})


def _generated_numbers(run: Run) -> Iterator[dict[str, Any]]:
    for name, rows in _parts(run).items():
        yield _number(GENERATED, name, rows, SHARE)
