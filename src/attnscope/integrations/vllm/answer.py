"""The answer of the server: the measures that a request asked for, as plain lists."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import ScopeError
from attnscope.integrations.vllm import wire
from attnscope.integrations.vllm.requests import CLASS_SETS, SERVED_BY_DEFAULT, RequestOptions
from attnscope.integrations.vllm.scopes import build_scope, join_workers
from attnscope.scope.queries import Queries
from attnscope.scope.scope import Scope

_BY_TOKEN: dict[str, Callable[[Scope, int], Tensor]] = {
    "received": Scope.received,
    "average": Scope.average,
}


def answer(request_id: str, parts: Sequence[dict[str, Any]], engine: Any) -> dict[str, Any]:
    """What the server answers, from the results of all workers.

    Raises:
        AttnscopeError: The request could not be measured.
    """
    sequences: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        ranks = {rank: part[rank] for rank in ("tensor_rank", "pipeline_rank")}
        for name, sequence in wire.decode(part["results"]).items():
            sequences.setdefault(name, []).append(sequence | ranks)
    joined = [join_workers(sequences[name]) for name in sorted(sequences)]
    for each in joined:
        if each["error"] is not None:
            raise each["error"]
    options = RequestOptions.parse(joined[0]["options"])
    scope = build_scope(
        joined,
        queries=Queries(options.queries if isinstance(options.queries, str) else "mask"),
        backend="",
        dtype=getattr(engine.model_config, "dtype", torch.float32),
    )
    result: dict[str, Any] = {
        "request_id": request_id,
        "queries": options.queries,
        "layers": scope.layers,
        "prompt_tokens": [each["prompt_length"] for each in joined],
        "tokens": [each["length"] for each in joined],
        "counted_queries": scope.count(scope.layers[0]).int().tolist(),
        "measures": {},
    }
    for name in options.measures or SERVED_BY_DEFAULT:
        if name == "rows":
            result["rows"] = [_rows(scope, sequence) for sequence in range(len(joined))]
            continue
        if name == "mass":
            result["classes"] = CLASS_SETS[options.classes].names
        values = _values(name, scope, options, by_class=joined[0]["by_class"], engine=engine)
        result["measures"][name] = _lists(values.tolist())
    return result


def _values(
    name: str, scope: Scope, options: RequestOptions, *, by_class: bool, engine: Any
) -> Tensor:
    """[sequences, layers, heads, …]: a measure."""
    if name == "mass":
        shares, n = _shares(scope, options, by_class=by_class, engine=engine)
        values = [scope.mass(layer, shares, n) for layer in scope.layers]
    elif name in _BY_TOKEN:
        values = [_BY_TOKEN[name](scope, layer) for layer in scope.layers]
    else:
        values = [scope.measure(name, layer) for layer in scope.layers]
    return torch.stack(values, 1)


def _shares(
    scope: Scope, options: RequestOptions, *, by_class: bool, engine: Any
) -> tuple[Tensor, int]:
    """The share of each key in each class; the keys of sums by class are the first token and the
    classes."""
    if scope.tokens is None and scope._input_ids == [None]:
        raise ScopeError("the token ids of this request are unknown", code="no-token-ids")
    classes = CLASS_SETS[options.classes]
    n = len(classes)
    if by_class:
        columns = torch.nn.functional.pad(torch.eye(n), (0, 0, 1, 0))
        return columns.expand(len(scope._first_token), -1, -1), n
    assert scope.tokens is not None
    real = scope._real_keys().numpy()
    weights = classes.weights(scope.tokens.numpy(), engine.get_tokenizer(), real)
    return torch.from_numpy(weights), n


def _rows(scope: Scope, sequence: int) -> dict[str, Any]:
    """The attention rows of the counted queries of a sequence: positions, and weights by layer,
    head, query and key."""
    assert scope._padding is not None
    length = int(scope._padding[sequence].sum())
    by_layer, positions = [], list[int]()
    for layer in scope.layers:
        for each in scope._stored_rows(layer):
            assert each.weights is not None
            where = each.positions[sequence]
            weights = each.weights[sequence][:, where >= 0, :length]
            by_layer.append(weights.tolist())
            positions = where[where >= 0].tolist()
    return {"positions": positions, "weights": by_layer}


def _lists(values: Any) -> Any:
    """Nested lists with null for numbers that are not defined: JSON has no nan."""
    if isinstance(values, list):
        return [_lists(value) for value in values]
    return values if math.isfinite(values) else None
