"""What watching costs on one GPU: forward passes and generation, a large shape and a small one.

    PYTHONPATH=src python benchmarks/gpu.py [--cases 7b:1x1024,135m:generate:1x512+64,…]
                                            [--seconds 5] [--out table.md] [--before FOLDER]

First checks the kernels against the float64 reference on the same inputs, generation against the
same reference under three kinds of cache, and that a watched pass never waits for the device.
Then times plain and watched in one process, turn by turn, and prints the median of the turns'
ratios. A watched run reads `received` of every layer. "rows" is a watch that keeps queries and
keys, and then the masses of 8 classes of every query, in bins of 64. "pictures" begins each prompt
with 4 pictures of 576 tokens in the shape of LLaVA 1.5 7B. "training" is a forward and a backward
pass without an optimizer, watched in one layer of four.
With `--before`, the build whose `src` is that folder runs in a second process, in the same turns,
and only "plain" and "all" are timed.
Weights are random: the work is the same as with trained ones.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers.utils import logging

import attnscope
from attnscope.errors import AttnscopeWarning
from attnscope.kernels import KernelRows, kernel, reference

CASES = (
    "7b:1x128,7b:1x1024,7b:1x4096,7b:64x128,7b:8x2048,7b:generate:1x512+64,"
    "7b:generate:16x512+64,7b:1x32768,7b:rows:1x32768,7b:1x131072,"
    "135m:1x128,135m:1x1024,135m:64x128,135m:generate:1x512+64,135m:generate:16x512+64,"
    "7b:compiled:1x1024,135m:compiled:1x1024,llava:pictures:1x128,7b:training:1x1024"
)
PICTURES = 4  # of a case with pictures, each of 576 tokens
EAGER_LIMIT = 4096  # tokens; beyond it eager attention is left out

SHAPES: dict[str, Callable[[], Any]] = {
    "7b": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            max_position_embeddings=131072,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            use_sliding_window=False,
            tie_word_embeddings=False,
            eos_token_id=None,
        )
    ),
    "135m": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            eos_token_id=None,
        )
    ),
    "llava": lambda: hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            text_config=hf.LlamaConfig(
                vocab_size=32064,
                hidden_size=4096,
                intermediate_size=11008,
                num_hidden_layers=32,
                num_attention_heads=32,
                max_position_embeddings=4096,
                eos_token_id=None,
            ),
            vision_config=hf.CLIPVisionConfig(
                hidden_size=1024,
                intermediate_size=4096,
                num_hidden_layers=24,
                num_attention_heads=16,
                image_size=336,
                patch_size=14,
                projection_dim=768,
            ),
            image_token_index=32000,
        )
    ),
    "window": lambda: hf.MistralForCausalLM(
        hf.MistralConfig(
            vocab_size=997,
            hidden_size=512,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            sliding_window=96,
            eos_token_id=None,
        )
    ),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return SHAPES[name]().eval()
    finally:
        torch.set_default_dtype(before)


def check_generation() -> list[str]:
    """A watched generation against the float64 reference, measured at once, on the same inputs."""
    lines = []
    for name, cache in (("135m", "dynamic"), ("135m", "static"), ("window", "dynamic")):
        model = build(name)
        ids = torch.randint(5, 990, (3, 150), device="cuda")
        real = torch.ones_like(ids)
        real[1, :40] = 0
        settings = {"attention_mask": real, "cache_implementation": cache}
        with attnscope.watch(model, backend="reference") as wanted:
            generate(model, ids * real, 24, **settings)
        with attnscope.watch(model) as got:
            generate(model, ids * real, 24, **settings)
        worst = max(
            ((got.received(n) - wanted.received(n)).abs() / wanted.received(n).clamp(min=1))
            .max()
            .item()
            for n in got.layers
        )
        assert worst < 2e-3, (name, cache, worst)
        lines.append(f"generation, {name}, {cache} cache: received off by {worst:.1e} at most")
    return lines


def check_no_waiting() -> str:
    """A pass without padding, watched, under the eyes of torch's own detector."""
    model, ids = build("135m"), torch.randint(5, 990, (2, 200), device="cuda")
    for _ in range(2):  # compile first
        with attnscope.watch(model) as scope:
            model(ids, logits_to_keep=1)
    with attnscope.watch(model) as scope:
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(ids, logits_to_keep=1)
        except RuntimeError as error:
            return f"a watched pass waits for the device: {error}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    scope.received(0)
    return "a watched pass waits for the device: never"


