"""Scores of heads and masses of single queries against dense eager attention, head by head.

python benchmarks/heads.py MODEL [MODEL …]    # the largest deviations, and what watching costs

Float32, on the CPU. Everything is computed once more from the weights that the model's own eager
attention returns, by the formulas of the papers: mean of A[i, 0] over 64 tokens (arXiv 2410.10781),
mean of A[i, i - n + 1] on n random tokens written twice (2209.11895), and the share of the needle's
tokens that were generated while the largest weight lay on them (2404.15574).
"""

import sys
import time
from typing import Any

import numpy as np
import polars as pl
import torch

import attnscope
from attnscope.experiment import head_scores as measuring
from attnscope.stats.head_types import classify_heads, summary
from attnscope.tokens import DEFAULT

PROMPTS = 8


@torch.no_grad()
def dense(model: Any, ids: torch.Tensor) -> list[np.ndarray]:
    """[H, n, n] of every layer."""
    model.set_attn_implementation("eager")
    found = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation("sdpa")
    return [A[0].double().numpy() for A in found]


def values(scores: pl.DataFrame, score: str, prompt: int) -> np.ndarray:
    of = scores.filter((pl.col("score") == score) & (pl.col("prompt") == prompt))
    of = of.filter(pl.col("item").is_null()).sort("layer", "head")
    return of["value"].to_numpy().reshape(of["layer"].n_unique(), -1)


def check(name: str) -> None:
    model, tokenizer = attnscope.load(name, dtype="float32")
    repeats: list[torch.Tensor] = []
    needles: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor, list[Any]]] = {}
    plain, copied = measuring._watched, measuring._copied

    def watched(model: Any, ids: torch.Tensor, **more: Any) -> Any:
        repeats.append(ids)
        return plain(model, ids, **more)

    def copying(scope: Any, layer: int, token_ids: torch.Tensor, where: torch.Tensor) -> Any:
        got = copied(scope, layer, token_ids, where)
        key = tuple(token_ids.tolist())
        at = scope.query_positions(layer)[0]
        needles.setdefault(key, (where, at, []))[2].append(got.numpy())
        return got

    measuring._watched, measuring._copied = watched, copying
    begun = time.process_time()
    scores = measuring.head_scores(model, tokenizer, prompts=PROMPTS)
    spent = time.process_time() - begun
    measuring._watched, measuring._copied = plain, copied
    texts, twice = repeats
    off = {"sink": 0.0, "previous": 0.0, "induction": 0.0, "retrieval": 0.0}
    n = measuring.REPEATED
    for prompt in range(PROMPTS):
        A = np.stack(dense(model, texts[prompt : prompt + 1]))
        want = {"sink": A[..., 0].mean(-1)}
        want["previous"] = np.diagonal(A, -1, 2, 3).mean(-1)
        A = np.stack(dense(model, twice[prompt : prompt + 1]))
        want["induction"] = np.diagonal(A, 1 - n, 2, 3)[..., -n:].mean(-1)
        for score, of in want.items():
            off[score] = max(off[score], np.abs(values(scores, score, prompt) - of).max())
    for token_ids, (where, at, got) in needles.items():
        ids = torch.tensor(token_ids)
        A = dense(model, ids[None, :-1])
        for layer, of_layer in enumerate(A):
            top = torch.from_numpy(of_layer.argmax(-1))[:, at]
            hits = (top[..., None] == where) & (ids[at + 1][None, :, None] == ids[where])
            want_ = hits.any(1).double().mean(1).numpy()
            off["retrieval"] = max(off["retrieval"], np.abs(want_ - got[layer]).max())
    off |= rows(model, tokenizer, texts[:2])
    print(f"\n{name}: largest deviation from dense eager attention, all layers and heads")
    print("  " + ", ".join(f"{what} {by:.2g}" for what, by in off.items()))
    print(f"  all scores of {PROMPTS} prompts: {spent:.1f} s of CPU time; {cost(model, texts[:2])}")
    table = summary(classify_heads(scores))
    for row in table.iter_rows(named=True):
        print(
            f"  {row['kind']} > {row['threshold']:g}: {row['above']} of {row['heads']} heads, "
            f"{row['certain']} with the whole interval; largest {row['largest']}"
        )


@torch.no_grad()
def rows(model: Any, tokenizer: Any, ids: torch.Tensor) -> dict[str, float]:
    """The largest deviations of a class mass of a single query: from eager attention in float32;
    from eager attention where model and softmax are float64 throughout (its own takes scores as
    float32, whatever the model); and of either from float64 on the same queries and keys."""
    classes = torch.from_numpy(DEFAULT.ids(ids, tokenizer))
    shares = (classes[..., None] == torch.arange(len(DEFAULT))).double().numpy()
    found: dict[str, list[np.ndarray]] = {}
    for backend in ("streaming", "reference"):
        with attnscope.watch(model, keep=True, backend=backend) as scope:
            model(input_ids=ids)
        found[backend] = [
            scope.rows(layer, classes, len(DEFAULT)).double().numpy() for layer in scope.layers
        ]
    weights = [dense(model, row[None]) for row in ids]
    found["eager"] = [
        np.stack([A @ of for A, of in zip(each, shares, strict=True)])
        for each in zip(*weights, strict=True)
    ]

    def apart(one: str, other: str) -> float:
        return max(np.abs(a - b).max() for a, b in zip(found[one], found[other], strict=True))

    model.double()
    with attnscope.watch(model, keep=True) as scope:
        model(input_ids=ids)
    found["wide"] = [
        scope.rows(layer, classes, len(DEFAULT)).double().numpy() for layer in scope.layers
    ]
    softmax = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda x, dim, dtype=None: softmax(x, dim=dim)
    try:
        weights = [dense(model, row[None]) for row in ids]
    finally:
        torch.nn.functional.softmax = softmax
        model.float()
    found["wide eager"] = [
        np.stack([A @ of for A, of in zip(each, shares, strict=True)])
        for each in zip(*weights, strict=True)
    ]
    return {
        "rows from eager": apart("streaming", "eager"),
        "both in float64": apart("wide", "wide eager"),
        "rows from float64": apart("streaming", "reference"),
        "eager from float64": apart("eager", "reference"),
    }


@torch.no_grad()
def cost(model: Any, ids: torch.Tensor) -> str:
    """CPU time of a pass: plain, watched, and with queries and keys kept; and of all rows."""
    model(input_ids=ids)
    spent = {}
    for what in ("plain", "watched", "kept"):
        begun = time.process_time()
        if what == "plain":
            model(input_ids=ids)
        else:
            with attnscope.watch(model, keep=what == "kept") as scope:
                model(input_ids=ids)
        spent[what] = time.process_time() - begun
    begun = time.process_time()
    for layer in scope.layers:
        scope.rows(layer, ids % 8, 8)
    summary = ", ".join(f"{what} {by:.2f} s" for what, by in spent.items())
    asked = time.process_time() - begun
    return f"{len(ids)} × {ids.shape[1]} tokens: {summary}, then rows of all layers {asked:.2f} s"


if __name__ == "__main__":
    for each in sys.argv[1:] or ["zoo:smollm2"]:
        check(each)
