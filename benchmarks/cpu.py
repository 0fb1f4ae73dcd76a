"""A small model on the CPU: plain sdpa, the same pass watched, eager weights, TransformerLens.

    make bench          (or: python benchmarks/cpu.py [--sizes 512,2048,4096,8192] [--out FILE])

12 layers, 512 wide, 8 heads, 2 key/value heads, float32, batch 1. All contenders run in one
process on the same weights and tokens, turn by turn; times are medians, memory is the growth of
the process's resident set during one pass, sampled every millisecond. TransformerLens takes part
where it is installed and runs hooks that keep the column sums of every pattern.
"""

import argparse
import contextlib
import ctypes
import gc
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import attnscope

LAYERS, WIDTH, HEADS, KV_HEADS, VOCABULARY = 12, 512, 8, 2, 4096


def build() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=16384,
    )
    return Qwen2ForCausalLM(config).eval()


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest resident set of this process while the block runs, above its start."""

    def __enter__(self) -> "Peak":
        gc.collect()
        with contextlib.suppress(OSError):
            # Give freed memory back, or a pass could hide in what an earlier one left.
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.start = self.top = resident()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done.wait(0.001):
            self.top = max(self.top, resident())

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()
        self.bytes = self.top - self.start


def measure(runs: dict[str, Callable[[], None]], turns: int) -> dict[str, tuple[float, float]]:
    """Median seconds and peak bytes of each contender, turn by turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    turns_of = {}
    for name, run in runs.items():  # to warm up, and to give slow ones fewer turns
        begin = time.perf_counter()
        run()
        turns_of[name] = max(1, min(turns, int(30 / (time.perf_counter() - begin))))
    for turn in range(turns):
        for name, run in runs.items():
            if turn < turns_of[name]:
                begin = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - begin)
    memory = {}
    for name, run in runs.items():
        taken = []
        for _ in range(min(3, turns_of[name])):
            with Peak() as peak:
                run()
            taken.append(float(peak.bytes))
        memory[name] = statistics.median(taken)
    return {name: (statistics.median(seconds[name]), memory[name]) for name in runs}


def contenders(model: Qwen2ForCausalLM, ids: torch.Tensor) -> dict[str, Callable[[], None]]:
    def plain() -> None:
        model(ids, logits_to_keep=1, use_cache=False)

    def watched(queries: str) -> None:
        with attnscope.watch(model, queries=queries) as scope:
            model(ids, logits_to_keep=1, use_cache=False)
        scope.received(0)

    def eager() -> None:
        model.set_attn_implementation("eager")
        try:
            out = model(ids, logits_to_keep=1, use_cache=False, output_attentions=True)
            [weights.sum(2) for weights in out.attentions]
        finally:
            model.set_attn_implementation("sdpa")

    return {
        "plain sdpa": plain,
        "attnscope, all queries": lambda: watched("all"),
        "attnscope, last": lambda: watched("last"),
        "eager, output_attentions": eager,
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="512,2048,4096,8192")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--eager-limit", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = build()
    lens = lens_contender(model)
    lines = [
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "",
        "| tokens | what | s | ratio | peak MiB | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    for size in map(int, options.sizes.split(",")):
        ids = torch.randint(0, VOCABULARY, (1, size))
        runs = contenders(model, ids)
        if lens is not None:
            runs["TransformerLens"] = lambda ids=ids: lens(ids)
        if size > options.eager_limit:  # n × n weights of 12 layers do not fit
            runs = {n: r for n, r in runs.items() if n.startswith(("plain", "attnscope"))}
        results = measure(runs, options.turns)
        base = results["plain sdpa"]
        for name, (seconds, memory) in results.items():
            line = (
                f"| {size} | {name} | {seconds:.3f} | {seconds / base[0]:.2f} | "
                f"{memory / 2**20:.0f} | {memory / max(base[1], 1):.2f} |"
            )
            lines.append(line)
            print(line, flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def lens_contender(model: Qwen2ForCausalLM) -> Callable[[torch.Tensor], None] | None:
    """TransformerLens on the same weights: column sums of every pattern, by hooks."""
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        print("TransformerLens is not installed here; `make bench` installs it\n")
        return None
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w1", eos_token="w2", pad_token="w0"
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(folder, device="cpu")
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(LAYERS)]

    def run(ids: torch.Tensor) -> None:
        sums = []

        def keep(pattern: torch.Tensor, hook: Any) -> None:
            sums.append(pattern.sum(2))

        bridge.run_with_hooks(ids, fwd_hooks=[(name, keep) for name in names])
        assert len(sums) == LAYERS

    return run


if __name__ == "__main__":
    main()
