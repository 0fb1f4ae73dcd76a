"""The requests of a worker: what vLLM schedules, and which queries of a request count."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from attnscope.errors import AttnscopeError, InputError, is_int, unknown

QUERIES = ("all", "last", "generated", "predicts")
MAX_OPTIONS = 10_000
"""Characters of the options of a request that are read."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What is measured of a request."""

    queries: str | tuple[int, ...] = "all"
    """"all", "last", "generated" or "predicts", or the positions of the queries."""
    keep: bool = False
    """Whether the attention rows of the counted queries are kept."""
    measures: tuple[str, ...] = ()
    """What a server answers; default: its own choice."""
    classes: str = "default"
    """The set of token classes of a server's answer."""

    @classmethod
    def parse(cls, options: object) -> "RequestOptions":
        """Read the options of a request from outside: a mapping, the same as JSON, or a list of
        measures.

        Raises:
            InputError: An option is unknown or has a wrong value.
        """
        if isinstance(options, str):
            options = _from_json(options)
        if isinstance(options, list | tuple):
            options = {"measures": options}
        if not isinstance(options, dict):
            raise _bad_options(options)
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                raise unknown("option", name, known)
        queries, measures = options.get("queries", "all"), options.get("measures", ())
        if isinstance(queries, list | tuple):
            queries = _positions(queries)
        elif queries not in QUERIES:
            raise unknown("queries", queries, QUERIES)
        keep, classes = options.get("keep", False), options.get("classes", "default")
        if not isinstance(keep, bool):
            raise InputError(f"keep={keep!r} must be True or False", code="not-boolean")
        names = isinstance(measures, list | tuple) and all(isinstance(m, str) for m in measures)
        if not names or not isinstance(classes, str):
            raise _bad_options(options)
        return cls(queries=queries, keep=keep, measures=tuple(measures), classes=classes)

    @property
    def needs_prompt(self) -> bool:
        """Whether queries of the prompt count, other than its last token."""
        return self.queries == "all" or isinstance(self.queries, tuple)

    def counted(self, first: int, last: int, prompt: int) -> list[int]:
        """The counted positions of `first … last`, if the prompt has `prompt` tokens."""
        if isinstance(self.queries, tuple):
            return [position for position in self.queries if first <= position < last]
        if self.queries == "last":
            return [prompt - 1] if first < prompt <= last else []
        low = {"all": 0, "generated": prompt, "predicts": prompt - 1}[self.queries]
        return list(range(max(first, low), last))


def _from_json(text: str) -> object:
    try:
        return json.loads(text[:MAX_OPTIONS])
    except ValueError:
        raise _bad_options(text[:80]) from None


def _positions(values: Sequence[object]) -> tuple[int, ...]:
    positions = {at for at in values if is_int(at)}
    if len(positions) != len(values):
        raise InputError(
            f"queries {values!r} must be different positions from 0", code="unknown-queries"
        )
    return tuple(sorted(positions))


def _bad_options(options: object) -> InputError:
    return InputError(
        "the options of a request must be a mapping such as {'measures': ['mass'], 'queries': "
        f"'generated', 'classes': 'default'}}, as JSON or not; got {options!r}",
        code="bad-options",
        value=options,
    )


@dataclass(frozen=True, kw_only=True)
class NewRequest:
    """A request that a worker gets for the first time, or again after a preemption."""

    id: str
    prompt: Sequence[int] | None
    """Token ids of the prompt; None if it consists of embeddings."""
    prompt_length: int
    options: Any = None
    """The options of this request; None for the default."""
    stops_late: bool = False
    """Whether the engine may run more steps than the completion needs."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a worker runs in one step."""

    new: Sequence[NewRequest] = ()
    finished: Sequence[str] = ()
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By request: position of its first token of this step, and the number of tokens."""
    blocks: dict[str, list[int]] = field(default_factory=dict)
    """By request: the blocks of the KV cache that it gets in this step."""
    replaced: Sequence[str] = ()
    """Requests whose earlier blocks are gone."""

    @classmethod
    def of(cls, schedule: Any) -> "Step":
        """Read a `SchedulerOutput` of vLLM."""
        new, tokens, blocks = [], {}, {}
        counts = schedule.num_scheduled_tokens
        for request in schedule.scheduled_new_reqs:
            params = request.sampling_params
            extra = getattr(params, "extra_args", None) or {}
            new.append(
                NewRequest(
                    id=request.req_id,
                    prompt=request.prompt_token_ids,
                    prompt_length=request.prompt_len,
                    options=extra.get("attnscope"),
                    stops_late=bool(getattr(params, "stop", None)),
                )
            )
            blocks[request.req_id] = [block for group in request.block_ids for block in group]
            first = request.num_computed_tokens
            tokens[request.req_id] = first, counts.get(request.req_id, 0)
        cached = schedule.scheduled_cached_reqs
        for name, first, more in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            blocks[name] = [block for group in more or () for block in group]
            tokens[name] = first, counts.get(name, 0)
        return cls(
            new=new,
            finished=sorted(schedule.finished_req_ids),
            tokens=tokens,
            blocks=blocks,
            replaced=[*cached.resumed_req_ids, *(request.id for request in new)],
        )


@dataclass(eq=False, kw_only=True)
class TrackedRequest:
    """A measured request."""

    id: str
    prompt_length: int
    options: RequestOptions
    raw_options: Any = None
    hold: int = 0
    """How many of the latest queries may turn out not to belong to the completion."""
    token_ids: dict[int, int] = field(default_factory=dict)
    """By position: the token ids that the model read, as far as they are known."""
    length: int = 0
    """Number of tokens that the model has read."""
    missing: list[tuple[int, int]] = field(default_factory=list)
    """Positions, from and to, whose queries never ran here: the prefix cache had their keys."""
    blocks: set[int] = field(default_factory=set)
    finished: bool = False
    error: AttnscopeError | None = None

    def advance(self, first: int, count: int) -> Iterator[int]:
        """Note that the model reads `count` tokens from position `first`; yields the positions
        that count and were not measured before."""
        if first > self.length:
            self.missing.append((self.length, first))
        begin, last = max(first, self.length), first + count
        self.length = max(self.length, last)
        yield from self.options.counted(begin, last, self.prompt_length)

    def missing_queries(self) -> list[int]:
        """Counted positions whose queries never ran."""
        return [
            position
            for first, last in self.missing
            for position in self.options.counted(first, last, self.prompt_length)
        ]
