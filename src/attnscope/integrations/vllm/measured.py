"""A measured request of a worker: what the model has read of it, its pending queries, its sums."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import AttnscopeError, ModelError
from attnscope.integrations.vllm.reduction import AttentionLayer
from attnscope.integrations.vllm.requests import RequestOptions
from attnscope.kernels import AttentionSums
from attnscope.scope.sums import add_sums, stack_sums


@dataclass(eq=False)
class Tables:
    """The block tables of one step; layers of one KV cache group share a copy."""

    by_layer: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[int, Tensor] = field(default_factory=dict)

    def add(self, name: str, table: Tensor) -> None:
        """Copy the table of a layer: vLLM overwrites it in the next step."""
        address = table.data_ptr()
        if address not in self.copies:
            self.copies[address] = table.clone()
        self.by_layer[name] = self.copies[address]


@dataclass(frozen=True, eq=False)
class Reduced:
    """The numbers of some queries of a request, for a group of layers or a part of it."""

    sums: AttentionSums
    """[L, …]; key 0 is at position 0, or the last axis has classes and the first token."""
    weights: Tensor | None
    """float32 [L, H, M, K]: the attention rows, if they are kept."""


def stack_reduced(parts: Sequence[Reduced]) -> Reduced:
    """The numbers of several layers, one after the other."""
    weights = [part.weights for part in parts if part.weights is not None]
    sums = stack_sums([part.sums for part in parts])
    return Reduced(sums, torch.cat(weights) if weights else None)


@dataclass(eq=False, kw_only=True)
class Kept:
    """Attention rows of some queries of a request."""

    positions: list[int]
    weights: dict[int, Tensor]
    """By group of layers: float32 [L, H, M, K]."""


@dataclass(eq=False, kw_only=True)
class MeasuredRequest:
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
    pending: list[tuple[int, int]] = field(default_factory=list)
    """Row of the buffer and position of each pending query."""
    tables: Tables | None = None
    """Those of the latest step; None after the end."""
    table_row: int = 0
    known_pages: bool = False
    """Whether a key of this request was compared with its page."""
    sums: dict[int, AttentionSums] = field(default_factory=dict)
    """By group of layers."""
    held: list[tuple[int, dict[int, Reduced]]] = field(default_factory=list)
    """The sums of queries that may not belong to the completion, by position."""
    kept: list[Kept] = field(default_factory=list)

    def advance(self, first: int, count: int) -> Iterator[int]:
        """Note that the model reads `count` tokens from position `first`; yields the positions
        that count and were not measured before."""
        if first > self.length:
            self.missing.append((self.length, first))
        begin, last = max(first, self.length), first + count
        self.length = max(self.length, last)
        yield from self.options.counted(begin, last, self.prompt_length)

    def ids(self, length: int) -> list[int]:
        """The first token ids; -1 for unknown ones."""
        return [self.token_ids.get(position, -1) for position in range(length)]

    def pages(self, name: str) -> Tensor:
        """The block table in a layer."""
        assert self.tables is not None
        return self.tables.by_layer[name][self.table_row]

    def add(self, group: int, positions: Sequence[int], reduced: Reduced) -> None:
        """Add the numbers of queries at these positions, for a group of layers."""
        old = self.sums.get(group)
        self.sums[group] = reduced.sums if old is None else add_sums(old, reduced.sums)
        if reduced.weights is None:
            return
        if not self.kept or self.kept[-1].positions != positions:
            self.kept.append(Kept(positions=list(positions), weights={}))
        self.kept[-1].weights[group] = reduced.weights

    def settle(self, length: int) -> None:
        """Add the held queries before `length`: they belong to the completion."""
        for position, by_group in self.held:
            if position < length:
                for group, reduced in by_group.items():
                    self.add(group, [position], reduced)
        self.held = [each for each in self.held if each[0] >= length]

    def fail(self, error: AttnscopeError) -> None:
        """Give up this request."""
        self.error = self.error or error
        self.pending, self.sums, self.held, self.kept, self.tables = [], {}, [], [], None

    def finish(self) -> None:
        """End the request: its results wait in the main memory."""
        self.finished, self.tables = True, None
        self.sums = {group: _on_cpu(sums) for group, sums in self.sums.items()}
        self.held = [
            (position, {g: Reduced(_on_cpu(one.sums), _cpu(one.weights)) for g, one in by.items()})
            for position, by in self.held
        ]
        for kept in self.kept:
            kept.weights = {group: weights.cpu() for group, weights in kept.weights.items()}

    @property
    def nbytes(self) -> int:
        """The memory of sums and kept rows."""
        held = [one for _, by_group in self.held for one in by_group.values()]
        total = sum(map(_nbytes, [*self.sums.values(), *(one.sums for one in held)]))
        weights = [*(w for kept in self.kept for w in kept.weights.values())]
        weights += [one.weights for one in held if one.weights is not None]
        return total + sum(each.nbytes for each in weights)

    def result(self, groups: Sequence[Sequence[AttentionLayer]], length: int) -> dict[str, Any]:
        """What leaves the worker, for the first `length` tokens."""
        missing = [
            position
            for first, last in self.missing
            for position in self.options.counted(first, last, self.prompt_length)
        ]
        result: dict[str, Any] = {
            "prompt_length": self.prompt_length,
            "length": length,
            "token_ids": self.ids(length),
            "missing": missing,
            "queries": self.options.queries,
            "options": self.raw_options,
            "error": self.error,
            "groups": [],
        }
        for g, group in enumerate(() if self.error is not None else groups):
            kept = [(each.positions, each.weights[g]) for each in self.kept]
            result["groups"].append(
                {
                    "layers": [layer.layer for layer in group],
                    "window": group[0].window,
                    "sums": self.sums.get(g),
                    "kept": [each for each in kept if each[0][0] < length],
                }
            )
        return result


@contextmanager
def giving_up(requests: Iterable[MeasuredRequest]) -> Iterator[None]:
    """Give up these requests if their measurement raises an error."""
    try:
        yield
    except Exception as error:  # an error in a step would end vLLM's engine
        if not isinstance(error, AttnscopeError):
            error = ModelError(
                f"the measurement of this request failed: {type(error).__name__}: {error}",
                code="measurement-failed",
            )
        for request in requests:
            request.fail(error)


def _cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def _on_cpu(sums: AttentionSums) -> AttentionSums:
    moved: dict[str, Any] = {each.name: _cpu(getattr(sums, each.name)) for each in fields(sums)}
    return replace(sums, **moved)


def _nbytes(sums: AttentionSums) -> int:
    values = (getattr(sums, each.name) for each in fields(sums))
    return sum(value.nbytes for value in values if value is not None)
