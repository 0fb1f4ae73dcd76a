"""Qwen2.5-7B's shape on one GPU: a plain sdpa forward pass against the same pass watched.

    PYTHONPATH=src python benchmarks/gpu.py [--sizes 64x128,1x1024,…] [--out table.md]

First checks the kernels against the float64 reference on the same inputs, then times both sides
in one process, turn by turn, and prints the median ratios. Weights are random: the work is the
same as with trained ones.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import attnscope
from attnscope.kernels import Rows, kernel, reference

SIZES = "64x128,1x1024,1x4096,1x16384,1x32768,1x131072"
EAGER_LIMIT = 8192  # tokens; beyond it the weights of 28 layers do not fit


def build() -> Qwen2ForCausalLM:
    config = Qwen2Config(
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
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def check() -> list[str]:
    """bfloat16 kernels against float64 on the same inputs."""
    lines = []
    for n, window in ((2048, None), (2048, 300)):
        q = torch.randn(1, 28, n, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, 4, n, 128, device="cuda", dtype=torch.bfloat16)
        own = torch.arange(n, device="cuda", dtype=torch.int32)[None]
        start = torch.zeros_like(own) if window is None else (own - window + 1).clamp(min=0)
        rows = Rows(
            q=q,
            k=k,
            scale=128**-0.5,
            start=start,
            stop=own + 1,
            own=own,
            causal=window is None,
        )
        wanted, got = reference.reduce(rows), kernel("triton")(rows)
        off = {
            name: ((getattr(got, name) - getattr(wanted, name)).abs().max()
                   / getattr(wanted, name).abs().max()).item()
            for name in ("received", "later", "entropy", "own", "mass", "lse")
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


def turns(
    runs: dict[str, Callable[[], None]], seconds: float
) -> dict[str, tuple[float, float]]:
    """Median seconds and peak memory of each, taken turn by turn for about so long."""
    for run in runs.values():  # compile, and let the allocator settle
        run()
        run()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    begin = time.perf_counter()
    while not samples[next(iter(runs))] or time.perf_counter() - begin < seconds:
        for name, run in runs.items():
            samples[name].append(timed(run))
    return {
        name: (statistics.median(t for t, _ in taken), max(m for _, m in taken))
        for name, taken in samples.items()
    }


def coverage(model: Qwen2ForCausalLM, ids: torch.Tensor, sample: str) -> float:
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


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"Qwen2.5-7B's config, random weights, bfloat16, 28 layers",
        *check(),
        "",
        "| batch × tokens | what | ms | ratio | peak GiB | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    model = build()
    for size in options.sizes.split(","):
        batch, tokens = map(int, size.split("x"))
        ids = torch.randint(0, 152064, (batch, tokens), device="cuda")
        kept: list[attnscope.Scope] = []

        def plain(ids: torch.Tensor = ids) -> None:
            model(ids, logits_to_keep=1, use_cache=False)

        def watched(queries: str, ids: torch.Tensor = ids, kept: list = kept) -> None:
            kept.clear()
            with attnscope.watch(model, queries=queries) as scope:
                model(ids, logits_to_keep=1, use_cache=False)
            kept.append(scope)

        runs = {"plain sdpa": plain, "all queries": lambda: watched("all"),
                "last": lambda: watched("last")}
        if tokens >= 16384:
            runs["sample:4096"] = lambda: watched("sample:4096")
        if batch * tokens * tokens <= EAGER_LIMIT * EAGER_LIMIT // 4:
            def eager(ids: torch.Tensor = ids) -> None:
                model.set_attn_implementation("eager")
                try:
                    model(ids, logits_to_keep=1, use_cache=False, output_attentions=True)
                finally:
                    model.set_attn_implementation("sdpa")
            runs["eager, output_attentions"] = eager
        results = turns(runs, options.seconds)
        kept.clear()
        base = results["plain sdpa"]
        for name, (seconds, memory) in results.items():
            line = (
                f"| {batch} × {tokens} | {name} | {1e3 * seconds:.1f} | "
                f"{seconds / base[0]:.3f} | {memory / 2**30:.2f} | {memory / base[1]:.3f} |"
            )
            lines.append(line)
            print(line, flush=True)
        if "sample:4096" in runs:
            line = f"sample:4096 at {size}: {coverage(model, ids, 'sample:4096'):.4%} within 3 SE"
            lines.append(line)
            print(line, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
