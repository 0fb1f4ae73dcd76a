"""The part of attnscope that runs in a vLLM worker: opens and closes a recorder, sends its results.

vLLM calls `run` by the name of a method of its workers, which the plugin (`plugin.py`) adds. While
a recorder is open, the worker's `execute_model`, the `forward` of every measured attention
implementation and, with the second model runner, `prepare_inputs` are patched.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from attnscope import kernels, memory
from attnscope.errors import AttnscopeError, InputError, ScopeError, unknown
from attnscope.integrations.vllm import wire
from attnscope.integrations.vllm.layers import check_config, find_layers, read_layers
from attnscope.integrations.vllm.measured import giving_up
from attnscope.integrations.vllm.pending_queries import RecorderOptions
from attnscope.integrations.vllm.recorder import Recorder
from attnscope.integrations.vllm.requests import RequestOptions, Step

MEMORY_SHARE = 0.5
"""The share of free memory that sums may use."""


class Session:
    """An open recorder of a worker."""

    def __init__(self, worker: Any, options: dict[str, Any]):
        config = worker.vllm_config
        check_config(config)
        self.serves = bool(options.get("serve"))
        """Whether a server opened it, which any of its processes may do."""
        self.worker = worker
        self.runner = worker.model_runner
        modules = find_layers(config, options["layers"])
        device = torch.device(worker.device)
        default, class_of = options["default"], options["class_of"]
        free = memory.free(str(device)) or 4 << 30
        late = bool(config.scheduler_config.async_scheduling)
        sets = options.get("class_sets", {})
        self.recorder = Recorder(
            read_layers(modules),
            RecorderOptions(
                default=None if default is None else RequestOptions.parse(default),
                backend=kernels.choose(options["backend"], device),
                memory=int(MEMORY_SHARE * free),
                late_steps=int(late),
                stop_strings_late=options["other_process"] or late,
                class_of=None if class_of is None else wire.decode(class_of),
                class_sets={name: wire.decode(table) for name, table in sets.items()},
                most_finished=options.get("most_finished"),
            ),
        )
        self.batch: Any = None
        """The batch of the second model runner."""
        self.undo = ExitStack()
        with ExitStack() as undo:
            self._patch(undo, modules)
            self.undo = undo.pop_all()

    def _patch(self, undo: ExitStack, modules: dict[str, Any]) -> None:
        replace_method(undo, self.worker, "execute_model", self._execute_model)
        if not hasattr(self.runner, "input_batch"):
            replace_method(undo, self.runner, "prepare_inputs", self._prepare_inputs)
        for module in modules.values():
            replace_method(undo, module.impl, "forward", self._forward)

    def _execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @torch.inference_mode()
        def execute_model(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            with giving_up(self.recorder.requests.values()):
                self.recorder.begin(Step.of(schedule))
            try:
                return original(schedule, *args, **kwargs)
            finally:
                self.recorder.end()

        return execute_model

    def _prepare_inputs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            self.batch = original(*args, **kwargs)
            return self.batch

        return prepare_inputs

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            layer: Any,
            query: Tensor,
            key: Tensor | None,
            value: Tensor | None,
            kv_cache: Tensor,
            attn_metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            out = original(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
            if attn_metadata is not None:
                self.recorder.on_call(
                    layer.layer_name,
                    query,
                    None if layer.kv_sharing_target_layer_name else key,
                    kv_cache,
                    attn_metadata.block_table,
                    self.order,
                )
            return out

        return forward

    def order(self) -> tuple[Sequence[str], Tensor | None]:
        """The requests of the current step in the order of the query tensor, and its token ids."""
        if self.batch is not None:
            return self.batch.req_ids, self.batch.input_ids
        ids = self.runner.input_batch.req_ids
        count = len(self.recorder.step.tokens) if self.recorder.step is not None else 0
        return ids[:count], self.runner.input_ids.gpu

    def collect(self, lengths: dict[str, int | None], *, forget: bool) -> dict[str, Any]:
        """The results of these requests."""
        with torch.inference_mode():
            results = self.recorder.collect(lengths, forget=forget)
        return {"results": wire.encode(results), **ranks(self.worker)}

    def sequences(self, request: str, completions: dict[str, int] | None) -> dict[str, int | None]:
        """The sequences of a request by the id that its sender knows, each with its length.

        Args:
            request: The id of a response.
            completions: By index of the completion: its number of tokens; None if unknown.
        """
        chosen: dict[str, int | None] = {}
        for name, each in self.recorder.requests.items():
            index, known = external_id(name)
            if known in (request, f"{request}-0"):  # of a completion: its first prompt
                if completions is None and (each.hold or not each.finished):
                    raise _unknown_end(request)
                count = None if completions is None else completions.get(str(index))
                chosen[name] = None if count is None else each.prompt_length + max(count, 1) - 1
        return chosen

    def close(self) -> None:
        """Restore the worker."""
        self.undo.close()


def ranks(worker: Any) -> dict[str, int]:
    """Which part of the model a worker has."""
    from vllm.distributed import parallel_state

    return {
        "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
        "pipeline_rank": parallel_state.get_pp_group().rank_in_group,
    }


def replace_method(
    undo: ExitStack, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a method of one object by `make(original)` until undone."""
    original = getattr(owner, name)
    if name in vars(owner):
        undo.callback(setattr, owner, name, original)
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, wraps(original)(make(original)))


def external_id(name: str) -> tuple[int, str]:
    """The index of a completion, and the id of its request that the sender knows, from vLLM's id
    of a sequence."""
    match = re.fullmatch(r"(?:(\d+)_)?(.*?)(?:-[0-9a-f]{8})?", name, re.DOTALL)
    assert match is not None
    return int(match[1] or 0), match[2]


_sessions: dict[int, Session] = {}
"""By the id of a worker: its open recorder."""


def run(worker: Any, command: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a command of the client: "open", "collect" or "close".

    Errors are part of the result, because vLLM sends only the text of an exception.
    """
    try:
        if command not in _COMMANDS:
            raise unknown("command", command, _COMMANDS)
        return _COMMANDS[command](worker, options or {})
    except AttnscopeError as error:
        return {"error": wire.encode(error)}


def _unknown_end(request: str) -> ScopeError:
    return ScopeError(
        f"request {request!r} has not ended in the server process that got this question: ask "
        "when its response is complete, and use --api-server-count 1",
        code="request-unfinished",
        request=request,
    )


def _open(worker: Any, options: dict[str, Any]) -> dict[str, Any]:
    session = _sessions.get(id(worker))
    if session is not None and not (options.get("serve") and session.serves):
        raise InputError(
            "this engine is watched already; leave the other with block first",
            code="already-watched",
        )
    if session is None:
        session = _sessions[id(worker)] = Session(worker, options)
    layers = [layer.layer for group in session.recorder.groups for layer in group]
    return {"layers": layers, "backend": session.recorder.options.backend, **ranks(worker)}


def _collect(worker: Any, options: dict[str, Any]) -> dict[str, Any]:
    session = _sessions.get(id(worker))
    if session is None:
        raise ScopeError("this engine is not watched", code="not-watched")
    if "request" in options:
        lengths = session.sequences(options["request"], options["completions"])
        return session.collect(lengths, forget=False)
    return session.collect(options["lengths"], forget=True)


def _close(worker: Any, options: dict[str, Any]) -> dict[str, Any]:
    session = _sessions.pop(id(worker), None)
    if session is not None:
        session.close()
    return {}


_COMMANDS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "open": _open,
    "collect": _collect,
    "close": _close,
}