def generate(model: Any, ids: torch.Tensor, new: int, **more: Any) -> None:
    settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new}
    model.generate(input_ids=ids, **{"attention_mask": torch.ones_like(ids), **settings, **more})


def check() -> list[str]:
    """bfloat16 kernels against float64 on the same inputs."""
    lines = []
    for n, window in ((2048, None), (2048, 300)):
        q = torch.randn(1, 28, n, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, 4, n, 128, device="cuda", dtype=torch.bfloat16)
        own = torch.arange(n, device="cuda", dtype=torch.int32)[None]
        start = torch.zeros_like(own) if window is None else (own - window + 1).clamp(min=0)
        rows = KernelRows(
            q=q,
            k=k,
            scale=128**-0.5,
            start=start,
            stop=own + 1,
            self_key=own,
            causal=window is None,
        )
        wanted, got = reference.reduce(rows), kernel("triton")(rows)
        off = {
            name: (
                (getattr(got, name) - getattr(wanted, name)).abs().max()
                / getattr(wanted, name).abs().max()
            ).item()
            for name in ("received", "received_later", "entropy", "self_mass", "mass", "lse")
        }
        worst = max(off.values())
        assert worst < 2e-3, off
        lines.append(f"n={n}, window={window}: largest relative error {worst:.1e}")
    return lines


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds and peak bytes of one run."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin, torch.cuda.max_memory_allocated()


Sample = Callable[[], tuple[float, float]]
"""Runs once and returns seconds and peak bytes."""
BEFORE = ", before"


def samples_of(runs: dict[str, Callable[[], Any]]) -> dict[str, Sample]:
    """Each run, timed."""
    return {name: partial(timed, run) for name, run in runs.items()}


def turns(
    runs: dict[str, Sample], seconds: float, least: int = 1
) -> dict[str, tuple[float, float, float]]:
    """Of each the median seconds, peak memory and median ratio to the plain run of its build in the
    same turn: the host changes its speed from minute to minute. Turn by turn for about so long,
    every other turn in the opposite order."""
    for run in runs.values():  # compile, and let the allocator settle
        run()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    begin, turn = time.perf_counter(), 0
    while turn < least or time.perf_counter() - begin < seconds:
        for name, run in list(runs.items())[:: 1 if turn % 2 else -1]:
            samples[name].append(run())
        turn += 1
    first = next(iter(samples))
    return {
        name: (
            statistics.median(t for t, _ in taken),
            max(m for _, m in taken),
            statistics.median(
                t / b
                for (t, _), (b, _) in zip(
                    taken, samples[first + BEFORE * name.endswith(BEFORE)], strict=True
                )
            ),
        )
        for name, taken in samples.items()
    }


class Bench:
    """One model on the GPU, and what is timed of it."""

    def __init__(self) -> None:
        self.model, self.built = None, ""

    def prepare(self, name: str) -> dict[str, Sample]:
        """The runs of a case. The model is built again if it is another."""
        case = name.split(":")
        gc.collect()
        torch.cuda.empty_cache()
        if case[0] != self.built:
            self.model = None
            gc.collect()
            torch.cuda.empty_cache()
            self.model, self.built = build(case[0]), case[0]
        return samples_of(contenders(self.model, case))


def serve() -> None:
    """The second process: prepares cases and times runs, as it is asked by the first."""
    answers, sys.stdout = sys.stdout, sys.stderr
    bench, runs = Bench(), {}
    for line in sys.stdin:
        verb, _, name = line.strip().partition(" ")
        if verb == "prepare":
            runs = bench.prepare(name)
            answer: tuple[Any, ...] = ("ready",)
        else:
            answer = runs[name]()
        print(*answer, file=answers, flush=True)


