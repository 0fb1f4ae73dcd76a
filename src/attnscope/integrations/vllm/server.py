"""An endpoint of `vllm serve` that answers with the attention statistics of a request.

    VLLM_PLUGINS=attnscope vllm serve MODEL

A request asks to be measured: `"vllm_xargs": {"attnscope": ["mass", "entropy"]}`. The answer is at
`GET /v1/attnscope/{id}`, by the id of its response. Requests that do not ask are not measured.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import torch

from attnscope.errors import AttnscopeError, ScopeError
from attnscope.integrations.vllm import wire
from attnscope.integrations.vllm.answer import answer
from attnscope.integrations.vllm.plugin import NAME
from attnscope.integrations.vllm.requests import CLASS_SETS
from attnscope.tokens.vocabulary import read_vocabulary

PATH = "/v1/attnscope/{request_id}"
"""Below /v1, so that the server's API key guards it."""
MOST_FINISHED = 256
"""Finished requests whose results the workers keep."""


class AttentionEndpoint:
    """The endpoint plugin of vLLM."""

    name = NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.engine: Any = None
        self.lengths = CompletionLengths()

    def attach_router(self, app: Any) -> None:
        """Add the route to the server."""
        app.add_api_route(PATH, self.read, methods=["GET"], response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Open the recorders of all workers; only requests that ask will be measured."""
        self.engine = engine_client
        self.lengths.count(engine_client)
        options = {
            "layers": None,
            "default": None,
            "backend": "auto",
            "class_of": None,
            "class_sets": class_tables(engine_client.get_tokenizer()),
            "other_process": True,
            "most_finished": MOST_FINISHED,
            "serve": True,
        }
        await self._send("open", options)

    async def read(self, request_id: str) -> Any:
        """The measures of a request, by the id of its response."""
        from fastapi.responses import JSONResponse

        try:
            lengths = self.lengths.of(request_id)
            parts = await self._send("collect", {"request": request_id, "completions": lengths})
            if not any(part["results"] for part in parts):
                raise _unknown_request(request_id)
            return answer(request_id, parts, self.engine)
        except AttnscopeError as error:
            status = 404 if error.code == "unknown-request" else 422
            content = {"error": {"code": error.code, "message": str(error)}}
            return JSONResponse(status_code=status, content=content)

    async def _send(self, command: str, options: dict[str, Any]) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = await self.engine.collective_rpc(
            NAME, args=(command, options)
        )
        for part in parts:
            if "error" in part:
                raise wire.decode(part["error"])
        return parts


class CompletionLengths:
    """The numbers of tokens of completions, counted as the engine returns them.

    An engine may run some steps after the end of a completion, so workers do not know its length.
    """

    def __init__(self) -> None:
        self._lengths: OrderedDict[str, dict[int, int]] = OrderedDict()

    def of(self, request_id: str) -> dict[str, int] | None:
        """By index of the completion: its tokens; None if it has not ended here."""
        for name in (request_id, f"{request_id}-0"):  # of a completion: its first prompt
            if name in self._lengths:
                return {str(index): count for index, count in self._lengths[name].items()}
        return None

    def count(self, engine: Any) -> None:
        """Count the tokens of measured requests in what this engine returns."""
        original: Callable[..., AsyncIterator[Any]] = engine.generate

        def generate(
            prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
        ) -> AsyncIterator[Any]:
            outputs = original(prompt, sampling_params, request_id, *args, **kwargs)
            if NAME not in (getattr(sampling_params, "extra_args", None) or {}):
                return outputs
            return self._counted(outputs, sampling_params, request_id)

        engine.generate = generate

    async def _counted(
        self, outputs: Any, sampling_params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        from vllm.sampling_params import RequestOutputKind

        delta = sampling_params.output_kind == RequestOutputKind.DELTA
        counts: dict[int, int] = {}
        async with aclosing(outputs):
            async for output in outputs:
                for one in output.outputs:
                    known, count = counts.get(one.index, 0), len(one.token_ids)
                    counts[one.index] = known + count if delta else max(known, count)
                if output.finished:
                    self._lengths[request_id] = counts
                    while len(self._lengths) > 2 * MOST_FINISHED:
                        self._lengths.popitem(last=False)
                yield output


def class_tables(tokenizer: Any) -> dict[str, Any]:
    """The built-in class sets as shares of each token id in each class, for the workers; none if
    the text of tokens is unknown."""
    try:
        ids = np.arange(len(read_vocabulary(tokenizer)))
    except AttnscopeError:
        return {}
    return {
        name: wire.encode(torch.from_numpy(classes.weights(ids, tokenizer)))
        for name, classes in CLASS_SETS.items()
    }


def _unknown_request(request_id: str) -> ScopeError:
    return ScopeError(
        f"no measured request {request_id!r}: it did not ask for attnscope in vllm_xargs, or more "
        f"than {MOST_FINISHED} requests finished since, or the results needed too much memory",
        code="unknown-request",
        request=request_id,
    )
