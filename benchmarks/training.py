"""What measuring costs a training on a CPU: `watch` around a step, and `TrainerCallback`'s probe.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/training.py [--turns 12]

A Llama of 8 layers and width 256 with random weights; a batch of 8 texts of 128 tokens, AdamW.
One layer in four is measured. The probe has 8 prompts of about 20 tokens and writes its run. The
time is that of the process, so other processes matter little; turn by turn, the median of ratios.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnscope
from attnscope.integrations.training_run import TrainingRun

MEASURES = ("entropy", "first_token", "max_logit")
LAYERS = [0, 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=12)
    turns = parser.parse_args().turns
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    _, tokenizer = attnscope.load("zoo:chat-llama")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(5, 3000, (8, 128))
    prompts = [
        f"Tom has {n} apples, and Ann has {n + 3} pears. How many are left?" for n in range(8)
    ]
    folder = Path(tempfile.mkdtemp(prefix="attnscope-training-"))
    keys = {"prompts": prompts, "measures": MEASURES, "layers": LAYERS, "chat": False}
    run = TrainingRun(folder / "attention", model, tokenizer, keys)
    run.start(0)
    done = 0

    def step() -> None:
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    def watched() -> None:
        with attnscope.watch(model, layers=LAYERS, max_logit=True) as scope:
            step()
        for layer in scope.layers:
            for measure in MEASURES:
                scope.measure(measure, layer)

    def probed() -> None:
        nonlocal done
        step()
        model.eval()
        run.probe(model, done := done + 1)
        model.train()

    runs: dict[str, Callable[[], None]] = {
        "plain step": step,
        "watched step": watched,
        "step and probe": probed,
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):  # the first compiles and fills caches
        for name, each in list(runs.items())[:: 1 if turn % 2 else -1]:
            begin = time.process_time()
            each()
            if turn:
                taken[name].append(time.process_time() - begin)
    print("| what | seconds | ratio |\n| --- | --- | --- |")
    for name, seconds in taken.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, taken["plain step"], strict=True))
        print(f"| {name} | {statistics.median(seconds):.3f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
