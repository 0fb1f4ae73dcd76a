"""Attention statistics without the attention matrix.

Each backend is a module with three functions: `reduce` sums over rows, `by_query` returns numbers
per row, `exact_lse` prepares partial rows. `KernelRows` lists the legal inputs.

- `reference`: the definition, dense and in float64; for short texts.
- `streaming`: complete, in torch, on any device. It uses `numba_kernel` for most calls on a CPU.
- `triton`: CUDA. It uses `streaming` for float32 and for biases by key and distance.
"""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from attnscope.errors import InputError, unknown
from attnscope.kernels.call import AttentionCall, ScoreSpec, VisibleRanges, has_triton
from attnscope.kernels.one_row import PerQueryRequest, PerQueryResult
from attnscope.kernels.rows import AttentionSums, KernelRows, RowBlock

__all__ = [
    "BACKENDS",
    "AttentionCall",
    "AttentionSums",
    "KernelRows",
    "PerQueryRequest",
    "PerQueryResult",
    "RowBlock",
    "ScoreSpec",
    "VisibleRanges",
    "choose",
    "exact_lse",
    "installed_kernels",
    "kernel",
    "layers_kernel",
    "per_query_kernel",
]

BACKENDS = ("reference", "streaming", "triton")


class Backend(Protocol):
    """The functions of a backend's module."""

    def reduce(self, rows: KernelRows) -> AttentionSums:
        """The sums over some rows."""

    def by_query(self, rows: KernelRows, request: PerQueryRequest) -> PerQueryResult:
        """The requested numbers of every row."""

    def exact_lse(self, rows: KernelRows) -> tuple[Tensor, Tensor]:
        """The log-sum-exp of full rows in float64, and the largest error of the given one."""


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


def installed_kernels() -> dict[str, str]:
    """The fastest installed kernel for a CPU and for CUDA, or what to install for a faster one."""
    numba = "torch, slower than numba: pip install 'attnscope[cpu]'"
    triton = "torch, slower than triton: pip install triton"
    return {
        "kernel on a CPU": "numba" if find_spec("numba") is not None else numba,
        "kernel on CUDA": "triton" if has_triton() else triton,
    }


def _backend(name: str) -> Backend:
    """The module of a backend, imported when it is first used."""
    return cast(Backend, import_module(f"attnscope.kernels.{name}"))


def kernel(backend: str) -> Callable[[KernelRows], AttentionSums]:
    """The `reduce` of a backend."""
    return _backend(backend).reduce


def per_query_kernel(backend: str) -> Callable[[KernelRows, PerQueryRequest], PerQueryResult]:
    """The `by_query` of a backend."""
    return _backend(backend).by_query


def exact_lse(backend: str) -> Callable[[KernelRows], tuple[Tensor, Tensor]]:
    """The `exact_lse` of a backend, which sampling needs before rows are split."""
    return _backend(backend).exact_lse


def layers_kernel(backend: str) -> Callable[..., AttentionSums | None] | None:
    """The kernel for layers in separate tensors, `triton.reduce_layers`; None if there is none."""
    if backend != "triton":
        return None
    from attnscope.kernels import triton

    return triton.reduce_layers
