"""What a watched pass costs beside its arithmetic: Python and operators, layer by layer.

    OMP_NUM_THREADS=1 python benchmarks/call_overhead.py [--turns 200] [--profile all]

30 layers of a model so small that its arithmetic is nothing (two heads of eight, one text of four
tokens), on a CPU. Plain and watched take turns; times are medians of processor time, in
microseconds a pass, and what watching adds is given by layer: in the pass, and in all. Operators
are counted as torch dispatches them; on a GPU each is a launch, or nearly.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode

import attnscope

LAYERS = 30


def build() -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            eos_token_id=None,
        )
    ).eval()


class Counting(TorchDispatchMode):
    """Counts the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def contenders(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], None]]:
    def plain() -> None:
        model(ids, use_cache=False, logits_to_keep=1)

    def watched(queries: str) -> Callable[[], None]:
        def run() -> None:
            with attnscope.watch(model, queries=queries):
                plain()

        return run

    def step(queries: str | None) -> Callable[[], None]:
        def run() -> None:
            settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
            if queries is None:
                model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
                return
            with attnscope.watch(model, queries=queries):
                model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)

        return run

    return {
        "plain": plain,
        "all": watched("all"),
        "last": watched("last"),
        "generate, plain": step(None),
        "generate, all": step("all"),
        "generate, last": step("last"),
    }


def profile(run: Callable[[], None], turns: int) -> None:
    watching = cProfile.Profile()
    watching.enable()
    for _ in range(turns):
        run()
    watching.disable()
    pstats.Stats(watching).sort_stats("tottime").print_stats(45)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--profile", help="the contender to profile instead")
    options = parser.parse_args()
    model = build()
    ids = torch.randint(5, 64, (1, options.tokens))
    runs = contenders(model, ids)
    if options.profile:
        runs[options.profile]()
        profile(runs[options.profile], options.turns)
        return
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.turns + 3):
        for name, run in runs.items():
            if name.startswith("generate") and turn % 10:
                continue
            begin = time.thread_time()
            run()
            if turn > 2 or (name.startswith("generate") and turn):
                times[name].append(time.thread_time() - begin)
    print("| what | µs | over plain, µs a layer and pass | operators | over plain, a layer |")
    print("| --- | ---: | ---: | ---: | ---: |")
    base: tuple[float, int] = (0.0, 0)
    for name, run in runs.items():
        with Counting() as counting:
            run()
        took, operators = 1e6 * statistics.median(times[name]), counting.seen.total()
        passes = 16 if name.startswith("generate") else 1
        if name.endswith("plain"):
            base = took, operators
        more, extra = took - base[0], operators - base[1]
        print(
            f"| {name} | {took:.0f} | {more / LAYERS / passes:.1f} | {operators} "
            f"| {extra / LAYERS / passes:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
