"""Builds a polars frame of all results of a scope, with the token and class of each position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError, ScopeError, unknown, wrong_shape
from attnscope.measures.layer import numpy_of
from attnscope.measures.registry import BY_HEAD, MEASURES
from attnscope.tokens import DEFAULT, ClassSet, read_vocabulary

if TYPE_CHECKING:
    import polars as pl

    from attnscope.scope.scope import Scope

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BY_TOKEN = ("received", "average")
BY_CLASS = ("mass", "lift")
BY_QUERY = ("rows", "query_entropy")


class LabelledText:
    """The tokens of the keys of a scope [B, K]: texts, classes, and which are not padding."""

    def __init__(self, ids: Ints, real: NDArray[np.bool_], tokenizer: Any, classes: ClassSet):
        self.real = real
        self.classes = classes
        vocabulary = read_vocabulary(tokenizer)
        self.of_class = classes.ids(ids, tokenizer, real)
        used = np.unique(ids[real])
        names = dict(
            zip(used.tolist(), tokenizer.convert_ids_to_tokens(used.tolist()), strict=True)
        )
        texts = {
            i: name if i in vocabulary.special else vocabulary.texts[i] for i, name in names.items()
        }
        self.tokens = [[texts.get(i, "") for i in row] for row in ids.tolist()]
        self.names = [[classes.names[c] if c >= 0 else None for c in row] for row in self.of_class]


def label_keys(
    scope: Scope, tokenizer: Any, input_ids: Any, classes: ClassSet = DEFAULT
) -> LabelledText:
    """The tokens and classes of the keys of a scope."""
    scope._read(scope.layers[0])  # an error if there are no results
    shape = [len(scope._first_token), scope._extents[scope.layers[0]][1]]
    ids = scope.tokens if input_ids is None else input_ids
    if ids is None:
        raise ScopeError(
            "the model did not get the token ids of these keys (it got inputs_embeds, or a "
            "prefix before them); give them as input_ids, int [batch, keys]",
            code="no-token-ids",
        )
    ids = np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)
    if list(ids.shape) != shape or ids.dtype.kind not in "iu":
        raise wrong_shape("input_ids", f"an int array {shape} ([batch, keys])", ids)
    real = scope._real_keys().numpy()
    return LabelledText(np.where(real, ids, 0), real, tokenizer, classes)


def received_per_query(scope: Scope, layer: int, sequence: int = 0) -> Floats:
    """[H, K]: the mean weight that each token receives from the counted queries."""
    count = max(float(scope.count(layer)[sequence]), 1.0)
    return numpy_of(scope.received(layer)[sequence]) / count


def frame_of_scope(
    scope: Scope, tokenizer: Any, measures: Sequence[str], classes: ClassSet, input_ids: Any
) -> pl.DataFrame:
    """See `Scope.to_frame`."""
    import polars as pl

    known = {*BY_TOKEN, *BY_CLASS, *BY_QUERY, *BY_HEAD}
    names = [measures] if isinstance(measures, str) else list(measures)
    for name in names:
        if name not in known:
            raise unknown("measure", name, sorted(known))
        if tokenizer is None and name in (*BY_CLASS, "rows"):
            raise InputError(
                f"{name!r} is measured for classes of tokens, so it needs the tokenizer: "
                "to_frame(tokenizer, …)",
                code="needs-tokenizer",
                measure=name,
            )
    text = None if tokenizer is None else label_keys(scope, tokenizer, input_ids, classes)
    parts = [
        _long_rows(layer, *part)
        for layer in scope.layers
        for name in names
        for part in _parts(scope, layer, name, text)
    ]
    table = pl.concat(parts).with_columns(pl.col("value").fill_nan(None))
    return table if text is None else _with_tokens(table, text)


def _parts(
    scope: Scope, layer: int, name: str, text: LabelledText | None
) -> Iterator[tuple[str, str | None, Floats, Ints | None]]:
    """The columns of one measure of one layer: name, item, values [B, H, N] and their positions."""
    if name in BY_HEAD:
        values = numpy_of(scope.measure(name, layer))
        values = values.reshape(*values.shape[:2], -1)
        for c, column in enumerate(MEASURES[name].columns):
            yield column, None, values[..., c : c + 1], None
    elif name in BY_TOKEN:
        real = scope._real_keys().numpy()
        positions = np.where(real, np.arange(real.shape[1]), -1)
        yield name, None, numpy_of(getattr(scope, name)(layer)), positions
    elif name == "query_entropy":
        yield name, None, numpy_of(scope.query_entropy(layer)), _queries(scope, layer)
    else:
        assert text is not None
        values = numpy_of(getattr(scope, name)(layer, text.of_class, len(text.classes)))
        where = _queries(scope, layer) if name == "rows" else None
        for c, item in enumerate(text.classes.names):
            yield name, item, values[..., c] if name == "rows" else values[..., c : c + 1], where


def _queries(scope: Scope, layer: int) -> Ints:
    where: Ints = scope.query_positions(layer).cpu().numpy()
    return where


def _long_rows(
    layer: int, measure: str, item: str | None, values: Floats, where: Ints | None
) -> pl.DataFrame:
    """One row for each number of `values` [B, H, N]; with `where`, only at positions from 0."""
    import polars as pl

    kept = np.bool_(True) if where is None else (where >= 0)[:, None]
    b, h, n = np.nonzero(np.broadcast_to(kept, values.shape))
    numbers = pl.DataFrame({"sequence": b, "head": h, "value": values[b, h, n]})
    return numbers.select(
        "sequence",
        pl.lit(layer, pl.Int64).alias("layer"),
        "head",
        pl.lit(measure).alias("measure"),
        pl.lit(item, pl.String).alias("item"),
        pl.lit(None if where is None else pl.Series(where[b, n]), pl.Int64).alias("position"),
        "value",
    )


def _with_tokens(table: pl.DataFrame, text: LabelledText) -> pl.DataFrame:
    """The table with the text and class of the token at each position."""
    import polars as pl

    B, K = text.real.shape
    tokens = pl.DataFrame(
        {
            "sequence": np.repeat(np.arange(B), K),
            "position": np.tile(np.arange(K), B),
            "token": [token for row in text.tokens for token in row],
            "class": pl.Series([c for row in text.names for c in row], dtype=pl.String),
        }
    )
    joined = table.join(tokens, on=["sequence", "position"], how="left", maintain_order="left")
    return joined.select(pl.exclude("value"), "value")
