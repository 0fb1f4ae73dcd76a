"""How far our numbers are from float64 on the same queries and keys, beside torch's own softmax.

    python validation/exact_cpu.py [FOLDER …] [--dtypes float32,bfloat16,float16] [--layers]

For every model, type, choice of queries and layer: the largest deviation, over heads and keys, of
the streamed kernel, and that of `softmax(q @ k.T * scale)`, whose products are made in the model's
type and whose softmax is in float32, as eager attention has it (its sums are then made in float64:
the fault is the softmax's alone). Ours may be twice as far off, and beside that by what float32
rounds of the number itself, 4 of its eps times the number.

Without folders: a Qwen2 of random weights, with biases as large as those of trained ones.
"""

import argparse
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import attnscope
from attnscope import kernels
from attnscope.errors import AttnscopeError
from attnscope.kernels import AttentionSums, KernelRows, reference
from attnscope.prompts.word_list import english

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from made_models import biased_model

QUERIES = ("all", "last", "sample:64")
MEASURES = ("received", "average", "mass", "entropy", "first_token", "distance")
CLASSES, ROUNDING = 5, 4 * torch.finfo(torch.float32).eps
LENGTHS = (90, 640)  # layers measured together, and one by one; the longer can be sampled


class Torch(ModuleType):
    """A backend: torch's product and softmax, in the model's type."""

    whole: Tensor

    def exact_lse(self, rows: KernelRows) -> tuple[Tensor, Tensor]:
        """Whole rows, of which parts will be asked for."""
        self.whole, lse = self._softmax(rows)
        return lse.double(), torch.zeros(lse.shape[:2])

    def reduce(self, rows: KernelRows) -> AttentionSums:
        """The totals of what torch's softmax makes of these rows."""
        start, _, own = rows.bounds()
        if rows.partial:
            index = own.long()[:, None, :, None]
            A = self.whole.gather(2, index.expand(-1, self.whole.shape[1], -1, rows.k.shape[2]))
        else:
            A, _ = self._softmax(rows)
        A = A.double().where(_seen(rows), 0.0)
        return reference.totals(
            A, own, start.float(), rows.weight, rows.fpc, rows.group, rows.groups
        )

    def _softmax(self, rows: KernelRows) -> tuple[Tensor, Tensor]:
        k = rows.k.repeat_interleave(rows.q.shape[1] // rows.k.shape[1], 1)
        scores = (rows.q @ k.transpose(2, 3) * rows.scale).float()
        if rows.softcap is not None or rows.sinks is not None or rows.key_bias is not None:
            raise NotImplementedError("these models have no soft-caps, sinks or biases of scores")
        scores = scores.masked_fill(~_seen(rows), -torch.inf)
        return torch.softmax(scores, -1).nan_to_num(0.0), scores.logsumexp(-1)


def _seen(rows: KernelRows) -> Tensor:
    start, stop, _ = rows.bounds()
    keys = torch.arange(rows.k.shape[2])
    return ((keys >= start[..., None]) & (keys < stop[..., None]))[:, None]


def text_of(tokenizer: Any, length: int) -> Tensor:
    """Words, as many tokens as asked for."""
    text = " ".join(islice(english(Random(0)), length))
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids[:, :length]


@torch.no_grad()
def measured(model: Any, ids: Tensor, queries: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    """One pass, watched by every backend for every choice of queries."""
    classes = torch.arange(ids.shape[1])[None] % CLASSES
    with ExitStack() as all_of_them:
        scopes = {
            (backend, which): all_of_them.enter_context(
                attnscope.watch(
                    model,
                    queries=which,
                    backend=backend,
                )
            )
            for backend in ("reference", "streaming", "torch")
            for which in queries
        }
        model(ids, use_cache=False)
    return {
        key: {
            (layer, name): (
                scope.mass(layer, classes, CLASSES)
                if name == "mass"
                else getattr(scope, name)(layer)
            ).double()
            for layer in scope.layers
            for name in MEASURES
        }
        for key, scope in scopes.items()
    }


def rows_of(model: Any, ids: Tensor, every_layer: bool) -> list[list[str]]:
    """One row for a choice of queries and measure: the layer where ours compares worst."""
    queries = tuple(q for q in QUERIES if q in ("all", "last") or ids.shape[1] > 512)
    found, table = measured(model, ids, queries), []
    for which in queries:
        for name in MEASURES:
            layers = []
            for (layer, measure), exact in found["reference", which].items():
                if measure != name:
                    continue
                ours, theirs = (
                    (found[backend, which][layer, name] - exact).abs().nan_to_num(0.0)
                    for backend in ("streaming", "torch")
                )
                beyond = (ours - ROUNDING * exact.abs().nan_to_num(0.0)).clamp(min=0).max().item()
                most = theirs.max().item()
                ratio = 0.0 if beyond == 0 else beyond / most if most else float("inf")
                layers.append((ratio, layer, ours.max().item(), most))
            layers = sorted(layers, key=lambda row: row[1]) if every_layer else [max(layers)]
            table += [
                [which, name, str(layer), f"{ours:.1e}", f"{theirs:.1e}", f"{ratio:.2f}"]
                for ratio, layer, ours, theirs in layers
            ]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--layers", action="store_true", help="every layer, not the worst alone")
    given = parser.parse_args()
    sys.modules["attnscope.kernels.torch"] = Torch("attnscope.kernels.torch")
    kernels.BACKENDS = (*kernels.BACKENDS, "torch")
    print("| model | type | tokens | queries | measure | layer | ours | torch | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    worst = 0.0
    for dtype in given.dtypes.split(","):
        for folder in given.folders or [None]:
            name = "Qwen2, random, large biases" if folder is None else Path(folder).name
            for length in LENGTHS:
                try:
                    if folder is None:
                        model = biased_model(getattr(torch, dtype), layers=4)
                        ids = torch.randint(5, 97, (1, length))
                    else:
                        model, tokenizer = attnscope.load(folder, dtype=dtype, device="cpu")
                        ids = text_of(tokenizer, length)
                    table = rows_of(model, ids, given.layers)
                except AttnscopeError as error:
                    print(f"| {name} | {dtype} | {length} | {error} | | | | | |", flush=True)
                    continue
                for row in table:
                    worst = max(worst, float(row[-1]))
                    print("| " + " | ".join([name, dtype, str(length), *row]) + " |", flush=True)
    print(f"\nlargest ratio: {worst:.2f}")


if __name__ == "__main__":
    main()
