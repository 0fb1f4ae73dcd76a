"""A view: one prompt as one model saw it, and everything that is sliced from what was measured.

Numbers alone: this module must not know models, HTTP or HTML. `measuring.py` fills a view.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown

if TYPE_CHECKING:
    from attnscope.capture.scope import Scope
    from attnscope.web.api_schemas import ViewRequest

Float32s = NDArray[np.float32]
SomeHeads = Sequence[tuple[int, int]]
"""Some heads: each a layer and its head."""

SHADES = ("received", "average", "lift")
"""What tokens can be shaded by."""


@dataclass(kw_only=True, eq=False)
class View:
    """One prompt as one model saw it. While it is measured, layers come one by one."""

    asked: ViewRequest
    model: str
    bundled: bool
    tokens: list[str]
    """The prompt's, then the answer's."""
    prompt: int
    """How many of them are the prompt's."""
    ids: list[int]
    classes: list[int]
    """Of each token, among `names`; -1 for none."""
    names: tuple[str, ...]
    twins: list[int] | None
    """Of a variant, for every token: its twin in the prompt without filler, or -1."""
    filler: list[int]
    """The tokens of the filler."""
    deep: int
    """How many layers there will be."""
    layers: list[int] = field(default_factory=list)
    """Those that are measured."""
    received: dict[str, list[Float32s]] = field(default_factory=dict)
    """For every choice of queries, for every layer, [H, K]: from the average query."""
    average: list[Float32s] = field(default_factory=list)
    uniform_average: list[Float32s] = field(default_factory=list)
    """[K]: what `average` would be under uniform attention."""
    uniform: dict[str, list[Float32s]] = field(default_factory=dict)
    """[K]: what `received` would be under uniform attention."""
    values: dict[str, dict[str, list[Float32s]]] = field(default_factory=dict)
    """For every choice of queries and every map, for every layer, [H]."""
    likely: list[tuple[str, float]] = field(default_factory=list)
    """What would come next, with probabilities."""
    scope: Scope | None = None
    """Queries and keys, where there is room."""
    by_layer: dict[int, Scope] = field(default_factory=dict)
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))

    @property
    def read(self) -> int:
        """How many tokens the model read: all but the last of an answer."""
        return int(self.average[0].shape[1]) if self.average else len(self.tokens)

    @property
    def queries(self) -> list[str]:
        """The choices of queries there are."""
        return list(self.received)

    @property
    def bytes(self) -> int:
        """About how much memory this holds, the kept queries and keys aside."""
        kept = [*self.average, *(a for of in self.received.values() for a in of)]
        return sum(array.nbytes for array in kept)

    def at(self, layer: int) -> int:
        """Where a layer stands in the lists."""
        if layer not in self.layers:
            raise unknown("layer", layer, self.layers)
        return self.layers.index(layer)

    def maps(self) -> list[str]:
        """What heads can be mapped by."""
        return list(self.values["all"]) if self.layers else []

    def shade(
        self, of: str, queries: str, layer: int | None, head: int | None, among: SomeHeads = ()
    ) -> Float32s:
        """[K]: what each token is shaded by; means over layers and heads where none is said, or
        over the heads of `among`."""
        if of not in SHADES:
            raise unknown("shade", of, SHADES)
        self._known(queries)
        source = self.average if of == "average" else self.received[queries]
        if among:
            rows = [
                (self._of_head(source[self.at(n)], h, n), self.uniform[queries][self.at(n)])
                for n, h in among
            ]
        else:
            places = range(len(self.layers)) if layer is None else [self.at(layer)]
            rows = [
                (self._of_head(source[n], head, self.layers[n]), self.uniform[queries][n])
                for n in places
            ]
        total = np.sum([row for row, _ in rows], axis=0, dtype=np.float64)
        if of == "lift":
            uniform = np.sum([row for _, row in rows], axis=0, dtype=np.float64)
            total = np.divide(total, uniform, out=np.full_like(total, np.nan), where=uniform > 0)
            return total.astype(np.float32)
        mean: Float32s = np.asarray(total / len(rows), dtype=np.float32)
        return mean

    def head_map(self, of: str, queries: str) -> list[Float32s]:
        """For every layer [H]: the value of each head."""
        self._known(queries)
        if of not in self.values[queries]:
            raise unknown("map", of, self.values[queries])
        return self.values[queries][of]

    def class_bars(self, queries: str, head: int | None) -> list[dict[str, Any]]:
        """The mass of every class that occurs, layer by layer."""
        there = [name for name in self.names if f"mass {name}" in self.maps()]
        return [
            {
                "layer": layer,
                "class": name,
                "mass": float(
                    self._of_head(self.head_map(f"mass {name}", queries)[n], head, layer)
                ),
            }
            for n, layer in enumerate(self.layers)
            for name in there
        ]

    def _known(self, queries: str) -> None:
        if not self.layers:
            raise InputError("no layer is measured yet: ask again in a moment")
        if queries not in self.received:
            raise unknown("choice of queries", queries, self.received)

    def _of_head(self, values: Float32s, head: int | None, layer: int) -> Any:
        if head is None:
            return values.mean(0)
        if not 0 <= head < len(values):
            raise InputError(f"layer {layer} has heads 0 to {len(values) - 1}, not {head}")
        return values[head]


def curve(values: Float32s, first: int, last: int, bins: int) -> dict[str, Any]:
    """The numbers from `first` to before `last`, in at most so many bins of equal `size`: where
    each begins (`start`), `mean`, and what its tokens lie between (`low`, `high`); nan where none
    has a number."""
    if not 0 <= first < last <= len(values):
        raise InputError(f"tokens {first} to {last}: there are 0 to {len(values)}")
    size = -(-(last - first) // bins)
    some = values[first:last]
    wide = np.full(-(-len(some) // size) * size, np.nan, dtype=np.float64)
    wide[: len(some)] = some
    rows = wide.reshape(-1, size)
    there = np.isfinite(rows)
    number = there.sum(1)
    total = np.where(there, rows, 0.0).sum(1)
    ends = {"low": (np.inf, np.min), "high": (-np.inf, np.max)}
    return {
        "size": size,
        "start": first + size * np.arange(len(rows)),
        "mean": np.divide(total, number, out=np.full(len(rows), np.nan), where=number > 0),
    } | {
        name: np.where(number > 0, of(np.where(there, rows, none), axis=1), np.nan)
        for name, (none, of) in ends.items()
    }
