"""Attention statistics without the matrix: `reduce(KernelRows) -> AttentionSums`, sums over rows,
in three
kernels; and `by_query(KernelRows, PerQueryRequest) -> PerQueryResult`, what single rows hold, in
three.

`reference` is the definition (dense, float64), `streaming` runs on any device (on a CPU mostly by
`compiled`; rows one by one are told by `single`), `triton` on CUDA.
"""

import os
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from attnscope.errors import InputError, unknown
from attnscope.kernels.call import (
    AttentionCall,
    AttentionSums,
    KernelRows,
    VisibleRanges,
    has_triton,
)
from attnscope.kernels.one_row import PerQueryRequest, PerQueryResult

__all__ = [
    "BACKENDS",
    "AttentionCall",
    "AttentionSums",
    "KernelRows",
    "PerQueryRequest",
    "PerQueryResult",
    "VisibleRanges",
    "choose",
    "kernel",
    "layers",
    "refine",
    "tell_rows",
]

BACKENDS = ("reference", "streaming", "triton")


class Reduce(Protocol):
    """What a kernel is: the totals of some rows."""

    def __call__(self, rows: KernelRows) -> AttentionSums: ...


def choose(backend: str, device: torch.device) -> str:
    """The kernel to use on a device: the one asked for, or the fastest that runs there."""
    if backend == "auto":
        return "triton" if device.type == "cuda" and has_triton() else "streaming"
    if backend not in BACKENDS:
        raise unknown("backend", backend, ("auto", *BACKENDS, "eager-fallback"))
    if backend == "triton":
        if not has_triton():
            raise InputError(
                "backend 'triton' needs the triton package; pip install triton, or use 'auto'",
                code="triton-not-installed",
            )
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise InputError(
                f"backend 'triton' needs a CUDA device, and this model is on {device}; "
                "use 'streaming' or 'auto'",
                code="triton-needs-cuda",
                device=str(device),
            )
    return backend


class ExactLse(Protocol):
    """The log-sum-exp of whole rows in float64, and how far the given one was from it [B, H]."""

    def __call__(self, rows: KernelRows) -> tuple[Tensor, Tensor]: ...


def exact_lse(backend: str) -> ExactLse:
    """The `exact_lse` of a kernel: what it must know of whole rows before it sees parts of them."""
    return cast(ExactLse, import_module(f"attnscope.kernels.{backend}").exact_lse)


def kernel(backend: str) -> Reduce:
    """The `reduce` of a kernel, imported when it is first used."""
    return cast(Reduce, import_module(f"attnscope.kernels.{backend}").reduce)


class ReduceLayers(Protocol):
    """The totals of several layers whose rows are those given but for their tensors; None where
    these must be laid side by side first."""

    def __call__(
        self, rows: KernelRows, q: list[Tensor], k: list[Tensor], lse: list[Tensor], first: int
    ) -> AttentionSums | None: ...


def layers_kernel(backend: str) -> ReduceLayers | None:
    """The kernel for layers that lie apart, where there is one."""
    if backend != "triton":
        return None
    return cast(ReduceLayers, import_module(f"attnscope.kernels.{backend}").reduce_layers)


class ReducePerQuery(Protocol):
    """What every row holds, of what is asked for."""

    def __call__(self, rows: KernelRows, request: PerQueryRequest) -> PerQueryResult: ...


def per_query_kernel(backend: str) -> ReducePerQuery:
    """The `by_query` of a kernel."""
    module = backend if backend in ("reference", "triton") else "one_row"
    return cast(ReducePerQuery, import_module(f"attnscope.kernels.{module}").by_query)
