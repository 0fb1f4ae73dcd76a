"""The requests of a worker: what vLLM schedules, and which queries of a request count."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from attnscope.errors import InputError, is_int, unknown
from attnscope.measures.registry import BY_HEAD, MEASURES
from attnscope.tokens.class_sets import NAMED
from attnscope.tokens.modalities import MODALITIES

QUERIES = ("all", "last", "generated", "predicts")
MAX_OPTIONS = 10_000
"""Characters of the options of a request that are read."""
MAX_ROWS = 64
"""Queries whose attention rows a server answers with."""
BY_CLASS = ("mass", "entropy", "effective_tokens", "first_token", "self_mass", "learned_sink_mass")
"""Measures for which sums by class of the key are enough."""
BY_TOKEN = ("received", "average")
"""Measures with a number for each token."""
SERVED = (
    "mass",
    "rows",
    *BY_TOKEN,
    *(name for name in BY_HEAD if MEASURES[name].needs == {"sums"}),
)
"""Measures that a server answers with."""
CLASS_SETS = {
    name: classes
    for name, classes in NAMED.items()
    if not any(one.words or one.every in MODALITIES for one in classes)
}
"""Built-in class sets that judge every token id alone."""
SERVED_BY_DEFAULT = ("mass", "entropy", "first_token")


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What is measured of a request."""

    queries: str | tuple[int, ...] = "all"
    """"all", "last", "generated" or "predicts", or the positions of the queries."""
    keep: bool = False
    """Whether the attention rows of the counted queries are kept."""
    measures: tuple[str, ...] = ()
    """What a server answers; empty for its default."""
    classes: str = "default"
    """The built-in set of token classes of a server's answer."""

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
        if not isinstance(measures, list | tuple):
            raise _bad_options(options)
        for measure in measures:
            if measure not in SERVED:
                raise unknown("measure", measure, SERVED)
        if not isinstance(classes, str) or classes not in CLASS_SETS:  # never a path
            raise unknown("class set", classes, CLASS_SETS)
        if "rows" in measures:
            keep = _check_rows(queries)
        return cls(queries=queries, keep=keep, measures=tuple(measures), classes=classes)

    @property
    def by_class(self) -> bool:
        """Whether sums by class of the key are enough for the measures."""
        measures = self.measures or SERVED_BY_DEFAULT
        return all(measure in BY_CLASS or measure == "rows" for measure in measures)

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


def _check_rows(queries: str | tuple[int, ...]) -> bool:
    """Whether rows of these queries are few enough; an error if not."""
    if queries == "last" or (isinstance(queries, tuple) and len(queries) <= MAX_ROWS):
        return True
    raise InputError(
        f"rows need queries='last' or a list of at most {MAX_ROWS} positions, not {queries!r}",
        code="too-many-rows",
        value=queries,
        most=MAX_ROWS,
    )


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
