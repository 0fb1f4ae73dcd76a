"""Many short prompts on a CPU: the plain pass, the same pass watched, and watched and read.

    OMP_NUM_THREADS=1 python benchmarks/short_prompts.py [--shapes 1x130,32x130] [--side left]

The models of the zoo, as an experiment runs them: the layers alone (no logits), prompts of
different lengths (three quarters of the longest to the longest) in one padded batch. Plain and
watched take turns in one process; times are medians, and a ratio is the median of the ratios of
neighbouring turns. Times are processor time where there is one thread, because other programs on
the machine do not change that, and by the clock otherwise. "Read" adds what an experiment reads
of every layer: received, average, uniform, entropy, first_token.
"""

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable

import torch
from transformers.utils import logging

import attnscope
from attnscope.experiment.model_pass import forward

MODELS = ("zoo:math-qwen2", "zoo:spatial-phys")


def batch(prompts: int, tokens: int, side: str) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, the first the longest."""
    torch.manual_seed(0)
    ids = torch.randint(5, 1000, (prompts, tokens))
    real = torch.ones_like(ids)
    for n, length in enumerate(torch.linspace(tokens, 3 * tokens // 4, prompts).long().tolist()):
        gone = slice(length, tokens) if side == "right" else slice(0, tokens - length)
        real[n, gone] = 0
    return {"input_ids": ids, "attention_mask": real}


def contenders(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], queries: str
) -> dict[str, Callable[[], None]]:
    layers = model.get_submodule("model")

    def plain() -> None:
        layers(**inputs, use_cache=False)

    def watched() -> None:
        with forward(model, inputs, {queries: queries}):
            pass

    def read() -> None:
        with forward(model, inputs, {queries: queries}) as (scopes, *_):
            scope = scopes[queries]
        for layer in scope.layers:
            scope.received(layer)
            scope.average(layer)
            scope.uniform(layer)
            scope.entropy(layer)
            scope.first_token(layer)

    return {"plain": plain, "watched": watched, "read": read}


def timed(runs: dict[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    """Seconds of each contender, turn by turn, after one turn to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for turn in range(turns + 1):
        for name, run in runs.items():
            begin = clock()
            run()
            if turn:
                seconds[name].append(clock() - begin)
    return seconds


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--shapes", default="1x130,32x130,64x130,8x500")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--side", default="right", choices=["left", "right"])
    parser.add_argument("--queries", default="all")
    options = parser.parse_args()
    logging.disable_progress_bar()
    print(
        f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, padded {options.side}, queries {options.queries}\n\n"
        "| model | prompts × tokens | plain ms | watched ms | ratio | and read ms | ratio |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        flush=True,
    )
    for name in options.models.split(","):
        model, _ = attnscope.load(name)
        for shape in options.shapes.split(","):
            prompts, tokens = map(int, shape.split("x"))
            inputs = batch(prompts, tokens, options.side)
            seconds = timed(contenders(model, inputs, options.queries), options.turns)
            cells = [f"{statistics.median(seconds['plain']) * 1000:.1f}"]
            for what in ("watched", "read"):
                pairs = zip(seconds[what], seconds["plain"], strict=True)
                cells += [
                    f"{statistics.median(seconds[what]) * 1000:.1f}",
                    f"{statistics.median(mine / plain for mine, plain in pairs):.2f}",
                ]
            print(f"| {name} | {prompts} × {tokens} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