class OtherBuild:
    """A process that runs another build."""

    def __init__(self, src: Path):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(src)},
        )

    def ask(self, request: str) -> list[str]:
        """Its answer, a line of words."""
        assert self.process.stdin
        assert self.process.stdout
        print(request, file=self.process.stdin, flush=True)
        if not (answer := self.process.stdout.readline().split()):
            raise RuntimeError(f"the other build ended at {request!r}")
        return answer

    def time(self, what: str) -> tuple[float, float]:
        """One run: seconds and peak bytes."""
        seconds, memory = self.ask(f"time {what}")
        return float(seconds), float(memory)


def coverage(model: Any, ids: torch.Tensor, sample: str) -> float:
    """The share of keys whose sampled estimate lies within three standard errors of exact."""
    layers = [0, 13, 27]
    with attnscope.watch(model, layers=layers) as exact:
        model(ids, logits_to_keep=1, use_cache=False)
    with attnscope.watch(model, layers=layers, queries=sample) as estimate:
        model(ids, logits_to_keep=1, use_cache=False)
    inside = []
    for layer in layers:
        off = (estimate.received(layer) - exact.received(layer)).abs()
        error = 3 * estimate.received_error(layer) + 1e-4 * exact.received(layer)
        inside.append((off <= error).float().mean().item())
    return min(inside)


