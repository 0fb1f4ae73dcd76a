"""Class masses of single queries against dense eager attention, and what keeping them costs.

python validation/rows_dense.py MODEL [MODEL …]    # the largest deviations, and processor time

Float32, on the CPU: two texts of 64 tokens. `papers_dense.py` compares the scores of heads.
"""

import sys
import time
from typing import Any

import numpy as np
import torch

import attnscope
from attnscope.prompts.documents import document_samples
from attnscope.tokens import DEFAULT


@torch.no_grad()
def dense(model: Any, ids: torch.Tensor) -> list[np.ndarray]:
    """[H, n, n] of every layer."""
    model.set_attn_implementation("eager")
    found = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation("sdpa")
    return [A[0].double().numpy() for A in found]


def check(name: str) -> None:
    model, tokenizer = attnscope.load(name, dtype="float32")
    texts = [sample.prompt.text for sample in document_samples(2)]
    ids = torch.tensor([tokenizer(text)["input_ids"][:64] for text in texts])
    off = rows(model, tokenizer, ids)
    print(f"\n{name}: largest deviation of a class mass of a query, all layers and heads")
    print("  " + ", ".join(f"{what} {by:.2g}" for what, by in off.items()))
    print(f"  {cost(model, ids)}")


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
