"""Runs made up from a seed: plausible tables in the layout of docs/runs.md, without any model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from attnscope.measures.activations import HISTOGRAM
from attnscope.measures.residual import RESIDUAL
from attnscope.measures.top_share import TOP_SHARE
from attnscope.recipes import built_in_claims
from attnscope.run.schemas import BY_QUERY, CELLS, COMPLETIONS, POSITIONS, TOKENS, VALUES
from attnscope.run.writer import open_directory
from attnscope.spec.claims import Claim, frozen
from attnscope.spec.experiment import Experiment, make_experiment

CLASSES = ("hash", "star", "whitespace", "word", "other")


@dataclass(frozen=True)
class MadeRun:
    """What `attnscope.open_run` gives, from memory."""

    values: pl.LazyFrame
    positions: pl.LazyFrame
    tokens: pl.LazyFrame
    cells: pl.DataFrame
    experiment: Experiment
    environment: Mapping[str, Any]
    complete: bool = True
    prompts: pl.DataFrame | None = None
    elsewhere: Sequence[Mapping[str, Any]] = ()
    claims: Sequence[Claim] = ()
    completions: pl.DataFrame = field(default_factory=COMPLETIONS.to_frame)
    by_query: pl.LazyFrame = field(default_factory=lambda: BY_QUERY.to_frame().lazy())
    path: Path = Path("made-in-memory")
    image_tokens: Sequence[Mapping[str, Any]] = ()

    def verify(self) -> None:
        """What is in memory is not damaged."""


def made_run(
    *,
    models: Sequence[str] = ("spatial-phys", "spatial-base"),
    prompts: int = 12,
    layers: Sequence[int] = (0, 1, 2, 3),
    heads: int = 4,
    conditions: Mapping[str, int] = {"base": 0},
    classes: Sequence[str] = CLASSES,
    measures: Sequence[str] = ("mass", "flow", "entropy", "first_token"),
    length: int = 40,
    profile_heads: Sequence[int] = (),
    profile_layers: Sequence[int] = (0,),
    bundled: bool = True,
    texts: Sequence[str] | None = None,
    seed: int = 0,
    keys: Sequence[str] = ("all",),
    picture: bool = False,
) -> MadeRun:
    """`conditions` maps a name to the number of filler tokens; `base` has none. With `picture`,
    tokens 1 to 6 are those of a picture."""
    random = np.random.default_rng(seed)
    values: list[dict[str, Any]] = []
    positions: list[pl.DataFrame] = []
    by_query: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    answered = "log_self_mass" in measures
    effect = random.normal(0, 0.3, (len(models), len(layers), heads, len(classes)))
    for m, model in enumerate(models):
        for prompt in range(prompts):
            of_prompt = random.normal(0, 0.15, len(classes))
            for condition, filler in conditions.items():
                where = {"model": model, "prompt": prompt, "condition": condition}
                boundary = 2 if filler else 0
                total = length + filler + boundary
                cells.append(
                    where
                    | {
                        "cell": f"{m}-{prompt}-{condition}",
                        "tokens": total,
                        "filler_tokens": filler,
                        "boundary_tokens": boundary,
                        "base_boundary_tokens": 0,
                        "generated_tokens": 0,
                        "generated": "The answer is 1." if answered else None,
                    }
                )
                tokens += _tokens(where, length, filler, classes, texts)
                for at, layer in enumerate(layers):
                    for head in range(heads):
                        row = where | {
                            "queries": "all",
                            "keys": "all",
                            "layer": layer,
                            "head": head,
                        }
                        logits = effect[m, at, head] + of_prompt
                        mass = np.exp(logits + random.normal(0, 0.1, len(classes)))
                        mass /= mass.sum()
                        values += _values(row, mass, classes, measures, filler, random)
                        if "query_mass" in measures:
                            by_query += _by_query(row, mass, classes, total)
                        for other in keys[1:]:
                            again = ("mass", "step_mass")
                            alone = [m for m in measures if m in again]
                            values += _values(
                                row | {"keys": other}, mass, classes, alone, 0, random
                            )
                    of_layer = where | {"queries": "all", "keys": "all", "layer": layer}
                    values += _activations(of_layer, classes, measures, random)
                    if layer in profile_layers:
                        for head in profile_heads:
                            row = where | {"queries": "all", "layer": layer, "head": head}
                            positions.append(_profile(row, length, filler, seed + head + 7 * m))
    kinds = {c: "sentence" if "sentence" in c else "repeat" for c, k in conditions.items() if k}
    experiment = make_experiment(
        name="made",
        models={m: f"zoo:{m}" for m in models},
        prompts={"source": "spatial", "count": prompts, "seed": seed},
        keys=list(keys),
        conditions={
            c: {"insert": {"kind": kinds[c], "count": k}} if k else {}
            for c, k in conditions.items()
        },
    )
    about = {
        "revision": "abc",
        "architecture": "LlamaForCausalLM",
        "layers": max(layers) + 1,
        "heads": heads,
        "kv_heads": heads,
        "parameters": 123_456,
        "dtype": "float32",
        "device": "cpu",
        "backend": "streaming",
        "bundled": bundled,
    }
    environment = {
        "python": "3.12",
        "torch": "2.13.0",
        "models": {m: {"name": f"zoo:{m}"} | about for m in models},
    }
    return MadeRun(
        values=pl.DataFrame(values, schema=VALUES).lazy(),
        by_query=pl.DataFrame(by_query, schema=BY_QUERY).lazy(),
        positions=(pl.concat(positions) if positions else pl.DataFrame(schema=POSITIONS)).lazy(),
        tokens=pl.DataFrame(tokens, schema=TOKENS).lazy(),
        cells=pl.DataFrame(cells, schema=CELLS),
        experiment=experiment,
        environment=environment,
        image_tokens=[
            _picture(row["model"], row["prompt"], row["condition"]) for row in cells if picture
        ],
        prompts=pl.DataFrame(
            {
                "prompt": range(prompts),
                "depth": [p % 3 / 2 for p in range(prompts)],
                "length": [100 * (1 + p % 2) for p in range(prompts)],
                **({"answer": [str(p % 2) for p in range(prompts)]} if answered else {}),
            },
            schema_overrides={"prompt": pl.Int32},
        ),
    )


def _picture(model: str, prompt: int, condition: str) -> dict[str, Any]:
    """A picture of 2 × 3 tokens."""
    return {
        **{"model": model, "prompt": prompt, "condition": condition, "image": 1},
        **{"file": "images/none.png", "blank": False, "height": 40, "width": 60},
        **{"assumed": False, "positions": list(range(1, 7))},
        "views": [[2, 3, [0.0, 0.0, 1.0, 1.0], False]],
    }


def _by_query(
    row: dict[str, Any], mass: Any, classes: Sequence[str], total: int
) -> list[dict[str, Any]]:
    """The mass of every class in every eighth query."""
    return [
        row
        | {"classes": "default", "measure": "query_mass", "item": name, "position": position}
        | {"count": 1, "value": float(np.float32(mass[i] / (1 + position)))}
        for position in range(0, total, 8)
        for i, name in enumerate(classes)
    ]


def _values(
    row: dict[str, Any],
    mass: Any,
    classes: Sequence[str],
    measures: Sequence[str],
    filler: int,
    random: np.random.Generator,
) -> list[dict[str, Any]]:
    made = []
    if "mass" in measures:
        for i, name in enumerate(classes):
            made.append(
                row
                | {"classes": "default", "measure": "mass", "item": name, "value": float(mass[i])}
                | {"uniform": (i + 1) / sum(range(1, len(classes) + 1)), "tokens": 3.0 * i + 2}
            )
    if "flow" in measures:
        for i, a in enumerate(classes):
            to = np.roll(mass, i)
            for j, b in enumerate(classes):
                made.append(
                    row
                    | {"classes": "default", "measure": "flow", "item": a, "target": b}
                    | {"value": float(to[j])}
                )
    if "step_mass" in measures:
        for step in range(1, 4):
            for i, name in enumerate(classes):
                made.append(
                    row
                    | {"classes": "default", "measure": "step_mass", "item": name}
                    | {"target": str(step), "value": float(mass[i]) / step}
                )
    for measure in ("entropy", "first_token", "self_mass", "distance", "learned_sink_mass"):
        if measure in measures:
            value = float(random.uniform(0.5, 3) if measure != "first_token" else mass[0])
            made.append(row | {"measure": measure, "value": value})
    if "top_share" in measures:
        for item in TOP_SHARE.items:
            value = float(item) ** float(random.uniform(0.2, 0.4))
            uniform = float(item) * (1 - np.log(float(item)))
            of = {"measure": "top_share", "item": item, "value": value, "uniform": uniform}
            made.append(row | of)
    for measure in ("log_self_mass", "laplacian", "lookback_per_token"):
        if measure in measures:
            item = "1" if measure == "laplacian" else None
            value = float(random.uniform(-1, 0)) if measure == "log_self_mass" else float(mass[0])
            made.append(row | {"measure": measure, "item": item, "value": value})
    if "max_logit" in measures:
        made.append(row | {"measure": "max_logit", "value": float(8 + 10 * mass[0])})
    if filler:
        for measure in ("lambda", "lambda_ratio", "uniformity"):
            if measure in measures:
                value = float(np.exp(-filler / 120) + 0.04 * row["layer"] + random.normal(0, 0.02))
                made.append(row | {"measure": measure, "value": value, "tokens": 30.0})
    return made


def _activations(
    row: dict[str, Any], classes: Sequence[str], measures: Sequence[str], random: Any
) -> list[dict[str, Any]]:
    """Numbers of the whole layer."""
    made = []
    if "class_near_zero" in measures:
        of = row | {"classes": "default", "measure": "class_near_zero"}
        made += [of | {"item": name, "value": float(random.uniform(0, 1))} for name in classes]
    if "activation_histogram" in measures:
        shares = random.dirichlet(np.ones(len(HISTOGRAM.items) + 1))
        made += [
            row | {"measure": "activation_histogram", "item": item, "value": float(share)}
            for item, share in zip(HISTOGRAM.items, shares[1:], strict=True)
        ]
    of_layers = ("near_zero", "activation_l1", "activation_l2", "activation_variance")
    for measure in (*of_layers, *RESIDUAL.columns):
        if measure in measures:
            made.append(row | {"measure": measure, "value": float(random.uniform(0.5, 1))})
    return made


def _tokens(
    where: dict[str, Any],
    length: int,
    filler: int,
    classes: Sequence[str],
    texts: Sequence[str] | None,
) -> list[dict[str, Any]]:
    spread = texts or ("The", " sky", " is", " #", " *", " ", "blue", "\n", ".", " why")
    cut = length // 3
    made = []
    boundary = 1 if filler else 0
    roles = (
        [("text", i) for i in range(cut)]
        + [("boundary", None)] * boundary
        + [("filler", None)] * filler
        + [("boundary", None)] * boundary
        + [("text", i) for i in range(cut, length)]
    )
    for position, (role, aligned) in enumerate(roles):
        text = (
            "/"
            if role == "filler"
            else "\n"
            if role == "boundary"
            else spread[aligned % len(spread)]
        )
        made.append(
            where
            | {
                "position": position,
                "id": position % 97,
                "text": text,
                "aligned_position": aligned,
                "role": role,
            }
            | {"class": classes[position % len(classes)], "regions": ["question"]}
        )
    return made


def _profile(row: dict[str, Any], length: int, filler: int, seed: int) -> pl.DataFrame:
    random = np.random.default_rng([seed, row["prompt"]])
    base = random.gamma(0.6, 0.03, length)
    cut = length // 3
    noise = np.random.default_rng([seed, filler]).normal(1, 0.05, length)
    if filler:
        old = base * np.exp(-filler / 120) * noise
        inserted = np.full(filler, 0.012)
        if "sentence" in row["condition"]:
            inserted = random.gamma(0.8, 0.02, filler)
        average = np.concatenate([old[:cut], [0.01], inserted, [0.01], old[cut:]])
    else:
        average = base
    average[-1] = np.nan
    total = len(average)
    columns = {k: [v] * total for k, v in row.items()}
    frame = pl.DataFrame(
        columns
        | {
            "position": np.arange(total),
            "average": average,
            "received": average * np.arange(total)[::-1],
        }
    )
    return frame.with_columns(pl.col("average", "received").fill_nan(None)).cast(dict(POSITIONS))


BATCH = "0123456789abcdef01234567"
"""The one batch that a made run has."""


def write_run(run: MadeRun, folder: Path) -> Path:
    """The run as a directory."""
    tables = {"values": run.values.collect(), "tokens": run.tokens.collect()}
    positions = run.positions.collect()
    if not positions.is_empty():
        tables["positions"] = positions
    if not run.by_query.collect().is_empty():
        tables["by_query"] = run.by_query.collect()
    with open_directory(folder, run.experiment) as directory:
        about = {
            "threads": 1,
            "claims": frozen([*built_in_claims(), *run.claims]),
            **run.environment,
        }
        directory.write_json("environment.json", about)
        directory.keep_claims(run.claims)
        directory.write_lines("metadata.jsonl", [{} for _ in run.cells["prompt"].unique()])
        directory.write_batch(BATCH, [list(row) for row in run.cells.rows()], tables)
        directory.finish(run.experiment, [BATCH])
    return folder
