"""`watch` for a `vllm.LLM`: opens recorders in the workers and reads a scope for each request."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import AttnscopeError, InputError, ScopeError, describe, unknown
from attnscope.integrations.vllm import wire, worker
from attnscope.integrations.vllm.requests import QUERIES, RequestOptions
from attnscope.integrations.vllm.scopes import build_scope, join_workers
from attnscope.integrations.vllm.worker import replace_method
from attnscope.scope.queries import Queries, parse
from attnscope.scope.scope import Scope

METHOD = "attnscope"
"""The method of vLLM's workers that the plugin adds."""
COLLECTED = 32
"""Finished requests whose results the workers hold before the client gets them."""


@dataclass(eq=False)
class _Request:
    """A request as the client knows it."""

    ids: list[str] = field(default_factory=list)
    """vLLM's ids of its sequences, one for each completion."""
    prompt_length: int = 0
    completions: dict[int, int] = field(default_factory=dict)
    """By sequence: the number of generated tokens."""
    finished: bool = False

    def length(self, sequence: int) -> int | None:
        """Tokens that the model reads of a sequence: all but the last generated one."""
        count = self.completions.get(sequence)
        if not self.finished or count is None:
            return None
        return self.prompt_length + max(count, 1) - 1


class RequestScopes(Mapping[str, Scope]):
    """The results of `watch` on a `vllm.LLM`: a `Scope` for each request, by its id.

    A scope has one sequence for each completion of the request (`n`).
    """

    def __init__(self, engine: "_Engine", queries: Queries, class_of: Tensor | None):
        self._engine = engine
        self._queries = queries
        self._class_of = class_of
        self._requests: dict[str, _Request] = {}
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
        return list(self._requests)

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request_id: str) -> Scope:
        """The scope of a request.

        Raises:
            InputError: No request has this id.
            ScopeError: The request was not measured, or has not finished.
        """
        if request_id not in self._requests:
            raise unknown("request", request_id, list(self._requests)[:20])
        if request_id not in self._scopes:
            request = self._requests[request_id]
            if self._open and not request.finished:
                raise ScopeError(
                    f"request {request_id!r} has not finished; read it after llm.generate",
                    code="request-unfinished",
                    request=request_id,
                )
            self._collect()
            self._scopes[request_id] = self._build(request_id, request)
        return self._scopes[request_id]

    def __repr__(self) -> str:
        return f"<RequestScopes of {len(self)} requests, {len(self.layers)} layers>"

    def _build(self, request_id: str, request: _Request) -> Scope:
        if any(each not in self._results for each in request.ids):
            raise ScopeError(
                f"request {request_id!r} did not run inside the with block",
                code="request-not-measured",
                request=request_id,
            )
        sequences = [join_workers(self._results.pop(each)) for each in request.ids]
        return build_scope(
            sequences,
            queries=self._queries,
            backend=self.backend,
            dtype=self._engine.dtype,
            class_of=self._class_of,
        )

    def _collect(self, *, unfinished: bool = False) -> None:
        """Get the results that the workers hold."""
        if not self._open:
            return
        lengths = {
            each: request.length(i)
            for request in self._requests.values()
            if request.finished or unfinished
            for i, each in enumerate(request.ids)
            if each not in self._results
        }
        if not lengths:
            return
        for part in self._engine.send("collect", {"lengths": lengths}):
            for name, result in wire.decode(part["results"]).items():
                ranks = {rank: part[rank] for rank in ("tensor_rank", "pipeline_rank")}
                self._results.setdefault(name, []).append(result | ranks)


class _Engine:
    """The engine of a `vllm.LLM`, with the few of its functions that are used."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.engine = llm.llm_engine
        self.other_process = not hasattr(self.engine.engine_core, "engine_core")

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.engine.model_config.dtype
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    def send(self, command: str, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a command in all workers."""
        method: Any = METHOD if self.other_process else run_in_worker
        try:
            results: list[dict[str, Any]] = self.llm.collective_rpc(method, args=(command, options))
        except Exception as error:
            if self.other_process and METHOD in str(error):
                raise InputError(
                    "the workers of this engine do not have attnscope's plugin. Install attnscope "
                    "in the environment of vLLM; if VLLM_PLUGINS is set, add attnscope to it; or "
                    "set VLLM_ENABLE_V1_MULTIPROCESSING=0",
                    code="plugin-missing",
                ) from error
            raise
        for result in results:
            if "error" in result:
                raise wire.decode(result["error"])
        return results


def run_in_worker(
    wrapper: Any, command: str, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a command in a worker of this process."""
    return worker.run(getattr(wrapper, "worker", wrapper), command, options)


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
    engine = _Engine(llm)
    options["other_process"] = engine.other_process
    return _watching(RequestScopes(engine, parsed, class_of), options, keep)


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
def _watching(
    scopes: RequestScopes, options: dict[str, Any], keep: bool
) -> Iterator[RequestScopes]:
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
        client = engine.engine
        replace_method(undo, client.engine_core, "add_request", _note_request(scopes, keep))
        replace_method(undo, client, "step", _note_outputs(scopes))
        yield scopes
        scopes._collect(unfinished=True)


def _note_request(
    scopes: RequestScopes, keep: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Note every request that is sent to the engine, with its sequences."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            params = request.sampling_params
            if params is not None:
                name = request.external_req_id or request.request_id
                known = scopes._requests.setdefault(name, _Request())
                known.ids.append(request.request_id)
                known.prompt_length = _prompt_length(request)
                row = list(scopes._requests).index(name)
                request.sampling_params = _measured_params(params, scopes._queries, keep, row)
            return original(request, *args, **kwargs)

        return add_request

    return make


def _prompt_length(request: Any) -> int:
    ids, embeds = request.prompt_token_ids, request.prompt_embeds
    return len(ids) if ids is not None else 0 if embeds is None else len(embeds)


def _measured_params(params: Any, queries: Queries, keep: bool, row: int) -> Any:
    """The sampling parameters of a measured request."""
    params = params.clone()
    chosen: str | list[int] = queries.name
    if queries.mask is not None:
        if row >= len(queries.mask):
            raise InputError(
                f"the query mask has {len(queries.mask)} rows, and this is request {row + 1}; it "
                "must be [requests, keys]",
                code="wrong-shape",
                argument="queries",
                got=list(queries.mask.shape),
            )
        chosen = queries.mask[row].nonzero()[:, 0].tolist()
        options = {"queries": chosen, "keep": keep}
        params.extra_args = {**(params.extra_args or {}), "attnscope": options}
    # Queries before the last prompt token run only if the prefix cache is not read.
    if RequestOptions.parse({"queries": chosen}).needs_prompt:
        params.skip_reading_prefix_cache = True
    return params


def _note_outputs(scopes: RequestScopes) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Note how many tokens each completion has, and get results of finished requests."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def step() -> Any:
            outputs = original()
            for output in outputs:
                request = scopes._requests.get(output.request_id)
                if request is not None:
                    _note_output(request, output)
            waiting = sum(
                request.finished and any(each not in scopes._results for each in request.ids)
                for name, request in scopes._requests.items()
                if name not in scopes._scopes
            )
            if waiting >= COLLECTED:
                scopes._collect()
            return outputs

        return step

    return make


def _note_output(request: _Request, output: Any) -> None:
    request.finished = request.finished or output.finished
    for completion in getattr(output, "outputs", ()):
        known = request.completions.get(completion.index, 0)
        request.completions[completion.index] = max(known, len(completion.token_ids))
