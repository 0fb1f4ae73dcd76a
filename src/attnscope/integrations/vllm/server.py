"""An endpoint of `vllm serve` that answers with the attention statistics of a request.

    VLLM_PLUGINS=attnscope vllm serve MODEL

A request asks to be measured: `"vllm_xargs": {"attnscope": ["mass", "entropy"]}`. The answer is at
`GET /v1/attnscope/{id}`, by the id of its response. Requests that do not ask are not measured.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnscope.errors import AttnscopeError, ScopeError, unknown
from attnscope.integrations.vllm import wire
from attnscope.integrations.vllm.plugin import NAME
from attnscope.integrations.vllm.requests import RequestOptions
from attnscope.integrations.vllm.scopes import build_scope, join_workers
from attnscope.measures.registry import BY_HEAD, MEASURES
from attnscope.scope.queries import Queries
from attnscope.scope.scope import Scope
from attnscope.tokens import load_classes

PATH = "/v1/attnscope/{request_id}"
"""Below /v1, so that the server's API key guards it."""
DEFAULT_MEASURES = ("mass", "entropy", "first_token")
MOST_FINISHED = 256
"""Finished requests whose results the workers keep."""
BY_TOKEN: dict[str, Callable[[Scope, int], torch.Tensor]] = {
    "received": Scope.received,
    "average": Scope.average,
}
KNOWN = ("mass", *BY_TOKEN, *(name for name in BY_HEAD if MEASURES[name].needs == {"sums"}))
OPEN = {
    "layers": None,
    "default": None,
    "backend": "auto",
    "class_of": None,
    "other_process": True,
    "most_finished": MOST_FINISHED,
    "serve": True,
}
"""How the workers open their recorders: only requests that ask are measured."""


class AttentionEndpoint:
    """The endpoint plugin of vLLM."""

    name = NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.engine: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the route to the server."""
        app.add_api_route(PATH, self.read, methods=["GET"], response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Open the recorders of all workers."""
        self.engine = engine_client
        _check(await engine_client.collective_rpc(NAME, args=("open", OPEN)))

    async def read(self, request_id: str, completion_tokens: int | None = None) -> Any:
        """The measures of a request, by the id of its response.

        Args:
            request_id: The id of the response.
            completion_tokens: As its usage has it; leaves out what the engine ran after the end.
        """
        from fastapi.responses import JSONResponse

        try:
            options = {"request": request_id, "completion": completion_tokens}
            parts = _check(await self.engine.collective_rpc(NAME, args=("collect", options)))
            return answer(request_id, parts, self.engine)
        except AttnscopeError as error:
            status = 404 if error.code == "unknown-request" else 422
            content = {"error": {"code": error.code, "message": str(error)}}
            return JSONResponse(status_code=status, content=content)


def _check(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for part in parts:
        if "error" in part:
            raise wire.decode(part["error"])
    return parts


def answer(request_id: str, parts: Sequence[dict[str, Any]], engine: Any) -> dict[str, Any]:
    """What the server answers, from the results of all workers.

    Raises:
        AttnscopeError: The request is unknown, or was not measured.
    """
    sequences: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        ranks = {rank: part[rank] for rank in ("tensor_rank", "pipeline_rank")}
        for name, result in wire.decode(part["results"]).items():
            sequences.setdefault(name, []).append(result | ranks)
    if not sequences:
        raise ScopeError(
            f"no measured request {request_id!r}: it did not ask for attnscope in vllm_xargs, or "
            f"more than {MOST_FINISHED} requests finished since",
            code="unknown-request",
            request=request_id,
        )
    joined = [join_workers(sequences[name]) for name in sorted(sequences)]
    if joined[0]["error"] is not None:
        raise joined[0]["error"]
    options = RequestOptions.parse(joined[0]["options"])
    scope = build_scope(
        joined,
        queries=Queries(options.queries if isinstance(options.queries, str) else "mask"),
        backend="",
        dtype=getattr(engine.model_config, "dtype", torch.float32),
    )
    return {
        "request_id": request_id,
        "queries": options.queries,
        "layers": scope.layers,
        "prompt_tokens": [each["prompt_length"] for each in joined],
        "tokens": [each["length"] for each in joined],
        "counted_queries": scope.count(scope.layers[0]).tolist(),
        **measure_all(scope, options, engine),
    }


def measure_all(scope: Scope, options: RequestOptions, engine: Any) -> dict[str, Any]:
    """The measures that a request asked for: nested lists, by sequence, layer and head."""
    result: dict[str, Any] = {"measures": {}}
    for name in options.measures or DEFAULT_MEASURES:
        if name not in KNOWN:
            raise unknown("measure", name, KNOWN)
        if name == "mass":
            classes = load_classes(options.classes)
            ids = scope.tokens
            if ids is None:
                raise ScopeError("the token ids of this request are unknown", code="no-token-ids")
            real = None if scope._padding is None else scope._padding.numpy()
            class_ids = classes.ids(ids.numpy(), engine.get_tokenizer(), real)
            result["classes"] = classes.names
            values = [scope.mass(layer, class_ids, len(classes)) for layer in scope.layers]
        elif name in BY_TOKEN:
            values = [BY_TOKEN[name](scope, layer) for layer in scope.layers]
        else:
            values = [scope.measure(name, layer) for layer in scope.layers]
        result["measures"][name] = _lists(torch.stack(values, 1).tolist())
    return result


def _lists(values: Any) -> Any:
    """Nested lists with null for numbers that are not defined: JSON has no nan."""
    if isinstance(values, list):
        return [_lists(value) for value in values]
    return values if math.isfinite(values) else None
