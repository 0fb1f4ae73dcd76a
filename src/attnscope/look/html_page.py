"""An HTML page of a scope for notebooks: the text, with a choice of layer and head.

A click on a token shows its attention row, if queries were stored. The page loads nothing from
outside. Each number takes one byte. Text is escaped. Light and dark backgrounds both work.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError, ScopeError, is_int, unknown
from attnscope.look.colours import full_weight
from attnscope.look.data_frame import label_keys, received_per_query
from attnscope.measures.layer import numpy_of
from attnscope.tokens.visible import STRONGEST, visible_text

if TYPE_CHECKING:
    from attnscope.scope.scope import Scope

MAX_CHARS = 300_000
"""Maximum number of characters of a page; the title names what is left out."""
SPAN_CHARS = 60
"""Maximum number of HTML characters per token, without its text."""
TOP_KEYS = 8
"""Number of largest weights that are stored for an attention row."""
MAX_ROWS = 8_000
"""Maximum number of attention rows, tokens × layers; with more, the page has none."""

RowProvider = Callable[[int, int], NDArray[np.float64]]
"""(layer, token) → [K]: the attention row of the token, mean over heads."""


@dataclass(frozen=True, eq=False)
class HtmlPage:
    """An HTML page that a notebook displays."""

    html: str

    def __repr__(self) -> str:
        return f"<HtmlPage of {len(self.html):,} characters; a notebook shows it, .save(path)>"

    def _repr_html_(self) -> str:
        return self.html

    def save(self, path: str | Path) -> None:
        """Write the page to a file."""
        head = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>attention</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            "<style>:root{color-scheme:light dark}body{margin:1.5rem auto;padding:0 1rem;"
            "max-width:60rem}</style>"
        )
        Path(path).write_text(head + self.html, encoding="utf-8")


def page_of_scope(scope: Scope, tokenizer: Any, sequence: int, input_ids: Any) -> HtmlPage:
    """See `Scope.show`."""
    text = label_keys(scope, tokenizer, input_ids)
    if not is_int(sequence) or sequence >= len(text.tokens):
        raise unknown("sequence", sequence, range(len(text.tokens)))
    real = np.flatnonzero(text.real[sequence])
    tokens = [text.tokens[sequence][n] for n in real]
    heads = [received_per_query(scope, layer, sequence)[:, real] for layer in scope.layers]

    def row_of(layer: int, n: int) -> NDArray[np.float64]:
        return numpy_of(scope.row(layer, int(real[n]), sequence).double().mean(0))[real]

    title = f"attention received, queries {str(scope._queries)!r}"
    return render_page(title, tokens, scope.layers, heads, row_of)


def render_page(
    title: str,
    tokens: list[str],
    layers: list[int],
    heads: list[NDArray[np.float64]],
    row_of: RowProvider | None = None,
) -> HtmlPage:
    """Render the page of a text from [H, K] of every layer: the mean weight each token receives.

    The title names what is left out for size.
    """
    n_tokens, tokens = len(tokens), [visible_text(token) for token in tokens]
    mean = np.stack([of.mean(0) for of in heads])
    left_out = []
    while len(tokens) * SPAN_CHARS + sum(map(len, tokens)) > MAX_CHARS // 2:
        tokens = tokens[: int(len(tokens) * 0.9)]
    if len(tokens) < n_tokens:
        left_out.append(f"the first {len(tokens):,} of {n_tokens:,} tokens")
    size = sum(len(of) + 1 for of in heads) * len(tokens)
    if size * 4 / 3 > MAX_CHARS // 3:
        heads = [of[:0] for of in heads]
        left_out.append("means over heads")
    if left_out:
        title += "; shown: " + ", ".join(left_out)
    page = _page(title, tokens, layers, mean, heads, None)
    top_rows = None if row_of is None or left_out else _top_rows(row_of, layers, len(tokens))
    if top_rows is not None:
        more = _page(title, tokens, layers, mean, heads, top_rows)
        page = more if len(more) < MAX_CHARS else page
    return HtmlPage(page)


def _top_rows(row_of: RowProvider, layers: list[int], n: int) -> NDArray[np.uint8] | None:
    """uint8 [1 + layers, tokens, TOP_KEYS, 3]: the largest weights of each attention row.

    Index 0 is the mean over layers. Each entry has the position in two bytes and the weight × 255.
    None if there are too many rows or queries were not stored; zeros for a token that is no query.
    """
    if n * len(layers) > MAX_ROWS or n > 2**16:
        return None
    packed = np.zeros((1 + len(layers), n, TOP_KEYS, 3), dtype=np.uint8)
    for token in range(n):
        try:
            rows = [row_of(layer, token)[:n] for layer in layers]
        except ScopeError:
            return None
        except InputError:
            continue
        for at, row in enumerate([np.mean(rows, axis=0), *rows]):
            top = np.argsort(-row, kind="stable")[:TOP_KEYS]
            packed[at, token, : len(top), 0], packed[at, token, : len(top), 1] = top >> 8, top & 255
            packed[at, token, : len(top), 2] = np.clip(row[top] * 255, 0, 255).round()
    return packed


def _page(
    title: str,
    tokens: list[str],
    layers: list[int],
    mean: NDArray[np.float64],
    heads: list[NDArray[np.float64]],
    top_rows: NDArray[np.uint8] | None,
) -> str:
    n = len(tokens)
    rows = [mean[:, :n].mean(0)]
    most = max(len(of) for of in heads)
    for of_layer, of in zip(mean, heads, strict=True):
        rows += [of_layer[:n], *(row[:n] for row in of)]
    full = [full_weight(row) for row in rows]
    shades = np.stack(
        [np.clip(row / f * 255, 0, 255).round() for row, f in zip(rows, full, strict=True)]
    ).astype(np.uint8)
    id = f"attnscope-{uuid4().hex[:12]}"
    colour = ",".join(str(int(STRONGEST[at : at + 2], 16)) for at in (1, 3, 5))
    spans = "".join(
        f'<span style="background:rgba({colour},{shade / 255:.2f})">{escape(token)}</span>'
        for token, shade in zip(tokens, shades[0].tolist(), strict=True)
    )
    # Where the rows of each layer begin: its mean, then its heads.
    at = np.cumsum([1, *(1 + len(of) for of in heads[:-1])]).tolist()
    data = {
        "full": [float(f"{f:.4g}") for f in full],
        "at": at,
        "heads": [len(of) for of in heads],
        "bytes": b64encode(shades.tobytes()).decode(),
        "row": "" if top_rows is None else b64encode(top_rows.tobytes()).decode(),
        "colour": colour,
    }
    layer_choice = _options([("mean", ""), *((str(layer), i) for i, layer in enumerate(layers))])
    head_choice = _options([("mean", ""), *((str(h), h) for h in range(most))])
    hint = "" if top_rows is None else "Click a token to show its attention (mean of heads). "
    return (
        f'<div id="{id}" style="font:14px/1.5 system-ui,sans-serif;padding:.25em 0">'
        f"<b>{escape(title)}</b>"
        f'<div style="margin:.5em 0"><label>layer <select>{layer_choice}</select></label> '
        f"<label>head <select>{head_choice}</select></label> "
        '<span style="display:inline-block;width:6em;height:.8em;border:1px solid #8888;'
        f'border-radius:3px;background:linear-gradient(90deg,transparent,rgb({colour}))"></span> '
        "<span></span></div>"
        '<div style="font:13px/1.85 ui-monospace,monospace;white-space:pre-wrap;'
        'overflow-wrap:anywhere;border:1px solid #8888;border-radius:8px;padding:.5em .7em">'
        f'{spans}</div><div role="status" style="opacity:.75;min-height:1.5em">{hint}</div>'
        f"<script>{_script(id, data)}</script></div>"
    )


def _options(choices: list[tuple[str, Any]]) -> str:
    return "".join(f'<option value="{value}">{name}</option>' for name, value in choices)


def _script(id: str, data: dict[str, Any]) -> str:
    """The script that recolors the text. Its data are numbers and base64, no text."""
    return (
        "(function(){"
        f"const root=document.getElementById({json.dumps(id)}),d={json.dumps(data)};"
        "const raw=atob(d.bytes),far=atob(d.row),[ls,hs]=root.querySelectorAll('select'),"
        "[bar,text,status]=root.querySelectorAll(':scope > div'),note=bar.lastElementChild,"
        "tokens=[...text.children],n=tokens.length;let chosen=null;"
        "const show=(of,full,what)=>{note.textContent='0 to '+full+' or more';"
        "tokens.forEach((t,i)=>{const s=Math.min(1,of(i)/full);"
        "t.style.background='rgba('+d.colour+','+s+')';"
        "t.style.outline=i===chosen?'2px solid':'';"
        "t.title=i+': '+what+of(i).toPrecision(3)+(s===1?' or more':'');});};"
        f"const look=(l)=>{{const w=new Float64Array(n),k={TOP_KEYS};for(let j=0;j<k;j++){{"
        "const at=((l*n+chosen)*k+j)*3;"
        "const to=far.charCodeAt(at)*256+far.charCodeAt(at+1);"
        "w[to]=Math.max(w[to],far.charCodeAt(at+2)/255);}return w;};"
        "function paint(){let r=0,l=ls.value===''?0:1+(+ls.value);if(l){"
        "for(const o of hs.options)o.disabled=o.value!==''&&+o.value>=d.heads[l-1];"
        "if(hs.selectedOptions[0].disabled)hs.value='';"
        "r=d.at[l-1]+(hs.value===''?0:1+(+hs.value));}else{hs.value='';}"
        "hs.disabled=!l||chosen!==null;"
        "if(chosen===null){show(i=>raw.charCodeAt(r*n+i)/255*d.full[r],d.full[r],'');"
        "if(d.row)status.textContent='Click a token to show its attention (mean of heads).';"
        "}else{const w=look(l),most=Math.max(...w.slice(1))||w[0]||1;"
        "show(i=>w[i],+most.toPrecision(3),'weight ');"
        f"status.textContent='The {TOP_KEYS} largest weights of token '+chosen+', mean of heads"
        "'+(l?', layer '+ls.selectedOptions[0].text:', mean of layers')+'. Click it again to go "
        "back.';}}"
        "tokens.forEach((t,i)=>{if(!d.row)return;t.tabIndex=0;t.style.cursor='pointer';"
        "t.onclick=()=>{chosen=chosen===i?null:i;paint();};"
        "t.onkeydown=(e)=>{if(e.key==='Enter')t.onclick();};});"
        "ls.onchange=paint;hs.onchange=paint;paint();})();"
    )
