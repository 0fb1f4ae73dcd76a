"""A view: the measured values of one prompt in one model. `measuring.py` fills it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown
from attnscope.figures.binning import binned

if TYPE_CHECKING:
    from attnscope.scope.scope import Scope
    from attnscope.web.api_schemas import ViewRequest

Float32s = NDArray[np.float32]
SomeHeads = Sequence[tuple[int, int]]
"""Pairs of layer and head."""

RowKey = tuple[int, int, int | None, str]
"""Token, layer, head (None: the mean over heads) and direction of an attention row."""
ROWS = 4
"""Attention rows that a view keeps."""

SHADES = ("received", "average", "lift")
"""The values that can shade tokens."""


@dataclass(kw_only=True, eq=False)
class View:
    """The measured values of one prompt in one model. A measurement adds layers one by one."""

    request: ViewRequest
    model: str
    bundled: bool
    tokens: list[str]
    """The tokens of the prompt, then those of the completion."""
    prompt: int
    """How many tokens the prompt has."""
    ids: list[int]
    classes: list[int]
    """For every token the index of its class in `names`; -1 for none."""
    names: tuple[str, ...]
    aligned_positions: list[int] | None
    """For every token its position in the prompt without filler, or -1; None without filler."""
    filler: list[int]
    """The positions of the filler."""
    layer_count: int
    """How many layers the finished view has."""
    layers: list[int] = field(default_factory=list)
    """The layers measured so far."""
    received: dict[str, list[Float32s]] = field(default_factory=dict)
    """For every choice of queries, per layer [H, K]: attention received per query."""
    average: list[Float32s] = field(default_factory=list)
    """Per layer [H, K]: the average attention weight of each token."""
    uniform_average: list[Float32s] = field(default_factory=list)
    """Per layer [K]: `average` under uniform attention."""
    uniform: dict[str, list[Float32s]] = field(default_factory=dict)
    """For every choice of queries, per layer [K]: `received` under uniform attention."""
    values: dict[str, dict[str, list[Float32s]]] = field(default_factory=dict)
    """For every choice of queries and every measure of the map, per layer [H]."""
    next_tokens: list[tuple[str, float]] = field(default_factory=list)
    """The most probable next tokens with their probabilities."""
    scope: Scope | None = None
    """The scope that keeps queries and keys, if they are small enough."""
    by_layer: dict[int, Scope] = field(default_factory=dict)
    rows: dict[RowKey, Float32s] = field(default_factory=dict)
    """The attention rows and columns that were requested last, mean over the chosen heads [K]."""
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))

    @property
    def read(self) -> int:
        """How many tokens the model read: all but the last token of a completion."""
        return int(self.average[0].shape[1]) if self.average else len(self.tokens)

    @property
    def queries(self) -> list[str]:
        """The choices of queries."""
        return list(self.received)

    @property
    def bytes(self) -> int:
        """Roughly the bytes of this view, without queries and keys."""
        kept = [*self.average, *(a for of in self.received.values() for a in of)]
        return sum(array.nbytes for array in kept)

    def index_of(self, layer: int) -> int:
        """The index of a layer in the lists of this view."""
        if layer not in self.layers:
            raise unknown("layer", layer, self.layers)
        return self.layers.index(layer)

    def keep_row(self, key: RowKey, values: Float32s) -> None:
        """Keep an attention row, so that a zoom does not compute it again."""
        self.rows = dict([*self.rows.items(), (key, values)][-ROWS:])

    def row(self, key: RowKey) -> Float32s:
        """An attention row that was requested before."""
        if key not in self.rows:
            raise InputError(
                f"the view has no attention row of token {key[0]} in layer {key[1]}; request it "
                "first",
                code="unknown-row",
                token=key[0],
                layer=key[1],
            )
        return self.rows[key]

    def maps(self) -> list[str]:
        """The measures of the map of heads."""
        return list(self.values["all"]) if self.layers else []

    def shade(
        self, of: str, queries: str, layer: int | None, head: int | None, among: SomeHeads = ()
    ) -> Float32s:
        """[K]: the value that shades each token.

        Without `layer` or `head` it is the mean over them. With `among` it is the mean over those
        heads.
        """
        if of not in SHADES:
            raise unknown("shade", of, SHADES)
        self._check_queries(queries)
        source = self.average if of == "average" else self.received[queries]
        if among:
            rows = [
                (self._of_head(source[i], h, n), self.uniform[queries][i])
                for n, h in among
                for i in [self.index_of(n)]
            ]
        else:
            indices = range(len(self.layers)) if layer is None else [self.index_of(layer)]
            rows = [
                (self._of_head(source[i], head, self.layers[i]), self.uniform[queries][i])
                for i in indices
            ]
        total = np.sum([row for row, _ in rows], axis=0, dtype=np.float64)
        if of == "lift":
            uniform = np.sum([row for _, row in rows], axis=0, dtype=np.float64)
            total = np.divide(total, uniform, out=np.full_like(total, np.nan), where=uniform > 0)
            return total.astype(np.float32)
        mean: Float32s = np.asarray(total / len(rows), dtype=np.float32)
        return mean

    def head_map(self, of: str, queries: str) -> list[Float32s]:
        """Per layer [H]: the value of each head."""
        self._check_queries(queries)
        if of not in self.values[queries]:
            raise unknown("map", of, self.values[queries])
        return self.values[queries][of]

    def class_bars(self, queries: str, head: int | None) -> list[dict[str, Any]]:
        """The mass of every class that occurs, per layer."""
        present = [name for name in self.names if f"mass {name}" in self.maps()]
        return [
            {
                "layer": layer,
                "class": name,
                "mass": float(
                    self._of_head(self.head_map(f"mass {name}", queries)[n], head, layer)
                ),
            }
            for n, layer in enumerate(self.layers)
            for name in present
        ]

    def _check_queries(self, queries: str) -> None:
        if not self.layers:
            raise InputError("no layer is measured yet; try again later", code="no-layer-yet")
        if queries not in self.received:
            raise unknown("choice of queries", queries, self.received)

    def _of_head(self, values: Float32s, head: int | None, layer: int) -> Any:
        if head is None:
            return values.mean(0)
        if not 0 <= head < len(values):
            raise InputError(
                f"layer {layer} has no head {head}; known: 0 to {len(values) - 1}",
                code="unknown-head",
                value=head,
                layer=layer,
            )
        return values[head]


def curve(values: Float32s, first: int, last: int, bins: int) -> dict[str, Any]:
    """The values of the tokens `first` to `last` - 1 in at most `bins` bins of equal `size`.

    For every bin: its first token (`start`), and the `mean`, smallest (`low`) and largest (`high`)
    finite value; nan for a bin without finite values.
    """
    if not 0 <= first < last <= len(values):
        raise InputError(
            f"there is no range of tokens {first} to {last}; the bounds are 0 and {len(values)}",
            code="unknown-token",
            first=first,
            last=last,
            tokens=len(values),
        )
    finite = pl.when(pl.col("value").is_finite()).then("value")
    tokens = {"position": np.arange(first, last, dtype=np.int32), "value": values[first:last]}
    frame, size = binned(pl.DataFrame(tokens).with_columns(finite), bins, by=[])
    columns = {"start": "position", "mean": "value", "low": "min", "high": "max"}
    return {"size": size} | {name: frame[of].to_numpy() for name, of in columns.items()}
