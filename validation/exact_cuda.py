"""How exact the CUDA kernels are on the queries and keys of trained models.

    python validation/exact_cuda.py keep FILE FOLDER …     where the models are: queries and keys
    PYTHONPATH=src python validation/exact_cuda.py FILE    where the GPU is

Kept are float32 queries and keys of three layers that see all before them: the one with the
largest scores, one in the middle of that order, the last. Measured, in float32, bfloat16 and
float16, on the same rounded tensors: the largest deviation from float64 over heads and keys, ours
(with the log-sum-exp of the fused operator, as a watch has it) and that of torch's
`softmax(q @ k.T * scale)`, products in the given type, softmax in float32. The ratio leaves out
what float32 rounds of the number itself, 4 eps of it.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnscope.interception.hooks import Hook
from attnscope.kernels import (
    AttentionCall,
    AttentionSums,
    KernelRows,
    VisibleRanges,
    kernel,
    reference,
)
from attnscope.kernels.attend import attend

ROUNDING = 4 * torch.finfo(torch.float32).eps
TOKENS = 600
SCALARS = ("mass", "entropy", "self_mass")


class Tensors(Hook):
    """Keeps queries, keys and scale of every layer."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def on_call(self, seen: Any) -> None:
        """Keep one layer, if its queries see all before them."""
        if seen.spec.visible.form == "causal":
            self.kept[seen.site.layer] = seen.q, seen.k, seen.scale


@torch.no_grad()
def keep(file: str, folders: list[str]) -> None:
    """Write queries and keys of these models."""
    import transformers as hf
    from safetensors.torch import save_file

    from attnscope.interception import sites
    from attnscope.interception.intercept import register
    from exact_cpu import text_of

    out: dict[str, Tensor] = {}
    for folder in folders:
        model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids, seen = text_of(hf.AutoTokenizer.from_pretrained(folder), TOKENS), Tensors()
        with register(sites.find(model), seen):
            model(ids, use_cache=False)
        reach = {
            layer: float(q.norm(dim=-1).max() * k.norm(dim=-1).max() * scale)
            for layer, (q, k, scale) in seen.kept.items()
        }
        order = sorted(reach, key=lambda layer: -reach[layer])
        for layer in sorted({order[0], order[len(order) // 2], max(order)}):
            q, k, scale = seen.kept[layer]
            name = f"{Path(folder).name}.layer {layer}"
            out |= {f"{name}.q": q.contiguous(), f"{name}.k": k.contiguous()}
            out[f"{name}.scale"] = torch.tensor(scale, dtype=torch.float64)
    save_file(out, file)


def cases(file: str) -> dict[str, tuple[Tensor, Tensor, float]]:
    """By name: queries, keys and scale; beside those of the file one of large random biases."""
    from safetensors.torch import load_file

    found = load_file(file)
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, TOKENS, 64), torch.randn(1, 2, TOKENS, 64)
    q[..., :4] += 81.0
    k[..., :4] += 145.0 * torch.randn(4).sign()
    names = sorted({name.rpartition(".")[0] for name in found})
    return {
        "random, large biases": (q, k, 0.125),
        **{
            name: (found[f"{name}.q"], found[f"{name}.k"], float(found[f"{name}.scale"]))
            for name in names
        },
    }


def softmax(rows: KernelRows) -> AttentionSums:
    """What torch's product and softmax in the given type make of these rows."""
    n = rows.q.shape[2]
    k = rows.k.repeat_interleave(rows.q.shape[1] // rows.k.shape[1], 1)
    scores = (rows.q @ k.transpose(2, 3) * rows.scale).float()
    later = torch.ones(n, n, dtype=torch.bool, device=k.device).triu(1)
    A = torch.softmax(scores.masked_fill(later, -torch.inf), -1).double()
    start, _, own = rows.bounds()
    return reference.totals(A, own, start.float(), None, None, None, 0)


def compared(rows: KernelRows) -> tuple[str, float, float, float]:
    """The measure where ours compares worst with torch's: name, both deviations, ratio."""
    wanted, ours, torchs = reference.reduce(rows), kernel("triton")(rows), softmax(rows)
    worst = ("", 0.0, 0.0, -1.0)
    n = rows.q.shape[2]
    for name in ("received", "received_later", *SCALARS):
        truth = getattr(wanted, name).double()
        each = n if name in SCALARS else 1  # averages, as a scope returns them
        off, their = ((getattr(x, name).double() - truth).abs() / each for x in (ours, torchs))
        beyond = (off - ROUNDING * truth.abs() / each).clamp(min=0).max()
        ratio = float(beyond / their.max()) if float(their.max()) else float(beyond > 0)
        if ratio > worst[3]:
            worst = name, float(off.max()), float(their.max()), ratio
    return worst


@torch.no_grad()
def measure(file: str) -> None:
    """Print the table."""
    print("| queries and keys | type | scores up to | measure | ours | torch | ratio |")
    print("| --- " * 7 + "|")
    for name, (q, k, scale) in cases(file).items():
        reach = float(q.norm(dim=-1).max() * k.norm(dim=-1).max() * scale)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            some, other = q.to("cuda", dtype), k.to("cuda", dtype)
            n = q.shape[2]
            own = torch.arange(n, device="cuda", dtype=torch.int32)[None]
            bounds = torch.zeros_like(own), own + 1
            visible = VisibleRanges(form="causal", bounds=lambda bounds=bounds: bounds)
            call = AttentionCall(layer=0, q=some, k=other, v=other, scale=scale, visible=visible)
            lse = attend(call)[1]
            rows = KernelRows(
                q=some, k=other, scale=scale, causal=True, start=bounds[0], stop=bounds[1],
                self_key=own, lse=lse,
            )  # fmt: skip
            measure, ours, torchs, ratio = compared(rows)
            print(
                f"| {name} | {str(dtype).removeprefix('torch.')} | {reach:.0f} | {measure} | "
                f"{ours:.1e} | {torchs:.1e} | {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        keep(sys.argv[2], sys.argv[3:])
    else:
        measure(sys.argv[1])
