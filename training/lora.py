"""Fine-tune a real pretrained model on the spatial task, by LoRA, on one GPU.

    python training/lora.py zoo:smollm2 --out build/smollm2-phys

Low-rank matrices beside all seven linear layers of every block learn 12,000 single actions of the
spatial generator (split `train`), each seen eight times; the loss counts the answer alone. Writes
an adapter as PEFT lays it out, in 16 bits, and a log: loss while training, exact match on fresh
samples before and after. Needs the extra `[peft]`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import attnscope
from attnscope.prompts import spatial_samples
from attnscope.tokens import apply_chat_template
from evaluate import accuracy, fresh

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TASK = "spatial"
CHECK = 1_000  # seed of the samples looked at here; the card uses others
SEED = 1

Row = tuple[list[int], list[int]]


def rows(tokenizer: Any, count: int) -> list[Row]:
    """Prompt and answer of each training sample, as token ids."""
    samples = list(spatial_samples(count, seed=SEED, split="train"))
    asked = [apply_chat_template(sample.prompt, tokenizer).text for sample in samples]
    answers = [(sample.answer or "") + tokenizer.eos_token for sample in samples]
    ids = [tokenizer(texts, add_special_tokens=False)["input_ids"] for texts in (asked, answers)]
    return list(zip(*ids, strict=True))


def batches(made: list[Row], size: int, epochs: int) -> Iterator[list[Row]]:
    """Every row once an epoch, in an order of its own."""
    draw = random.Random(SEED)
    for _ in range(epochs):
        order = made[:]
        draw.shuffle(order)
        yield from (order[at : at + size] for at in range(0, len(order) - size + 1, size))


def padded(batch: list[Row], fill: int, device: str) -> dict[str, torch.Tensor]:
    """A batch padded on the right, with labels on the answers alone."""
    longest = max(len(asked) + len(answer) for asked, answer in batch)
    ids = torch.full((len(batch), longest), fill)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for row, (asked, answer) in enumerate(batch):
        end = len(asked) + len(answer)
        ids[row, :end] = torch.tensor(asked + answer)
        labels[row, len(asked) : end] = torch.tensor(answer)
        mask[row, :end] = 1
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def main() -> None:
    """Train, save, measure."""
    from peft import LoraConfig, get_peft_model

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="as attnscope.load takes it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base-name", help="the base's name in the adapter's configuration")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--samples", type=int, default=12_000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--fresh", type=int, default=1_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    log = (chosen.out / "training.jsonl").open("w")

    def note(**facts: Any) -> None:
        facts["seconds"] = round(time.perf_counter() - began, 1)
        print(facts, flush=True)
        print(json.dumps(facts), file=log, flush=True)

    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    base, tokenizer = attnscope.load(chosen.base, device=chosen.device, dtype="float32")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tested = fresh(TASK, chosen.fresh, None, CHECK)
    note(exact_match_before=accuracy(TASK, base, tokenizer, tested))
    config = LoraConfig(
        r=chosen.rank,
        lora_alpha=2 * chosen.rank,
        target_modules=list(LINEAR),
        task_type="CAUSAL_LM",
        base_model_name_or_path=chosen.base_name or chosen.base,
    )
    model = get_peft_model(base, config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    made = rows(tokenizer, chosen.samples)
    note(
        rows=len(made),
        longest=max(len(a) + len(b) for a, b in made),
        parameters=sum(p.numel() for p in parameters),
        rank=chosen.rank,
        epochs=chosen.epochs,
        batch=chosen.batch,
        rate=chosen.rate,
    )
    optimizer = torch.optim.AdamW(parameters, lr=chosen.rate, weight_decay=0.0)
    steps = chosen.epochs * (len(made) // chosen.batch)
    model.train()
    for step, batch in enumerate(batches(made, chosen.batch, chosen.epochs)):
        fall = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = chosen.rate * min(1.0, step / 50) * fall
        inputs = padded(batch, tokenizer.pad_token_id, chosen.device)
        with torch.autocast(chosen.device, torch.bfloat16, enabled=chosen.device == "cuda"):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            note(step=step + 1, loss=round(loss.item(), 4))
    for parameter in parameters:  # what is saved is what is measured
        parameter.data = parameter.data.to(torch.bfloat16)
    config.base_model_name_or_path = chosen.base_name or chosen.base
    model.peft_config["default"].base_model_name_or_path = config.base_model_name_or_path
    model.save_pretrained(chosen.out)
    for parameter in parameters:
        parameter.data = parameter.data.float()
    model.eval()
    note(exact_match_after=accuracy(TASK, model, tokenizer, tested))


if __name__ == "__main__":
    main()
