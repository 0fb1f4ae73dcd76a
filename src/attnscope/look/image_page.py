"""An HTML page of the pictures of a prompt: a heat map over each that follows the chosen token.

A page has a choice of layer and head, and a small map of every head to choose from. It loads
nothing from outside. Each cell of a map takes one byte.
"""

from __future__ import annotations

import io
import json
from base64 import b64encode
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import ScopeError, missing_package
from attnscope.look.data_frame import label_keys
from attnscope.look.html_page import HtmlPage
from attnscope.measures.layer import numpy_of
from attnscope.tokens.visible import STRONGEST, visible_text

if TYPE_CHECKING:
    from attnscope.look.data_frame import LabelledText
    from attnscope.scope.scope import Scope
    from attnscope.vision import ImageTokens

MAX_BYTES = 6_000_000
"""Largest size of all maps of a page; the title names what is left out."""
LONGEST_SIDE = 640
"""Pictures are made smaller than this, in pixels."""
_FILES = Path(__file__).parent / "static"


class Maps(NamedTuple):
    """The maps of a page, in bytes."""

    queries: list[int]
    """Positions of the queries; the first maps are the mean over all counted queries."""
    heads: list[int]
    """By layer: the number of heads that have a map of their own."""
    cells: list[NDArray[np.uint8]]
    """By picture [1 + queries, maps, cells]: the mean over layers, then of each layer the mean
    over heads and each head."""
    full: list[NDArray[np.float64]]
    """By picture [1 + queries, maps]: the weight of the byte 255."""


def page_of_images(scope: Scope, tokenizer: Any, sequence: int, input_ids: Any) -> HtmlPage:
    """See `Scope.show`."""
    text = label_keys(scope, tokenizer, input_ids)
    placed = [
        (image, picture)
        for image, picture in zip(scope._images or (), scope._pictures, strict=True)
        if image.sequence == sequence
    ]
    images = [image for image, _ in placed]
    queries, left_out = _queries(scope, images, sequence)
    each_head = True
    per_map = sum(image.grid[0] * image.grid[1] for image in images)
    heads = [scope.received(layer).shape[1] for layer in scope.layers]
    if per_map * (1 + len(queries)) * (1 + sum(heads) + len(heads)) > MAX_BYTES:
        each_head, left_out = False, [*left_out, "means over heads"]
    most = MAX_BYTES // (per_map * (1 + len(heads))) - 1
    if not each_head and len(queries) > most:
        queries = queries[len(queries) - max(most, 0) :]
        left_out.append(f"the last {len(queries)} queries")
    maps = image_maps(scope, images, sequence, queries, each_head=each_head)
    title = f"attention to {len(images)} picture{'s' if len(images) > 1 else ''}"
    if left_out:
        title += f"; shown: {', '.join(left_out)}"
    return render_images(title, _chips(text, images, sequence, maps), scope.layers, placed, maps)


def _queries(scope: Scope, images: list[ImageTokens], sequence: int) -> tuple[list[int], list[str]]:
    """Positions of the counted queries outside the pictures; none if queries were not stored."""
    try:
        where = scope.query_positions(scope.layers[0])[sequence].tolist()
    except ScopeError:
        return [], ["means over queries, because watch had no keep=True"]
    inside = {int(position) for image in images for position in image.positions}
    return [position for position in where if position >= 0 and position not in inside], []


def image_maps(
    scope: Scope,
    images: list[ImageTokens],
    sequence: int,
    queries: list[int],
    *,
    each_head: bool = True,
) -> Maps:
    """The maps of these queries over the pictures of a sequence, and of the mean query."""
    weights = [_weights(scope, images, layer, sequence, queries) for layer in scope.layers]
    parts = [np.mean([of.mean(1) for of in weights], axis=0)[:, None]]
    for of in weights:
        parts.append(of.mean(1)[:, None])
        if each_head:
            parts.append(of)
    tokens = np.concatenate(parts, axis=1)  # [1 + queries, maps, tokens of all pictures]
    ends = np.cumsum([0, *(len(image.positions) for image in images)])
    cells, full = [], []
    for image, start, end in zip(images, ends[:-1], ends[1:], strict=True):
        of_image = image.tokens_to_map(tokens[..., start:end]).reshape(*tokens.shape[:2], -1)
        strongest = np.maximum(of_image.max(-1), 1e-30)
        full.append(strongest)
        cells.append(np.rint(of_image / strongest[..., None] * 255).astype(np.uint8))
    return Maps(queries, [of.shape[1] if each_head else 0 for of in weights], cells, full)


