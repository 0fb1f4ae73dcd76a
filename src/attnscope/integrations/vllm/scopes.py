"""Builds a `Scope` of each request from the sums that the workers send."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscope.errors import ScopeError
from attnscope.integrations.vllm.requests import RequestOptions
from attnscope.interception.generation import CompletionSpan
from attnscope.interception.geometry import Geometry
from attnscope.kernels import AttentionSums
from attnscope.scope.queries import Queries
from attnscope.scope.query_selection import select
from attnscope.scope.scope import Scope
from attnscope.scope.stored_rows import StoredRows
from attnscope.scope.sums import BY_KEY, SumsBlock


def join_workers(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result of a request from its parts: heads of tensor parallelism, layers of pipelines."""
    for part in parts:
        if part["error"] is not None:
            return part
    by_pipeline: dict[int, list[dict[str, Any]]] = {}
    for part in sorted(parts, key=lambda part: part["tensor_rank"]):
        by_pipeline.setdefault(part["pipeline_rank"], []).append(part)
    groups = [
        _join_heads([part["groups"][g] for part in same])
        for _, same in sorted(by_pipeline.items())
        for g in range(len(same[0]["groups"]))
    ]
    return parts[0] | {"groups": groups}


def _join_heads(parts: list[dict[str, Any]]) -> dict[str, Any]:
    if len(parts) == 1 or parts[0]["sums"] is None:
        return parts[0]
    all_sums: list[AttentionSums] = [part["sums"] for part in parts]
    joined: dict[str, Any] = {
        each.name: _cat([getattr(sums, each.name) for sums in all_sums])
        for each in fields(AttentionSums)
    }
    kept = [
        (same[0][0], torch.cat([weights for _, weights in same], 1))
        for same in zip(*(part["kept"] for part in parts), strict=True)
    ]
    return parts[0] | {"sums": AttentionSums(**joined), "kept": kept}


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present, 1) if present else None


def build_scope(
    sequences: Sequence[dict[str, Any]],
    *,
    queries: Queries,
    backend: str,
    dtype: torch.dtype,
    class_of: Tensor | None = None,
) -> Scope:
    """The scope of a request, with one sequence for each of its completions.

    If its sums are by class, the scope has columns in place of keys: the first token, then the
    classes. Only measures of `requests.BY_CLASS` are right then.

    Raises:
        ScopeError: The request was not measured, or some counted queries never ran.
    """
    for sequence in sequences:
        _check(sequence)
    lengths = torch.tensor([sequence["length"] for sequence in sequences])
    K = int(lengths.max())
    real = torch.arange(K) < lengths[:, None]
    ids = torch.stack([_row(sequence["token_ids"], K) for sequence in sequences])
    classes, n_classes = None, 0
    if class_of is not None:
        classes = class_of[ids.clamp(min=0)].where(ids >= 0, -1)
        n_classes = max(int(class_of.max()) + 1, 1)
    groups = sequences[0]["groups"]
    scope = Scope(
        layers=sorted(layer for group in groups for layer in group["layers"]),
        backend=backend,
        queries=queries,
        groups=n_classes,
    )
    scope._classes = classes
    scope._continued = True
    scope._first_token = torch.zeros(len(sequences), dtype=torch.int64)
    width = _columns(sequences) if sequences[0]["by_class"] else K
    scope._extents = dict.fromkeys(scope.layers, (K, width))
    scope._input_ids = [ids.clamp(min=0) if bool((ids >= 0)[real].all()) else None]
    scope._padding = real.long()
    counted = torch.stack([_counted(sequence, K) for sequence in sequences])
    for g, group in enumerate(groups):
        geometry = _geometry(lengths, group["window"])
        mask = Queries("mask", mask=counted)
        selection = select(mask, geometry, CompletionSpan(K, 0), classes, n_classes)
        if selection is not None:
            block = _block([each["groups"][g] for each in sequences], K, width, dtype)
            block.selections = [selection]
            scope._add_block(block)
    return scope


