"""Exact match of a bundled model on new samples.

    python training/evaluate.py spatial-phys math-qwen2        # or no name: all five
    python training/evaluate.py math-qwen2 --level 3 --count 1000

Answers are generated greedily. A spatial answer must be the action, word for word; a math answer
is the number after "The answer is". Test samples of the spatial task never share a problem with
the training set; those of the math task come from a seed that training does not use.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import torch

from attnscope.prompts import Sample, math_samples, spatial_samples
from attnscope.tokens import apply_chat_template

FRESH = 20_260  # no training seed


def fresh(name: str, count: int, level: int | None, seed: int = FRESH) -> list[Sample]:
    """Samples that no model was trained on."""
    if name.startswith("spatial"):
        return list(spatial_samples(count, seed=seed, split="test"))
    return list(math_samples(count, seed=seed, level=level))


def completions(
    model: Any, tokenizer: Any, samples: list[Sample], *, max_new_tokens: int, batch: int = 250
) -> list[str]:
    """The greedy completion of each sample."""
    texts = [apply_chat_template(sample.prompt, tokenizer).text for sample in samples]
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    written = [""] * len(texts)
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        inputs = tokenizer(
            [texts[n] for n in some],
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        prompt = inputs["input_ids"].shape[1]
        with torch.no_grad():
            out = model.generate(
                input_ids=inputs["input_ids"].to(model.device),
                attention_mask=inputs["attention_mask"].to(model.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        for n, text in zip(
            some, tokenizer.batch_decode(out[:, prompt:], skip_special_tokens=True), strict=True
        ):
            written[n] = text
    return written


def right(name: str, sample: Sample, answer: str) -> bool:
    """Whether the answer is exactly the sample's."""
    if name.startswith("spatial"):
        return answer.strip() == sample.answer
    found = re.search(r"The answer is (\d+)", answer)
    return found is not None and found[1] == sample.answer


def accuracy(name: str, model: Any, tokenizer: Any, samples: list[Sample]) -> float:
    """The share of exact answers."""
    max_new_tokens = 8 if name.startswith("spatial") else 48
    written = completions(model, tokenizer, samples, max_new_tokens=max_new_tokens)
    hits = [right(name, s, a) for s, a in zip(samples, written, strict=True)]
    return sum(hits) / len(hits)


def main() -> None:
    """Print a table of exact match."""
    import attnscope
    from models import RECIPES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(RECIPES))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--level", type=int, choices=range(1, 6), help="math: one level only")
    parser.add_argument("--seed", type=int, default=FRESH)
    chosen = parser.parse_args()
    for name in chosen.names:
        model, tokenizer = attnscope.load(f"zoo:{name}")
        levels = [None] if name.startswith("spatial") else [chosen.level] if chosen.level else []
        for level in levels or range(1, 6):
            samples = fresh(name, chosen.count, level, chosen.seed)
            share = accuracy(name, model, tokenizer, samples)
            what = f" level {level}" if level else ""
            print(f"{name}{what}: {share:.1%} of {len(samples)} fresh samples", flush=True)


if __name__ == "__main__":
    main()
