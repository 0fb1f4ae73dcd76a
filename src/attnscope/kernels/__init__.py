"""Attention statistics without the attention matrix.

`reduce(KernelRows) -> AttentionSums` sums over rows; `by_query(KernelRows, PerQueryRequest) ->
PerQueryResult` returns numbers per row. There are three kernels: `reference` is the definition
(dense, float64), `streaming` runs on any device (mostly `numba_kernel` on a CPU; `one_row` for
numbers per row), `triton` on CUDA.
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
    "exact_lse",
    "kernel",
    "layers_kernel",
    "per_query_kernel",
]

BACKENDS = ("reference", "streaming", "triton")


class Reduce(Protocol):
    """The type of a kernel: the sums over some rows."""

    def __call__(self, rows: KernelRows) -> AttentionSums: ...


def choose(backend: str, device: torch.device) -> str:
    """The kernel for a device: `backend`, or the fastest available one for "auto"."""
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
    """The log-sum-exp of full rows in float64, and the largest error of the given one [B, H]."""

    def __call__(self, rows: KernelRows) -> tuple[Tensor, Tensor]: ...


def exact_lse(backend: str) -> ExactLse:
    """The `exact_lse` of a kernel, which sampling needs before rows are split."""
    return cast(ExactLse, import_module(f"attnscope.kernels.{backend}").exact_lse)


def kernel(backend: str) -> Reduce:
    """The `reduce` of a kernel, imported when it is first used."""
    return cast(Reduce, import_module(f"attnscope.kernels.{backend}").reduce)


class ReduceLayers(Protocol):
    """The sums of several layers that differ only in q, k and lse; None if the layers must be
    stacked first."""

    def __call__(
        self, rows: KernelRows, q: list[Tensor], k: list[Tensor], lse: list[Tensor], first: int
    ) -> AttentionSums | None: ...


def layers_kernel(backend: str) -> ReduceLayers | None:
    """The kernel for layers in separate tensors; None if the backend has none."""
    if backend != "triton":
        return None
    return cast(ReduceLayers, import_module(f"attnscope.kernels.{backend}").reduce_layers)


class ReducePerQuery(Protocol):
    """The requested numbers of every row."""

    def __call__(self, rows: KernelRows, request: PerQueryRequest) -> PerQueryResult: ...


def per_query_kernel(backend: str) -> ReducePerQuery:
    """The `by_query` of a kernel."""
    module = backend if backend in ("reference", "triton") else "one_row"
    return cast(ReducePerQuery, import_module(f"attnscope.kernels.{module}").by_query)