def _check(sequence: dict[str, Any]) -> None:
    if sequence["error"] is not None:
        raise sequence["error"]
    missing = sequence["missing"]
    if missing:
        raise ScopeError(
            f"{len(missing)} of the counted queries did not run: their keys came from the prefix "
            "cache. Count queries='generated' or 'last', or set skip_reading_prefix_cache=True in "
            "the sampling parameters",
            code="prefix-cached",
            queries=len(missing),
        )


def _row(ids: Sequence[int], length: int) -> Tensor:
    return pad(torch.tensor(ids, dtype=torch.int64), (0, length - len(ids)), value=-1)


def _counted(sequence: dict[str, Any], length: int) -> Tensor:
    """bool [K]: the counted queries of a sequence."""
    options = RequestOptions.parse({"queries": sequence["queries"]})
    counted = torch.zeros(length, dtype=torch.bool)
    counted[options.counted(0, sequence["length"], sequence["prompt_length"])] = True
    return counted


def _geometry(lengths: Tensor, window: int | None) -> Geometry:
    """Causal attention of sequences that are padded on the right."""
    B, K = len(lengths), int(lengths.max())
    padded = bool((lengths < K).any())
    order = torch.arange(K).expand(B, -1)
    real = order < lengths[:, None]
    start = torch.zeros_like(order) if window is None else (order - window + 1).clamp(min=0)
    stop = torch.where(real, order + 1, start)
    plain = window is None and not padded
    return Geometry(
        batch=B,
        queries=K,
        keys=K,
        first_query=0,
        first_key=0,
        device=torch.device("cpu"),
        form="causal" if plain else "interval",
        bounds=None if plain else (start.contiguous(), stop),
        real_queries=real if padded else None,
    )


def _columns(sequences: Sequence[dict[str, Any]]) -> int:
    """The number of columns of sums by class; 0 if no query counted."""
    groups = [group for sequence in sequences for group in sequence["groups"]]
    return max((each["sums"].received.shape[-1] for each in groups if each["sums"]), default=0)


def _block(groups: Sequence[dict[str, Any]], K: int, width: int, dtype: torch.dtype) -> SumsBlock:
    """The sums of a group of layers, of all sequences; those by key have this width."""
    layers = tuple(groups[0]["layers"])
    sums = {each.name: _stack(groups, each.name, width) for each in fields(AttentionSums)}
    block = SumsBlock(layers=layers, dtype=dtype, selections=[])
    block.sums = AttentionSums(**sums)  # type: ignore[arg-type]
    if any(group["kept"] for group in groups):
        for i, layer in enumerate(layers):
            block.stored[layer] = [_stored_rows(groups, i, K)]
    return block


def _stack(groups: Sequence[dict[str, Any]], name: str, width: int) -> Tensor | None:
    """[L · B, …]: a field of the sums of each sequence, 0 where a sequence has no counted query."""
    values: list[Tensor | None] = []
    for group in groups:
        value = getattr(group["sums"], name, None)
        if value is not None and name in BY_KEY:
            value = pad(value[..., :width], (0, max(0, width - value.shape[-1])))
        values.append(value)
    like = next((value for value in values if value is not None), None)
    if like is None:
        return None
    filled = [torch.zeros_like(like) if value is None else value for value in values]
    return torch.stack(filled, 1).flatten(0, 1)


def _stored_rows(groups: Sequence[dict[str, Any]], layer: int, K: int) -> StoredRows:
    """The kept rows of a layer, of all sequences."""
    weights, positions = [], []
    for group in groups:
        parts = [pad(part[layer], (0, K - part.shape[-1])) for _, part in group["kept"]]
        weights.append(torch.cat(parts, 1) if parts else None)
        positions.append([at for some, _ in group["kept"] for at in some])
    M = max(len(each) for each in positions)
    like = next(each for each in weights if each is not None)
    rows = [
        like.new_zeros(like.shape[0], M, K)
        if each is None
        else pad(each, (0, 0, 0, M - each.shape[1]))
        for each in weights
    ]
    return StoredRows(
        positions=torch.stack([_row(each, M) for each in positions]),
        first_key=0,
        width=K,
        nbytes=sum(each.nbytes for each in rows),
        weights=torch.stack(rows),
    )