def _weights(
    scope: Scope, images: list[ImageTokens], layer: int, sequence: int, queries: list[int]
) -> NDArray[np.float64]:
    """[1 + queries, H, tokens of all pictures]: the mean query first."""
    positions = np.concatenate([image.positions for image in images])
    count = max(float(scope.count(layer)[sequence]), 1.0)
    mean = numpy_of(scope.received(layer)[sequence])[:, positions] / count
    if not queries:
        return np.asarray(mean[None], dtype=np.float64)
    where = scope.query_positions(layer)[sequence].tolist()
    classes = np.full((len(scope._first_token), scope._extents[layer][1]), -1, dtype=np.int64)
    classes[sequence, positions] = np.arange(len(positions))
    rows = numpy_of(scope.rows(layer, classes, len(positions))[sequence])
    chosen = rows[:, [where.index(query) for query in queries]].swapaxes(0, 1)
    return np.asarray(np.concatenate([mean[None], chosen]), dtype=np.float64)


def _chips(
    text: LabelledText, images: list[ImageTokens], sequence: int, maps: Maps
) -> list[tuple[str, int]]:
    """The text as (token, number of its query or -1); a picture's tokens are one chip."""
    number = {position: n for n, position in enumerate(maps.queries, 1)}
    first = {int(image.positions[0]): n for n, image in enumerate(images, 1)}
    inside = {int(position) for image in images for position in image.positions}
    chips = []
    for position in np.flatnonzero(text.real[sequence]).tolist():
        if position in first:
            count = len(images[first[position] - 1].positions)
            chips.append((f"[picture {first[position]}: {count} tokens]", -1))
        elif position not in inside:
            chips.append((text.tokens[sequence][position], number.get(position, -1)))
    return chips


def render_images(
    title: str,
    chips: list[tuple[str, int]],
    layers: list[int],
    placed: list[tuple[ImageTokens, Any]],
    maps: Maps,
) -> HtmlPage:
    """The page of these maps; `chips` are tokens with the numbers of their queries."""
    data = {
        "layers": layers,
        "heads": maps.heads,
        "colour": ",".join(str(int(STRONGEST[n : n + 2], 16)) for n in (1, 3, 5)),
        "images": [
            {
                "rows": image.grid[0],
                "columns": image.grid[1],
                "box": list(image.grid[2]),
                "cells": b64encode(cells.tobytes()).decode(),
                "full": [[float(f"{f:.3g}") for f in row] for row in full.tolist()],
            }
            for (image, _), cells, full in zip(placed, maps.cells, maps.full, strict=True)
        ],
    }
    pictures = "".join(
        f'<figure><div class="picture" style="aspect-ratio:{image.width}/{image.height}">'
        f"{picture_tag(picture, f'picture {n}')}<canvas></canvas></div>"
        f"<figcaption>picture {n}"
        f"{', layout assumed: a square of tokens' if image.assumed else ''}</figcaption></figure>"
        for n, (image, picture) in enumerate(placed, 1)
    )
    spans = "".join(
        f'<span data-query="{query}">{escape(visible_text(token))}</span>'
        if query >= 0
        else f"<span>{escape(visible_text(token))}</span>"
        for token, query in chips
    )
    id = f"attnscope-images-{uuid4().hex[:12]}"
    style = (_FILES / "images.css").read_text(encoding="utf-8").replace("#IMAGES", f"#{id}")
    script = (_FILES / "images.js").read_text(encoding="utf-8")
    content = json.dumps(data).replace("<", "\\u003c")
    return HtmlPage(
        f'<div id="{id}"><style>{style}</style><b>{escape(title)}</b>'
        "<p><label>layer <select></select></label> <label>head <select></select></label> "
        '<span class="bar"></span> <span class="full"></span></p>'
        f'<div class="both"><div class="pictures">{pictures}</div><div class="beside">'
        f'<div class="text">{spans}</div><p role="status"></p><div class="grid"></div></div></div>'
        f"<script>({script})(document.getElementById({json.dumps(id)}),{content})</script></div>"
    )


def picture_tag(picture: Any, name: str) -> str:
    """An `img` element with the picture in it; empty for a size without pixels."""
    shown = _as_image(picture)
    if shown is None:
        return ""
    shown.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    stream = io.BytesIO()
    shown.save(stream, "PNG")
    return f'<img alt="{name}" src="data:image/png;base64,{b64encode(stream.getvalue()).decode()}">'


def _as_image(picture: Any) -> Any:
    """A copy as a PIL image in RGB; None for a size without pixels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_package("a page with pictures", "pillow", "vision") from error
    if isinstance(picture, Image.Image):
        return picture.convert("RGB")
    if not hasattr(picture, "shape"):
        return None
    array = np.asarray(picture.cpu() if hasattr(picture, "cpu") else picture)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.dtype.kind == "f":
        array = array * (255 if array.max() <= 1 else 1)
    array = array.clip(0, 255).astype(np.uint8)
    return Image.fromarray(array.squeeze(-1) if array.shape[-1:] == (1,) else array).convert("RGB")