def rows_of(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    """A pass with `keep=True`, and the mass of every query on each of 8 classes, in bins of 64."""
    classes = torch.randint(0, 8, ids.shape, device=ids.device)

    def run() -> None:
        with attnscope.watch(model, keep=True) as scope:
            model(ids, logits_to_keep=1, use_cache=False)
        for layer in scope.layers:
            scope.rows(layer, classes, 8, bin=64)

    return run


def check_rows() -> list[str]:
    """Masses by query in bfloat16 against float64 on the same queries and keys."""
    lines = []
    for n, window in ((2048, None), (2048, 300), (16512, None)):
        H = 8 if n < 4096 else 2
        q = torch.randn(1, n, H, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        k = torch.randn(1, n, H // 2, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        classes = torch.randint(-1, 8, (1, n), device="cuda")
        few = torch.zeros(1, n, dtype=torch.bool)
        few[:, ::97] = True
        wanted = attnscope.from_tensors(q, k, window=window, queries=few, backend="reference")
        got = attnscope.from_tensors(q, k, window=window, backend="triton")
        at = wanted.query_positions(0)[0]
        off = (got.rows(0, classes, 8)[:, :, at] - wanted.rows(0, classes, 8)).abs().max().item()
        assert off < 1e-5, (n, window, off)
        lines.append(f"rows, n={n}, window={window}: masses off by {off:.1e} at most")
    return lines


def with_pictures(model: Any, ids: torch.Tensor, pictures: int) -> dict[str, torch.Tensor]:
    """The inputs of prompts that begin with pictures of random pixels."""
    tower, (batch, _) = model.config.vision_config, ids.shape
    places = pictures * (tower.image_size // tower.patch_size) ** 2
    images = torch.full((batch, places), model.config.image_token_id, device=ids.device)
    shape = (batch * pictures, 3, tower.image_size, tower.image_size)
    pixels = torch.randn(shape, device=ids.device, dtype=model.dtype)
    return {"input_ids": torch.cat([images, ids], 1), "pixel_values": pixels}


def training_steps(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], None]]:
    """A training step without the optimizer: plain, watched in one layer of four, and with a
    further pass over a probe prompt of 128 tokens, as `TrainerCallback` makes it."""
    layers = list(range(0, model.config.num_hidden_layers, 4))
    probe = ids[:1, :128]

    def step() -> None:
        with torch.enable_grad():
            model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    def read(scope: attnscope.Scope) -> None:
        for layer in scope.layers:
            for measure in ("entropy", "first_token", "max_logit"):
                scope.measure(measure, layer).cpu()

    def watched() -> None:
        with attnscope.watch(model, layers=layers, max_logit=True) as scope:
            step()
        read(scope)

    def probed() -> None:
        step()
        with attnscope.watch(model, layers=layers, max_logit=True) as scope:
            model(probe, logits_to_keep=1, use_cache=False)
        read(scope)

    return {"plain step": step, "watched step": watched, "step and probe": probed}


def contenders(model: Any, case: list[str]) -> dict[str, Callable[[], None]]:
    """What is timed against what, the plain run first."""
    size, _, new = case[-1].partition("+")
    batch, tokens = map(int, size.split("x"))
    ids = torch.randint(5, 990, (batch, tokens), device="cuda")
    kept: list[attnscope.Scope] = []
    called = torch.compile(model) if "compiled" in case else model

    prompt = with_pictures(model, ids, PICTURES) if "pictures" in case else {"input_ids": ids}
    # Without a cache, a compiled model of transformers always builds a dense mask.
    no_cache = {} if "compiled" in case else {"use_cache": False}

    def plain(by: Any = called) -> None:
        if new:
            generate(model, ids, int(new))
        else:
            by(**prompt, logits_to_keep=1, **no_cache)

    def watched(queries: str) -> Callable[[], None]:
        def run() -> None:
            kept.clear()
            with attnscope.watch(model, queries=queries) as scope:
                plain()
            for layer in scope.layers:
                scope.received(layer)
            kept.append(scope)

        return run

    if "training" in case:
        return training_steps(model, ids)
    if "rows" in case:
        return {"plain": plain, "rows of 8 classes": rows_of(model, ids)}
    runs = {"plain": plain, "all": watched("all"), "last": watched("last")}
    if "compiled" in case:
        runs.pop("plain")
        warnings.simplefilter("error", AttnscopeWarning)  # it would run uncompiled
        for _ in range(2):  # the first pass is checked uncompiled, the second compiles
            runs["all"]()
        return {"plain, compiled": plain, "plain, not compiled": lambda: plain(model), **runs}
    if new:
        return runs | {"generated": watched("generated")}
    if tokens >= 16384:
        runs["sample:4096"] = watched("sample:4096")
    if batch == 1 and tokens <= EAGER_LIMIT and "pictures" not in case:

        def eager() -> None:
            model.set_attn_implementation("eager")
            try:
                model(ids, logits_to_keep=1, use_cache=False, output_attentions=True)
            finally:
                model.set_attn_implementation("sdpa")

        runs["eager, output_attentions"] = eager
    return runs


def row(name: str, results: dict[str, tuple[float, float, float]]) -> str:
    """A line of the table: the plain pass, then every other one as ratios to it."""
    (seconds, plain, _), *others = results.values()
    ratios = (
        f"{what} {ratio:.3f} ({memory / plain:.3f})"
        for what, (_, memory, ratio) in zip(list(results)[1:], others, strict=True)
    )
    return f"| {name} | {1e3 * seconds:.1f} | {plain / 2**30:.2f} | {'; '.join(ratios)} |"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--least", type=int, default=6, help="turns of every case")
    parser.add_argument("--unchecked", action="store_true", help="time only")
    parser.add_argument("--before", type=Path, help="the src of a build to compare with")
    parser.add_argument("--serve", action="store_true", help="the second process of --before")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.set_verbosity_error()
    if options.serve:
        return serve()
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, random weights"]
    if not options.unchecked:
        lines += [*check(), *check_rows(), *check_generation(), check_no_waiting()]
    head = "| case | plain: ms | GiB | ratio of time (of memory) |"
    lines += ["", head, "| --- " * 4 + "|"]
    print("\n".join(lines), flush=True)
    bench = Bench()
    other = OtherBuild(options.before) if options.before else None
    for name in options.cases.split(","):
        runs = bench.prepare(name)
        if other is not None:
            other.ask(f"prepare {name}")
            own = {what: runs[what] for what in ("plain", "all")}
            runs = own | {what + BEFORE: partial(other.time, what) for what in own}
        least = 2 if name.endswith("131072") else options.least
        results = turns(runs, options.seconds, least)
        lines.append(row(name, results))
        print(lines[-1], flush=True)
        if "sample:4096" in results:
            batch, tokens = map(int, name.split(":")[-1].split("x"))
            ids = torch.randint(5, 990, (batch, tokens), device="cuda")
            inside = coverage(bench.model, ids, "sample:4096")
            lines.append(f"{name}: {inside:.4%} within 3 SE")
            print(lines[-1], flush=True)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
