"""The rows of a run once more: plain transformers, eager attention, a few lines of numpy.

Uses the package for nothing but reading the run. Every row must be accounted for.
"""

from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl
import torch
from transformers import AutoModelForCausalLM

Array = np.ndarray[Any, Any]
# Two ways to the same float32 numbers. Largest seen: 3.1e-6 of a row's value (or of 1), and 5.4e-6
# of an average or of what a key received, whatever its size.
TOLERANCE = 2e-5


@lru_cache(maxsize=1)
def eager(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def dense(folder: str, ids: list[int]) -> tuple[list[Array], list[tuple[Array, Array, Array]]]:
    """Of every layer the weights [H, n, n], as eager attention says; and its value vectors
    [key/value heads, n, size] and attention outputs: [n, hidden] after the output projection, and
    [n, heads · size] before it."""
    model = eager(folder)
    found: list[list[Array]] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        found[-1] += [output[0].double().numpy(), args[0][0].double().numpy()]

    with ExitStack() as undo, torch.no_grad():
        for layer in model.model.layers:
            for module, hook in (
                (layer.self_attn.v_proj, lambda *a: (found.append([]), keep(*a))[1]),
                (layer.self_attn.o_proj, keep),
            ):
                undo.callback(module.register_forward_hook(hook).remove)
        weights = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    heads = model.config.num_key_value_heads
    made = [(v.reshape(len(v), heads, -1).transpose(1, 0, 2), o, i) for v, _, o, i in found]
    return [_shown(layer[0], n, model.config) for n, layer in enumerate(weights)], made


def _shown(weights: torch.Tensor, layer: int, config: Any) -> Array:
    """Weights [H, n, n] that are above 0 for every visible key.

    Large scores round weights to 0, and the functions below derive visibility from them.
    """
    A: Array = weights.double().numpy()
    back = np.arange(A.shape[1])[:, None] - np.arange(A.shape[2])
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * (layer + 1)
    window = config.sliding_window if kinds[layer] == "sliding_attention" else A.shape[2]
    return np.where((A == 0) & (back >= 0) & (back < window), 1e-300, A)


def of_activations(row: dict[str, Any], new: Any, old: Any, cell: Any) -> float:
    """The expected value of a row about value vectors or attention outputs."""
    if row["measure"] == "value_similarity":
        vectors = new[row["layer"]][0][row["head"]][(cell["role"] == "filler").to_numpy()]
        assert row["tokens"] == len(vectors)
        units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        cosines = units @ units.T
        return float(cosines[~np.eye(len(units), dtype=bool)].mean())
    aligned = [
        (p, other)
        for p, other in enumerate(cell["aligned_position"].to_list())
        if other is not None
    ]
    here, there = np.array(aligned).T
    point = 2 if row["measure"].startswith("affine_heads") else 1
    y, x = new[row["layer"]][point][here], old[row["layer"]][point][there]
    assert row["head"] is None
    assert row["tokens"] == len(x)
    # One slope, and a shift for every dimension: whatever the slope, the best shift of a dimension
    # makes its mean right, so what is left to fit are the deviations from the means.
    dx, dy = (side - side.mean(0) for side in (x, y))
    slope = np.linalg.lstsq(dx.reshape(-1, 1), dy.ravel(), rcond=None)[0][0]
    return {
        "affine_lambda": float(slope),
        "affine_sigma": float(np.linalg.norm(y.mean(0) - slope * x.mean(0))),
        "affine_r2": float(1 - ((dy - slope * dx) ** 2).sum() / (dy**2).sum()),
    }[row["measure"].replace("affine_heads", "affine")]


def counted(queries: str, tokens: pl.DataFrame) -> Array:
    """Which tokens are queries."""
    n = len(tokens)
    kind, _, region = queries.partition(":")
    if kind == "all":
        return np.ones(n, bool)
    if kind == "last":
        return np.arange(n) == n - 1
    inside = np.array([region in names for names in tokens["regions"].to_list()])
    if kind == "region":
        return inside
    assert kind == "after"
    return np.arange(n) > np.flatnonzero(inside).max()


def chosen(keys: str, tokens: pl.DataFrame) -> Array:
    """Which tokens are keys."""
    if keys == "all":
        return np.ones(len(tokens), bool)
    if keys == "not-first":
        return np.arange(len(tokens)) > 0
    return np.array([keys in names for names in tokens["regions"].to_list()])


def shares(classes: str, item: str, tokens: pl.DataFrame) -> Array:
    """How much of each token belongs to a class."""
    if classes == "default":
        return (tokens["class"] == item).to_numpy().astype(float)
    assert classes == "maps"
    signs = {"hash": "#", "star": "*", "whitespace": " \n"}
    special = [text.startswith("<") and text.endswith(">") for text in tokens["text"]]
    of_item = {
        name: np.array(
            [
                0.0 if marked else sum(letter in which for letter in text) / len(text)
                for text, marked in zip(tokens["text"], special, strict=True)
            ]
        )
        for name, which in signs.items()
    }
    return of_item[item] if item in of_item else 1 - sum(of_item.values())


def average(A: Array, queries: Array) -> Array:
    """Average attention weight of each key, from later queries that could see it."""
    later = np.tril(np.ones(A.shape, dtype=bool), -1)
    seen = later & np.asarray(queries, dtype=bool)[:, None] & (A > 0)
    count = seen.sum(0)
    return np.where(count > 0, (A * seen).sum(0) / np.maximum(count, 1), np.nan)


def induction(A: Array, queries: Array, ids: list[int]) -> float:
    """A[i, j + 1], where j is the last place before i with the token of i."""
    found = []
    for i in queries:
        before = [j for j in range(i) if ids[j] == ids[i]]
        if before:
            found.append(A[i, before[-1] + 1])
    return float(np.mean(found)) if found else np.nan


def duplicate_token(A: Array, queries: Array, ids: list[int]) -> float:
    """A[i, j], where j is the last position before i with the token of i."""
    pairs = [(i, [j for j in range(i) if ids[j] == ids[i]]) for i in queries]
    return mean([A[i, before[-1]] for i, before in pairs if before])


SINGLE: dict[str, Any] = {
    "previous_token": lambda A, Q, ids: mean([A[i, i - 1] for i in Q if i > 0]),
    "induction": induction,
    "duplicate_token": duplicate_token,
    "renyi2": lambda A, Q, ids: mean([-np.log((A[i] ** 2).sum()) for i in Q]),
    "on_first": lambda A, Q, ids: mean([A[i, :4].sum() for i in Q]),
    "on_recent": lambda A, Q, ids: mean([A[i, max(4, i - 63) : i + 1].sum() for i in Q]),
    "on_rest": lambda A, Q, ids: mean([A[i, 4 : max(4, i - 63)].sum() for i in Q]),
    "nearby": lambda A, Q, ids: mean([A[i, max(1, i - 7) : i + 1].sum() for i in Q]),
    "largest_weight": lambda A, Q, ids: mean([A[i].max() for i in Q]),
}


def top_share(A: Array, queries: Array, item: str) -> float:
    """Share of the columns' sum that the largest columns hold, of those that a query sees."""
    columns = np.sort(A[queries].sum(0))[::-1]
    n = (A[queries] > 0).any(0).sum()
    return float(columns[: -(-round(100 * float(item)) * n // 100)].sum() / columns.sum())


def mean(numbers: list[float]) -> float:
    return float(np.mean(numbers)) if numbers else np.nan


def doubt(x: Array, y: Array, part: Array, relative: float = TOLERANCE) -> float:
    """How far the part's share f of the whole fall may be off where every average is off by up to
    `relative` of itself; infinite where there may be no fall at all.

    f = S / T with S the part's fall, the sum of x - y over it, and T the whole one. S is off by up
    to s, `relative` times the sum of x + y over the part, and T by up to t likewise. From
    (S + ds) / (T + dt) - S / T = (ds - f dt) / (T + dt) it is off by (s + |f| t) / (T - t) at most.
    """
    s, t = (relative * (x + y)[of].sum() for of in (part, slice(None)))
    whole = (x - y).sum()
    if abs(whole) <= t:
        return np.inf
    return float((s + abs((x - y)[part].sum() / whole) * t) / (abs(whole) - t))


def paired(row: dict[str, Any], A: Array, old: Array, cell: Any, base: Any) -> tuple[Array, Array]:
    """The averages of aligned tokens, of the base and of the variant."""
    x_all = average(old, counted(row["queries"], base))
    y_all = average(A, counted(row["queries"], cell))
    keys = chosen(row["keys"], cell)
    pairs = [
        (x_all[other], y_all[position])
        for position, other in enumerate(cell["aligned_position"].to_list())
        if other is not None and keys[position]
    ]
    x, y = np.array([p for p in pairs if np.isfinite(p).all()]).reshape(-1, 2).T
    return x, y


def at_spikes(row: dict[str, Any], x: Array, y: Array) -> Array:
    """The largest by both sides together; the share in hundredths, so that rounding up is exact."""
    hundredths = round(100 * float(row["item"]))
    spikes = np.argsort(-np.sqrt(x * y), kind="stable")[: -(-hundredths * len(x) // 100)]
    return np.isin(np.arange(len(x)), spikes)


def number(row: dict[str, Any], A: Array, old: Array | None, cell: Any, base: Any) -> float:
    """What a row should say. A [n, n] of its head, `old` that of its head in the base."""
    queries = counted(row["queries"], cell)
    keys = chosen(row["keys"], cell)
    measure = row["measure"]
    if measure == "mass":
        of_class = shares(row["classes"], row["item"], cell) * keys
        assert abs(of_class.sum() - row["tokens"]) < 1e-4
        even = (A > 0) / (A > 0).sum(1, keepdims=True)
        if keys.any():
            assert abs(even[queries].mean(0) @ of_class - row["uniform"]) < TOLERANCE
        return float(A[queries].mean(0) @ of_class) if keys.any() else np.nan
    if measure == "entropy":
        return float(-np.where(A > 0, A * np.log(np.where(A > 0, A, 1)), 0).sum(1)[queries].mean())
    if measure == "effective_tokens":
        return float(np.exp(number({**row, "measure": "entropy"}, A, old, cell, base)))
    if measure == "first_token":
        return float(A[queries, 0].mean())
    if measure == "top_share":
        uniform = top_share((A > 0) / (A > 0).sum(1, keepdims=True), queries, row["item"])
        assert abs(uniform - row["uniform"]) < TOLERANCE
        return top_share(A, queries, row["item"])
    if measure in SINGLE:
        return SINGLE[measure](A, np.flatnonzero(queries), cell["id"].to_list())
    if measure == "uniformity":
        of_filler = average(A, queries)[(cell["role"] == "filler").to_numpy()]
        return float(of_filler.std() / of_filler.mean())
    assert old is not None
    assert base is not None
    if measure in ("uniform_slope", "uniform_ratio"):  # the same of uniform matrices
        A, old = (np.where(B > 0, 1 / (B > 0).sum(1, keepdims=True), 0.0) for B in (A, old))
        measure = {"uniform_slope": "lambda", "uniform_ratio": "lambda_ratio"}[measure]
    x, y = paired(row, A, old, cell, base)
    if not len(x):
        return np.nan
    if measure == "lambda":
        assert row["tokens"] == len(x)
        return float(np.linalg.lstsq(x[:, None], y, rcond=None)[0][0])
    if measure == "lambda_ratio":
        return float(y.mean() / x.mean())
    if measure == "reshaping":
        assert row["tokens"] == len(x)
        return float(1 - np.minimum(x / x.sum(), y / y.sum()).sum())
    if measure == "lambda_r2":
        line = float(x @ y / (x @ x)) * x
        return float(1 - ((y - line) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    part = at_spikes(row, x, y) == (measure != "rest_ratio")
    assert row["tokens"] == part.sum()
    if measure == "spike_fall":
        there = (x - y).sum() >= 0.01 * x.sum() > 0
        return float((x - y)[part].sum() / (x - y).sum()) if there else np.nan
    assert measure in ("spike_ratio", "rest_ratio")
    if measure == "rest_ratio" and any(side[part].sum() < 1e-3 * side.sum() for side in (x, y)):
        return np.nan
    return float(y[part].mean() / x[part].mean()) if part.any() else np.nan


def check(run: Any, folders: dict[str, str], off: dict[str, float] | None = None) -> dict[str, int]:
    """Every row of `values` and `positions` against the dense matrices; rows by measure. Where
    `off` is given, how far they are off at most is put there instead."""

    def same(name: str, got: Any, found: Any, allowed: Any, why: str = "") -> None:
        if off is None:
            assert (np.isnan(got) == np.isnan(found)).all(), why
            assert not (np.abs(got - found) > allowed).any(), f"{name}: {got}, {found} {why}"
        else:
            off[name] = max(off.get(name, 0.0), np.nan_to_num(np.abs(got - found)).max())

    values, positions, tokens = (t.collect() for t in (run.values, run.positions, run.tokens))
    rows: dict[str, int] = {}
    for model, prompt in run.cells.select("model", "prompt").unique().sort("prompt").rows():
        of_prompt: dict[str, tuple[pl.DataFrame, list[Array]]] = {}
        made: dict[str, Any] = {}
        mine = (pl.col("model") == model) & (pl.col("prompt") == prompt)
        for condition in run.experiment.conditions:
            here = mine & (pl.col("condition") == condition)
            cell = tokens.filter(here).sort("position")
            weights, made[condition] = dense(folders[model], cell["id"].to_list())
            of_prompt[condition] = cell, weights
        base, old = of_prompt["base"]
        for row in values.filter(mine).iter_rows(named=True):
            cell, new = of_prompt[row["condition"]]
            place = row["layer"], row["head"]
            variant = row["condition"] != "base"
            if row["measure"] == "value_similarity" or row["measure"].startswith("affine"):
                found = of_activations(row, made[row["condition"]], made["base"], cell)
            else:
                matrices = (
                    new[place[0]][place[1]],
                    old[place[0]][place[1]] if variant else None,
                    cell,
                    base if variant else None,
                )
                found = number(row, *matrices)
            got = np.nan if row["value"] is None else row["value"]
            allowed = TOLERANCE * max(1.0, abs(np.nan_to_num(found)))
            if row["measure"] == "spike_fall":
                x, y = paired(row, *matrices)
                allowed = doubt(x, y, at_spikes(row, x, y))
            if np.isfinite(allowed):
                same(row["measure"], got, found, allowed, str(row))
            else:
                rows["no fall to speak of"] = rows.get("no fall to speak of", 0) + 1
            rows[row["measure"]] = rows.get(row["measure"], 0) + 1
        profiles = positions.filter(mine).group_by("condition", "queries", "layer", "head")
        for (condition, queries, layer, head), profile in profiles:
            cell, new = of_prompt[condition]
            of_head = new[layer][head]
            rows_counted = counted(queries, cell)
            profile = profile.sort("position")
            assert profile["position"].to_list() == list(range(len(cell)))
            for name, true in (
                ("average", average(of_head, rows_counted)),
                ("received", of_head[rows_counted].sum(0)),
            ):
                same(name, profile[name].to_numpy(), true, TOLERANCE * true)
            rows["profile"] = rows.get("profile", 0) + len(profile)
    return rows
