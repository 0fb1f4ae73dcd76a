"""What interventions cost on one GPU, at the size of Qwen2.5-7B and at SmolLM2's.

    PYTHONPATH=src python benchmarks/interventions.py [--cases 7b:1x4096,7b:1x1024] [--seconds 5]
                                                      [--out table.md]
    PYTHONPATH=src python benchmarks/interventions.py --parts 4096x18944

First checks them there: knockout and steering against the same model on the CPU, ARM against its
definition on the CPU, and that neither ever waits for the device. Then times a plain forward pass
and one under each, turn by turn, and ARM beside a version whose percentiles come from the host.
`--parts` times what ARM does to tokens × activations, and counting with other sizes of its kernel.
Weights are random: the work is the same as with trained ones.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

import attnscope
from attnscope.interventions.redistribute import NORMAL, Bounds, apply_shift, bounds, redistribute
from gpu import build, samples_of, turns

CASES = "7b:1x4096,7b:1x1024,135m:1x1024"
Block = Callable[[], AbstractContextManager[Any]]


def blocks(model: Any, ids: torch.Tensor) -> dict[str, Block]:
    """Every kind of intervention: whom it means, and so which way it is computed."""
    keys = torch.arange(ids.shape[1]).expand(len(ids), -1) % 7 == 3
    return {
        "knockout": lambda: attnscope.knockout(model, keys=keys),
        "knockout, last query": lambda: attnscope.knockout(model, keys=keys, queries="last"),
        "knockout, two heads": lambda: attnscope.knockout(model, keys=keys, heads=[0, 3]),
        "steer": lambda: attnscope.steer(model, keys=keys, factor=3.0),
        "arm, one layer": lambda: attnscope.arm(model),
    }


@contextmanager
def arm_on_the_host(model: Any) -> Iterator[None]:
    """ARM in the first layer, its percentiles made by numpy."""

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        a = output.float().cpu().numpy()
        size = np.abs(a)
        middle = np.median(size)
        near = NORMAL * 0.25 * np.median(np.abs(size - middle))
        share = np.clip(np.mean(size < near), 0.02, 0.25)
        found = np.percentile(size, 100 * share), np.percentile(a, 85), min(a.min(), 0)
        near, high, low = (torch.tensor([n], device=output.device).float() for n in found)
        drawn = torch.rand(output.shape, device=output.device)
        return apply_shift(output, drawn, Bounds(near=near, high=high.clamp(min=0), low=low))

    handle = model.model.layers[0].mlp.act_fn.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def check() -> list[str]:
    """The same on both devices, and nothing waited for."""
    lines = []
    model = build("135m").float()
    here = copy.deepcopy(model).cpu()
    ids = torch.randint(5, 990, (2, 300))
    there = blocks(model, ids)
    for name, block in blocks(here, ids).items():
        if name.startswith("arm"):  # a CPU and a GPU draw different amounts
            continue
        with block():
            wanted = here(ids).logits
        with there[name]():
            got = model(ids.cuda()).logits.cpu()
        off = float((got - wanted).abs().max() / wanted.abs().max())
        plain = float((here(ids).logits - wanted).abs().max() / wanted.abs().max())
        lines.append(f"{name}: logits off by {off:.1e} of the largest (its effect: {plain:.1e})")
        assert off < 1e-3, lines[-1]
    lines += [f"{name} waits for the device: {waiting(model, b)}" for name, b in there.items()]
    return lines


def waiting(model: Any, block: Block) -> str:
    ids = torch.randint(5, 990, (2, 300), device="cuda")
    for mode in ("default", "default", "error"):  # compile first
        with block():
            torch.cuda.set_sync_debug_mode(mode)
            try:
                model(ids, logits_to_keep=1)
            except RuntimeError as error:
                return str(error).splitlines()[0]
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return "never"


def measure(name: str, seconds: float) -> list[str]:
    shape, _, size = name.partition(":")
    model = build(shape)
    batch, tokens = map(int, size.split("x"))
    ids = torch.randint(5, 990, (batch, tokens), device="cuda")

    def plain() -> None:
        model(ids, logits_to_keep=1, use_cache=False)

    def under(block: Block) -> Callable[[], None]:
        def run() -> None:
            with block():
                plain()

        return run

    every = {what: under(block) for what, block in blocks(model, ids).items()}
    results = turns(samples_of({"plain": plain, **every}), seconds)
    # By itself: it takes so long that the others would be timed once.
    host = {"plain": plain, "arm, percentiles on the host": under(lambda: arm_on_the_host(model))}
    slow = turns(samples_of(host), seconds / 5)
    lines = []
    for table in (results, slow):
        for what, (took, memory, ratio) in table.items():
            if table is results or what != "plain":
                lines.append(
                    f"| {name} | {what} | {1e3 * took:.1f} | {ratio:.3f} | {memory / 2**30:.2f} |"
                )
    return lines


def parts(tokens: int, width: int, seconds: float) -> list[str]:
    """What ARM's steps take on activations of bfloat16."""
    a = torch.nn.functional.silu(1.2 * torch.randn(1, tokens, width, device="cuda")).bfloat16()
    runs = {"all of it": lambda: redistribute(a, [3]), "bounds": lambda: bounds(a)}
    took = turns(samples_of(runs), seconds)
    return [f"| {what} | {1e3 * each:.3f} |" for what, (each, *_) in took.items()]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", metavar="TOKENSxACTIVATIONS")
    options = parser.parse_args()
    if options.parts:
        tokens, width = map(int, options.parts.split("x"))
        print("\n".join(["| what | ms |", "| --- | --- |", *parts(tokens, width, options.seconds)]))
        return
    logging.set_verbosity_error()
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, random weights"]
    lines += check()
    lines += ["", "| case | what | ms | ratio | peak GiB |", "| --- " * 5 + "|"]
    print("\n".join(lines), flush=True)
    for name in options.cases.split(","):
        found = measure(name, options.seconds)
        print("\n".join(found), flush=True)
        lines += found
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
