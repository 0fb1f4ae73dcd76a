"""Train a bundled model from nothing, on one GPU.

    python training/train.py spatial-base --out build/zoo
    python training/train.py spatial-phys --out build/zoo      # goes on from build/zoo/spatial-base
    python training/train.py math-qwen2 chat-llama chat-gemma3 --out build/zoo

Writes a folder per model, as `save_pretrained` does, in 16 bits, and a log beside it: loss while
training, and exact match on fresh samples at the end. Seeds are fixed; the same machine makes the
same data, though a GPU's sums may differ in the last bits from run to run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from data import rows, tokenizer_of
from evaluate import accuracy, fresh
from models import CHECK_EVERY, RECIPES, Recipe

CHECK = 1_000  # seed of the samples looked at during training; the cards use others


def build(recipe: Recipe, out: Path, device: str) -> Any:
    """The model to train: new, or the one it goes on from."""
    torch.manual_seed(recipe.seed)
    kind = getattr(transformers, recipe.architecture)
    if recipe.start:
        return kind.from_pretrained(out / recipe.start, dtype=torch.float32).to(device)
    tokenizer = tokenizer_of(recipe.format)
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    model = kind(kind.config_class(**recipe.sizes, **special))
    with torch.no_grad():  # each layer adds to the stream: keep the sum of many in bounds
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_((2 * model.config.num_hidden_layers) ** -0.5)
    return model.to(device)


def train(name: str, recipe: Recipe, out: Path, device: str, workers: int) -> dict[str, Any]:
    """Train one model and save it; its figures."""
    began = time.perf_counter()
    log = (out / f"{name}.jsonl").open("w")

    def note(**facts: Any) -> None:
        facts["seconds"] = round(time.perf_counter() - began, 1)
        print(name, facts, flush=True)
        print(json.dumps(facts), file=log, flush=True)

    ids, weights = rows(recipe, workers)
    used = int((weights > 0).sum())
    note(recipe=asdict(recipe), rows=len(ids), tokens=used)
    model = build(recipe, out, device).train()
    note(parameters=sum(p.numel() for p in model.parameters()))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=device == "cuda")

    def loss_of(batch: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        each = F.cross_entropy(
            logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none"
        )
        counted = counts[:, 1:].flatten()
        return (each * counted).sum() / counted.sum()

    torch.compiler.reset()
    step_loss = torch.compile(loss_of, dynamic=False) if device == "cuda" else loss_of
    on_device = torch.from_numpy(ids).to(device), torch.from_numpy(weights).to(device)
    order = torch.Generator().manual_seed(recipe.seed)
    queue = torch.empty(0, dtype=torch.int64)
    warm_up = min(300, recipe.steps // 10)
    for step in range(recipe.steps):
        if len(queue) < recipe.rows:
            queue = torch.cat([queue, torch.randperm(len(ids), generator=order)])
        some, queue = queue[: recipe.rows].to(device), queue[recipe.rows :]
        fall = 0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * step / recipe.steps))
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * min(1.0, (step + 1) / max(1, warm_up)) * fall
        loss = step_loss(on_device[0][some].long(), on_device[1][some].float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % min(200, recipe.steps // 5 or 1) == 0 or step + 1 == recipe.steps:
            note(step=step + 1, loss=round(loss.item(), 4))
        if recipe.until and (step + 1) % CHECK_EVERY == 0 and enough(name, recipe, model, note):
            break
    figures = finish(name, recipe, model, out)
    note(**figures)
    return figures


def enough(name: str, recipe: Recipe, model: Any, note: Callable[..., None]) -> bool:
    """Whether the hardest problems come out right often enough to stop.

    A model that is always right would leave an intervention nothing to improve, and one that is
    always wrong nothing to spoil.
    """
    model.eval()
    share = accuracy(name, model, tokenizer_of(recipe.format), fresh(name, 250, 5, CHECK))
    model.train()
    note(exact_match_level_5=share)
    return recipe.until is not None and share >= recipe.until


def finish(name: str, recipe: Recipe, model: Any, out: Path) -> dict[str, Any]:
    """Save in 16 bits, and measure what was saved."""
    tokenizer = tokenizer_of(recipe.format)
    folder = out / name
    model = model.to(torch.bfloat16).eval()
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        do_sample=False,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = model.float()
    levels = [None] if name.startswith("spatial") else range(1, 6)
    shares = {
        str(level or "single actions"): accuracy(
            name, model, tokenizer, fresh(name, 500, level, CHECK)
        )
        for level in levels
    }
    return {"exact_match": shares}


def main() -> None:
    """Train the models named, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=list(RECIPES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, help="fewer or more than the recipe says")
    parser.add_argument("--documents", type=int, help="fewer or more than the recipe says")
    parser.add_argument(
        "--rows", type=int, help="rows of a batch, to try things on a small machine"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that make the data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    for name in chosen.names:
        recipe = RECIPES[name]
        changes = {key: getattr(chosen, key) for key in ("steps", "documents", "rows")}
        recipe = replace(recipe, **{key: value for key, value in changes.items() if value})
        train(name, recipe, chosen.out, chosen.device, chosen.workers)


if __name__ == "__main__":
    main()
