"""The engine of a `vllm.LLM` as its client sees it: commands, requests and outputs."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import AttnscopeError, InputError
from attnscope.integrations.vllm import wire, worker
from attnscope.integrations.vllm.plugin import NAME
from attnscope.integrations.vllm.requests import RequestOptions
from attnscope.integrations.vllm.worker import replace_method
from attnscope.scope.queries import Queries


class EngineClient:
    """The few functions of an engine that are used."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.engine = llm.llm_engine
        self.other_process = not hasattr(self.engine.engine_core, "engine_core")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        dtype = self.engine.model_config.dtype
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    def send(self, command: str, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a command in all workers."""
        method: Any = NAME if self.other_process else run_in_worker
        try:
            results: list[dict[str, Any]] = self.llm.collective_rpc(method, args=(command, options))
        except Exception as error:
            if self.other_process and NAME in str(error):
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


@dataclass(eq=False)
class SentRequest:
    """A request that was sent to the engine."""

    row: int
    """Its place among the requests."""
    prompt_length: int
    ids: list[str] = field(default_factory=list)
    """vLLM's ids of its sequences, one for each completion."""
    completions: dict[int, int] = field(default_factory=dict)
    """By sequence: the number of generated tokens."""
    finished: bool = False
    error: AttnscopeError | None = None
    """Why it is not measured."""

    def length(self, sequence: int) -> int | None:
        """Tokens that the model reads of a sequence: all but the last generated one."""
        count = self.completions.get(sequence)
        if not self.finished or count is None:
            return None
        return self.prompt_length + max(count, 1) - 1


class RequestLog:
    """Notes the requests that an engine gets, and how long their completions are.

    Args:
        queries: Which queries count.
        keep: Whether their attention rows are kept.
    """

    def __init__(self, queries: Queries, *, keep: bool) -> None:
        self.queries = queries
        self.keep = keep
        self.requests: dict[str, SentRequest] = {}
        """By the id of the request, in the order in which they were sent."""
        self.finished: list[str] = []
        """Finished requests whose results were not collected."""

    def take_lengths(self, *, unfinished: bool) -> dict[str, int | None]:
        """By vLLM's id of a sequence: its length, for the requests to collect now."""
        names = [*self.finished]
        if unfinished:
            names += [name for name, each in self.requests.items() if not each.finished]
        self.finished = []
        return {
            each: self.requests[name].length(i)
            for name in names
            for i, each in enumerate(self.requests[name].ids)
        }

    def attach(self, undo: ExitStack, engine: Any, after_step: Callable[[], None]) -> None:
        """Patch an engine until undone; `after_step` is called after every step of it."""
        replace_method(undo, engine.engine_core, "add_request", self._noting_requests)

        def noting_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
            def step() -> Any:
                outputs = original()
                for output in outputs:
                    self._note_output(output)
                after_step()
                return outputs

            return step

        replace_method(undo, engine, "step", noting_outputs)

    def _noting_requests(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.sampling_params is not None:
                name = request.external_req_id or request.request_id
                new = SentRequest(len(self.requests), _prompt_length(request))
                known = self.requests.setdefault(name, new)
                known.ids.append(request.request_id)
                request.sampling_params = self._measured_params(request.sampling_params, known)
            return original(request, *args, **kwargs)

        return add_request

    def _note_output(self, output: Any) -> None:
        request = self.requests.get(output.request_id)
        if request is None:
            return
        if output.finished and not request.finished:
            request.finished = True
            self.finished.append(output.request_id)
        for completion in getattr(output, "outputs", ()):
            known = request.completions.get(completion.index, 0)
            request.completions[completion.index] = max(known, len(completion.token_ids))

    def _measured_params(self, params: Any, request: SentRequest) -> Any:
        """The sampling parameters of a measured request."""
        mask, chosen = self.queries.mask, self.queries.name
        params = params.clone()
        if mask is not None and request.row >= len(mask):
            # An error here would leave half a request in the engine.
            request.error = _no_row(mask, request.row)
            return params
        if mask is not None:
            positions = mask[request.row].nonzero()[:, 0].tolist()
            options = {"queries": positions, "keep": self.keep}
            params.extra_args = {**(params.extra_args or {}), NAME: options}
        # Queries before the last prompt token run only if the prefix cache is not read.
        if mask is not None or RequestOptions(queries=chosen).needs_prompt:
            params.skip_reading_prefix_cache = True
        return params


def _no_row(mask: Tensor, row: int) -> InputError:
    return InputError(
        f"the query mask has {len(mask)} rows, and this is request {row + 1}; it must be "
        "[requests, keys]",
        code="wrong-shape",
        argument="queries",
        got=list(mask.shape),
    )


def _prompt_length(request: Any) -> int:
    ids, embeds = request.prompt_token_ids, request.prompt_embeds
    return len(ids) if ids is not None else 0 if embeds is None else len(embeds)
