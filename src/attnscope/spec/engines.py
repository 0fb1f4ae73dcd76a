"""What an experiment with `engine: vllm` may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.errors import InputError
from attnscope.measures.registry import MEASURES
from attnscope.spec.queries import parse_queries

if TYPE_CHECKING:
    from attnscope.spec.experiment import Experiment

VLLM_NEEDS = {"sums", "rows"}
"""What measures may need of a pass: vLLM's workers send sums and attention rows."""


def check_vllm(experiment: Experiment) -> None:
    """Raise an error for what vLLM cannot measure or do."""
    for name in experiment.measures:
        if needs := MEASURES[name].needs - VLLM_NEEDS:
            raise not_with_vllm(f"measure {name!r} (it needs {', '.join(sorted(needs))})", name)
    for name, condition in experiment.conditions.items():
        for intervention in ("knockout", "steer", "arm"):
            if getattr(condition, intervention) is not None:
                raise not_with_vllm(f"condition {name!r} ({intervention})", name)
    for queries in experiment.queries:
        if parse_queries(queries).sample:
            raise not_with_vllm(f"queries {queries!r}", queries)
    if experiment.generate is not None and experiment.generate.sample:
        raise not_with_vllm("generate.sample: its random numbers differ", "sample")
    if experiment.backend == "eager-fallback":
        raise not_with_vllm("backend eager-fallback", experiment.backend)


def not_with_vllm(what: str, value: str) -> InputError:
    """The error for a part of an experiment that vLLM does not measure or do."""
    return InputError(
        f"engine: vllm does not support {what}; leave it out, or use engine: transformers",
        code="not-with-vllm",
        value=value,
    )
