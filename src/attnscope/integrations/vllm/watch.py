"""`watch` for a `vllm.LLM`: opens recorders in the workers and reads a scope for each request."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import AttnscopeError, InputError, ScopeError, describe, unknown
from attnscope.integrations.vllm import wire
from attnscope.integrations.vllm.client import EngineClient, RequestLog
from attnscope.integrations.vllm.requests import QUERIES
from attnscope.integrations.vllm.scopes import build_scope, join_workers
from attnscope.scope.queries import parse
from attnscope.scope.scope import Scope

COLLECTED = 32
"""Finished requests whose results the workers hold before the client gets them."""


class RequestScopes(Mapping[str, Scope]):
    """The results of `watch` on a `vllm.LLM`: a `Scope` for each request, by its id.

    A scope has one sequence for each completion of the request (`n`).
    """

    def __init__(self, engine: EngineClient, log: RequestLog, class_of: Tensor | None):
        self._engine = engine
        self._log = log
        self._class_of = class_of
        self._results: dict[str, list[dict[str, Any]]] = {}
        """By vLLM's id of a sequence: the results of all workers."""
        self._scopes: dict[str, Scope] = {}
        self._open = True
        self.layers: list[int] = []
        """The measured layers."""
        self.backend = ""
        """The kernel that computes the sums."""

    @property
    def requests(self) -> list[str]:
        """The ids of the measured requests, in the order in which they were sent."""
        return list(self._log.requests)

    def __iter__(self) -> Iterator[str]:
        return iter(self._log.requests)

    def __len__(self) -> int:
        return len(self._log.requests)

    def __getitem__(self, request_id: str) -> Scope:
        """The scope of a request.

        Raises:
            InputError: No request has this id.
            ScopeError: The request was not measured, or has not finished.
        """
        if request_id not in self._log.requests:
            raise unknown("request", request_id, list(self._log.requests)[:20])
        if request_id not in self._scopes:
            request = self._log.requests[request_id]
            if request.error is not None:
                raise request.error
            if self._open and not request.finished:
                raise ScopeError(
                    f"request {request_id!r} has not finished; read it after llm.generate",
                    code="request-unfinished",
                    request=request_id,
                )
            self._collect()
            self._scopes[request_id] = self._build(self._sequences(request_id))
        return self._scopes[request_id]

    def joined(self) -> Scope:
        """One scope of all requests, with a sequence for each completion, in the order in which
        they were sent. Read it after the block, and before any single scope.

        Raises:
            ScopeError: A request was not measured.
        """
        for request in self._log.requests.values():
            if request.error is not None:
                raise request.error
        return self._build([one for name in self.requests for one in self._sequences(name)])

    def __repr__(self) -> str:
        return f"<RequestScopes of {len(self)} requests, {len(self.layers)} layers>"

    def _sequences(self, request_id: str) -> list[dict[str, Any]]:
        """The results of the completions of a request; they are kept no longer."""
        request = self._log.requests[request_id]
        if any(each not in self._results for each in request.ids):
            raise ScopeError(
                f"request {request_id!r} did not run inside the with block",
                code="request-not-measured",
                request=request_id,
            )
        return [join_workers(self._results.pop(each)) for each in request.ids]

    def _build(self, sequences: list[dict[str, Any]]) -> Scope:
        return build_scope(
            sequences,
            queries=self._log.queries,
            backend=self.backend,
            dtype=self._engine.dtype,
            class_of=self._class_of,
        )

    def _collect_some(self) -> None:
        """Get the results of finished requests if the workers hold many."""
        if len(self._log.finished) >= COLLECTED:
            self._collect()

    def _collect(self, *, unfinished: bool = False) -> None:
        """Get the results that the workers hold."""
        lengths = self._log.take_lengths(unfinished=unfinished) if self._open else None
        if not lengths:
            return
        for part in self._engine.send("collect", {"lengths": lengths}):
            for name, result in wire.decode(part["results"]).items():
                ranks = {rank: part[rank] for rank in ("tensor_rank", "pipeline_rank")}
                self._results.setdefault(name, []).append(result | ranks)


def watch_engine(
    llm: Any,
    layers: int | Iterable[int] | None = None,
    queries: str | Tensor = "all",
    backend: str = "auto",
    *,
    classes: Tensor | None = None,
    keep: bool = False,
) -> AbstractContextManager[RequestScopes]:
    """Measure the requests that a `vllm.LLM` runs inside a `with` block.

    Args:
        llm: The engine.
        layers: The layers to measure; default: all.
        queries: "all", "last", "generated" or "predicts"; or a bool tensor [requests, keys], one
            row for each request in the order in which they are sent.
        backend: "auto", "reference", "streaming" or "triton".
        classes: Int [vocabulary]: the class of each token id, -1 for none; for `Scope.flow`.
        keep: Keep the attention rows of the counted queries.

    Raises:
        InputError: An argument has a wrong value, or the workers do not have the plugin.
        ModelError: The engine uses a feature that attnscope does not support.
    """
    parsed = parse(queries, 0)
    if parsed.mask is None and parsed.name not in QUERIES:
        raise unknown("queries", queries, (*QUERIES, "a bool tensor [requests, keys]"))
    if not isinstance(keep, bool):
        raise InputError(f"keep={keep!r} must be True or False", code="not-boolean", value=keep)
    numbers = [layers] if isinstance(layers, int) else None if layers is None else list(layers)
    default = None if parsed.mask is not None else {"queries": parsed.name, "keep": keep}
    class_of = _class_table(classes)
    options = {
        "layers": numbers,
        "default": default,
        "backend": backend,
        "class_of": None if class_of is None else wire.encode(class_of),
    }
    engine = EngineClient(llm)
    options["other_process"] = engine.other_process
    return _watching(RequestScopes(engine, RequestLog(parsed, keep=keep), class_of), options)


def _class_table(classes: Any) -> Tensor | None:
    if classes is None:
        return None
    table = torch.as_tensor(classes)
    if table.ndim != 1 or table.is_floating_point() or table.dtype == torch.bool:
        raise InputError(
            "for vLLM, classes must be an int tensor [vocabulary], the class of each token id; "
            f"got {describe(table)}",
            code="wrong-shape",
            argument="classes",
            got=describe(table),
        )
    return table.long().cpu()


@contextmanager
def _watching(scopes: RequestScopes, options: dict[str, Any]) -> Iterator[RequestScopes]:
    engine = scopes._engine
    try:
        opened = engine.send("open", options)
    except AttnscopeError as error:
        if error.code not in ("plugin-missing", "already-watched"):
            engine.send("close", {})  # some workers may have opened
        raise
    with ExitStack() as undo:
        undo.callback(setattr, scopes, "_open", False)
        undo.callback(engine.send, "close", {})
        scopes.layers = sorted({layer for part in opened for layer in part["layers"]})
        scopes.backend = opened[0]["backend"]
        scopes._log.attach(undo, engine.engine, scopes._collect_some)
        yield scopes
        scopes._collect(unfinished=True)
