"""The attention patterns of all heads of a short text, as one HTML page for a notebook.

Every head is a small picture, layers by heads. A click shows its matrix; a token of the text shows
one row of it. The page loads nothing from outside. A picture is a PNG in one colour; its opacity is
the square root of the weight, which works on light and dark backgrounds.
"""

from __future__ import annotations

import json
import struct
import zlib
from base64 import b64encode
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import is_int, unknown
from attnscope.look.data_frame import label_keys
from attnscope.look.html_page import HtmlPage
from attnscope.tokens.visible import STRONGEST, visible_text

if TYPE_CHECKING:
    from attnscope.scope.scope import Scope

MAX_TOKENS = 512
FINE_TOKENS = 128
"""Up to this length a weight has 255 steps, beyond it 15, so that a page stays below 20 MB."""
THUMBNAIL = 48
"""Width of a small picture; each of its pixels is the largest weight that it covers."""
LABELLED_TOKENS = 40
"""Up to this length the matrix has its tokens beside it."""

Shares = NDArray[np.float64]
_FILES = Path(__file__).parent / "static"


def map_of_scope(scope: Scope, tokenizer: Any, sequence: int, input_ids: Any) -> HtmlPage:
    """See `Scope.map`."""
    text = label_keys(scope, tokenizer, input_ids)
    if not is_int(sequence) or sequence >= len(text.tokens):
        raise unknown("sequence", sequence, range(len(text.tokens)))
    real = np.flatnonzero(text.real[sequence])
    queries = scope.query_positions(scope.layers[0])[sequence].cpu().numpy()
    queries = np.searchsorted(real, queries[queries >= 0])
    patterns = [
        scope._matrices(layer, sequence, MAX_TOKENS).cpu().numpy()[:, :, real]
        for layer in scope.layers
    ]
    tokens = [text.tokens[sequence][n] for n in real]
    return render_map(tokens, queries.tolist(), scope.layers, patterns)


def render_map(
    tokens: list[str], queries: list[int], layers: list[int], patterns: list[Shares]
) -> HtmlPage:
    """Render [H, queries, tokens] of every layer; `queries` are their places among the tokens."""
    levels = 255 if len(tokens) <= FINE_TOKENS else 15
    small = max(len(tokens), len(queries)) <= THUMBNAIL
    rows, large = [], []
    for layer, heads in zip(layers, patterns, strict=True):
        pictures = [_picture(head, levels) for head in heads]
        shown = pictures if small else [_picture(_pooled(head), levels) for head in heads]
        buttons = "".join(
            f'<button aria-label="layer {layer}, head {h}" title="layer {layer}, head {h}">'
            f'<img alt="" src="{source}"></button>'
            for h, source in enumerate(shown)
        )
        rows.append(f"<tr><th>{layer}</th><td>{buttons}</td></tr>")
        large += [] if small else pictures
    spans = "".join(f"<span>{escape(visible_text(token))}</span>" for token in tokens)
    data = {
        "tokens": [visible_text(token) for token in tokens],
        "queries": queries,
        "heads": [[layer, h] for layer, heads in zip(layers, patterns, strict=True)
                  for h in range(len(heads))],
        "large": large,
        "levels": levels,
        "labelled": len(tokens) <= LABELLED_TOKENS,
        "colour": ",".join(str(int(STRONGEST[n : n + 2], 16)) for n in (1, 3, 5)),
    }  # fmt: skip
    id = f"attnscope-map-{uuid4().hex[:12]}"
    style = (_FILES / "map.css").read_text(encoding="utf-8").replace("#MAP", f"#{id}")
    script = (_FILES / "map.js").read_text(encoding="utf-8")
    content = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")
    return HtmlPage(
        f'<div id="{id}"><style>{style}</style>'
        f"<p>Attention patterns of {sum(map(len, patterns))} heads, {len(tokens)} tokens. "
        "A row of a pattern is a query, a column is a key. Choose a head.</p>"
        f'<div class="both"><div class="grid"><table><caption>layers ↓, heads →</caption>'
        f"{''.join(rows)}</table></div>"
        '<div class="one"><b></b><div class="pattern"><div class="over"></div>'
        '<div class="beside"></div><div class="matrix"><img alt=""><i></i></div></div>'
        f'<div class="text">{spans}</div><p role="status"></p></div></div>'
        f"<script>({script})(document.getElementById({json.dumps(id)}),{content})</script></div>"
    )


def _pooled(weights: Shares) -> Shares:
    """The weights in at most THUMBNAIL rows and columns, each entry the largest it covers."""
    rows, columns = (
        np.linspace(0, size, min(size, THUMBNAIL) + 1).astype(int)[:-1] for size in weights.shape
    )
    along: Shares = np.maximum.reduceat(weights, rows, axis=0)
    pooled: Shares = np.maximum.reduceat(along, columns, axis=1)
    return pooled


def _picture(weights: Shares, levels: int) -> str:
    """A PNG as a data address: one colour, with the square root of the weight as its opacity."""
    steps = np.rint(np.sqrt(np.clip(weights, 0, 1)) * levels).astype(np.uint8)
    height, width = steps.shape
    bits = 8 if levels > 15 else 4
    if bits == 4:
        steps = np.pad(steps, ((0, 0), (0, width % 2)))
        steps = steps[:, 0::2] << 4 | steps[:, 1::2]
    colour = bytes(int(STRONGEST[n : n + 2], 16) for n in (1, 3, 5))
    opacity = bytes(round(255 * step / levels) for step in range(levels + 1))
    lines = np.pad(steps, ((0, 0), (1, 0)))  # every line begins with the number of its filter, 0
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 3, 0, 0, 0)),
        (b"PLTE", colour * (levels + 1)),
        (b"tRNS", opacity),
        (b"IDAT", zlib.compress(lines.tobytes(), 6)),
        (b"IEND", b""),
    ]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )
    return f"data:image/png;base64,{b64encode(png).decode()}"
