"""Builds a polars frame of all results of a scope, with the token and class of each position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError, ScopeError, unknown
from attnscope.measures.registry import BY_HEAD, MEASURES
from attnscope.tokens import DEFAULT, ClassSet, read_vocabulary

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from attnscope.capture.scope import Scope

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
    totals = scope._read(scope.layers[0])[0]
    shape = [len(totals.first_token), totals.keys]
    ids = scope.tokens if input_ids is None else input_ids
    if ids is None:
        raise ScopeError(
            "the model did not get the token ids of these keys (it got inputs_embeds, or a "
            "prefix before them); give them as input_ids, int [batch, keys]",
            code="no-token-ids",
        )
    ids = np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)
    if list(ids.shape) != shape or ids.dtype.kind not in "iu":
        raise InputError(
            f"input_ids must be an int array {shape} ([batch, keys]); got {ids.dtype} "
            f"{list(ids.shape)}",
            code="wrong-shape",
            argument="input_ids",
            got=f"{ids.dtype} {list(ids.shape)}",
        )
    real = np.arange(totals.keys) >= totals.first_token.numpy()[:, None]
    for selection in totals.selections:
        geometry = selection.geometry
        if geometry.real_queries is not None and not geometry.cross:
            columns = slice(geometry.first_query, geometry.first_query + geometry.queries)
            real[:, columns] &= geometry.real_queries.numpy()
    return LabelledText(np.where(real, ids, 0), real, tokenizer, classes)


def frame_of_scope(
    scope: Scope,
    tokenizer: Any,
    measures: Sequence[str],
    classes: ClassSet,
    input_ids: Any,
) -> pl.DataFrame:
    """See `Scope.to_frame`."""
    known = {*BY_TOKEN, *BY_CLASS, *BY_QUERY, *BY_HEAD}
    for name in [measures] if isinstance(measures, str) else measures:
        if name not in known:
            raise unknown("measure", name, sorted(known))
        if tokenizer is None and name in (*BY_CLASS, "rows"):
            raise InputError(
                f"{name!r} is measured for classes of tokens, so it needs the tokenizer: "
                "to_frame(tokenizer, …)",
                code="needs-tokenizer",
                measure=name,
            )
    names = [measures] if isinstance(measures, str) else list(measures)
    text = None if tokenizer is None else label_keys(scope, tokenizer, input_ids, classes)
    parts = [
        part
        for layer in scope.layers
        for name in names
        for part in _parts(scope, layer, name, text)
    ]
    return _concat(parts, text)


def _parts(
    scope: Scope, layer: int, name: str, text: LabelledText | None
) -> Iterator[dict[str, Any]]:
    """The columns of one measure of one layer, without tokens."""
    if name in BY_HEAD:
        values = _numpy(scope.measure(name, layer))
        values = values.reshape(*values.shape[:2], -1)
        for c, column in enumerate(MEASURES[name].columns):
            yield _long_rows(layer, column, None, values[..., c : c + 1], None)
    elif name in BY_TOKEN:
        keys = _real_keys(scope, layer, text)
        yield _long_rows(layer, name, None, _numpy(getattr(scope, name)(layer)), keys)
    elif name == "query_entropy":
        yield _long_rows(
            layer, name, None, _numpy(scope.query_entropy(layer)), _queries(scope, layer)
        )
    else:
        assert text is not None
        values = _numpy(getattr(scope, name)(layer, text.of_class, len(text.classes)))
        where = _queries(scope, layer) if name == "rows" else None
        for c, item in enumerate(text.classes.names):
            of = values[..., c] if name == "rows" else values[..., c : c + 1]
            yield _long_rows(layer, name, item, of, where)


def _queries(scope: Scope, layer: int) -> Ints:
    where: Ints = scope.query_positions(layer).cpu().numpy()
    return where


def _real_keys(scope: Scope, layer: int, text: LabelledText | None) -> Ints:
    """[B, K]: the positions of the keys, -1 for padding."""
    totals = scope._read(layer)[0]
    order = np.arange(totals.keys)
    if text is not None:
        return np.where(text.real, order, -1)
    return np.where(order >= totals.first_token.numpy()[:, None], order, -1)


def _long_rows(
    layer: int, measure: str, item: str | None, values: Floats, where: Ints | None
) -> dict[str, Any]:
    """One row for each number of `values` [B, H, N]; with `where`, only at positions from 0."""
    columns = np.ones(values.shape, dtype=bool)
    if where is not None:
        columns = np.broadcast_to((where >= 0)[:, None], values.shape)
    b, h, n = np.nonzero(columns)
    return {
        "sequence": b,
        "layer": layer,
        "head": h,
        "measure": measure,
        "item": item,
        "position": None if where is None else where[b, n],
        "value": values[b, h, n],
    }


def _concat(parts: list[dict[str, Any]], text: LabelledText | None) -> pl.DataFrame:
    import polars as pl

    from attnscope.capture.to_pandas import LabelledFrame

    schema = {
        "sequence": pl.Int64,
        "layer": pl.Int64,
        "head": pl.Int64,
        "measure": pl.String,
        "item": pl.String,
        "position": pl.Int64,
        "value": pl.Float64,
    }
    frames = []
    for part in parts:
        size = len(part["value"])
        columns = {
            name: pl.Series(name, value, dtype=schema[name])
            if isinstance(value, np.ndarray)
            else pl.repeat(value, size, dtype=schema[name], eager=True).alias(name)
            for name, value in part.items()
        }
        frames.append(pl.DataFrame(columns))
    table = pl.concat(frames).with_columns(pl.col("value").fill_nan(None))
    if text is not None:
        tokens = pl.DataFrame(
            {
                "sequence": np.repeat(np.arange(len(text.tokens)), text.real.shape[1]),
                "position": np.tile(np.arange(text.real.shape[1]), len(text.tokens)),
                "token": [token for row in text.tokens for token in row],
                "class": pl.Series([c for row in text.names for c in row], dtype=pl.String),
            }
        )
        table = table.join(
            tokens, on=["sequence", "position"], how="left", maintain_order="left"
        ).select(
            "sequence", "layer", "head", "measure", "item", "position", "token", "class", "value"
        )
    return LabelledFrame(table)


def _numpy(tensor: Tensor) -> Floats:
    values: Floats = tensor.detach().cpu().double().numpy()
    return values
