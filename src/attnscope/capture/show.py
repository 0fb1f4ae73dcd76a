"""A scope in a notebook: its text shaded by what tokens receive, with a choice of layer and head.

One piece of HTML without anything from outside, and small: numbers are one byte each. Text is
escaped, and shown as it is shown everywhere.
"""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from attnscope.capture.labelled import text_of
from attnscope.errors import InputError
from attnscope.tokens.visible import STRONGEST, mixed, visible_text

if TYPE_CHECKING:
    from attnscope.capture.scope import Scope

MOST = 300_000
"""Characters of a page: what is too much for it is left out, and said."""
SPAN = 90
"""Characters around a token, at most, beside its text."""


@dataclass(frozen=True, eq=False)
class Shown:
    """What is shown; a notebook displays it by itself."""

    html: str

    def _repr_html_(self) -> str:
        return self.html

    def save(self, path: str | Path) -> None:
        """As a page of its own."""
        head = '<!doctype html><meta charset="utf-8"><title>attention</title>'
        Path(path).write_text(head + self.html, encoding="utf-8")


def shown(scope: Scope, tokenizer: Any, sequence: int, input_ids: Any) -> Shown:
    """See `Scope.show`."""
    text = text_of(scope, tokenizer, input_ids)
    if isinstance(sequence, bool) or not 0 <= sequence < len(text.tokens):
        raise InputError(f"there is no sequence {sequence!r}; there are 0 … {len(text.tokens) - 1}")
    there = np.flatnonzero(text.real[sequence])
    tokens = [text.tokens[sequence][n] for n in there]
    heads = _weights(scope, sequence, there)
    return drawn(
        f"attention received, queries {str(scope._queries)!r}", tokens, scope.layers, heads
    )


def drawn(
    title: str, tokens: list[str], layers: list[int], heads: list[NDArray[np.float64]]
) -> Shown:
    """The page of a text, from what its tokens receive from the average query: [H, K] of every
    layer. What is too much for it is left out, and said in the title."""
    whole, tokens = len(tokens), [visible_text(token) for token in tokens]
    mean = np.stack([of.mean(0) for of in heads])
    left_out = []
    while len(tokens) * SPAN + sum(map(len, tokens)) > MOST // 2:
        tokens = tokens[: int(len(tokens) * 0.9)]
    if len(tokens) < whole:
        left_out.append(f"the first {len(tokens):,} of {whole:,} tokens")
    size = sum(len(of) + 1 for of in heads) * len(tokens)
    if size * 4 / 3 > MOST // 3:
        heads = [of[:0] for of in heads]
        left_out.append("means over heads")
    if left_out:
        title += "; shown: " + ", ".join(left_out)
    return Shown(_page(title, tokens, layers, mean, heads))


def _weights(scope: Scope, sequence: int, there: NDArray[np.int64]) -> list[NDArray[np.float64]]:
    """What tokens receive from the average query, [H, K] of every layer."""
    heads = []
    for layer in scope.layers:
        count = max(float(scope.count(layer)[sequence]), 1.0)
        received = scope.received(layer)[sequence].cpu().double().numpy()
        heads.append(received[:, there] / count)
    return heads


def _page(
    title: str,
    tokens: list[str],
    layers: list[int],
    mean: NDArray[np.float64],
    heads: list[NDArray[np.float64]],
) -> str:
    n = len(tokens)
    everything = [mean[:, :n].mean(0)]
    most = max(len(of) for of in heads)
    for of_layer, of in zip(mean, heads, strict=True):
        everything += [of_layer[:n], *(row[:n] for row in of)]
    full = [_full(row) for row in everything]
    shades = np.stack(
        [np.clip(row / f * 255, 0, 255).round() for row, f in zip(everything, full, strict=True)]
    ).astype(np.uint8)
    id = f"attnscope-{uuid4().hex[:12]}"
    colours = [mixed(STRONGEST, 1 - float(shade) / 255) for shade in shades[0]]
    spans = "".join(
        f'<span style="background:{colour}">{escape(token)}</span>'
        for token, colour in zip(tokens, colours, strict=True)
    )
    # Where the rows of each layer begin: its mean, then its heads.
    at = np.cumsum([1, *(1 + len(of) for of in heads[:-1])]).tolist()
    data = {
        "full": [float(f"{f:.4g}") for f in full],
        "at": at,
        "heads": [len(of) for of in heads],
        "bytes": b64encode(shades.tobytes()).decode(),
    }
    layer_choice = _options([("mean", ""), *((str(layer), i) for i, layer in enumerate(layers))])
    head_choice = _options([("mean", ""), *((str(h), h) for h in range(most))])
    return (
        f'<div id="{id}" style="color:#000;background:#fff;padding:.5em">'
        f"<div><b>{escape(title)}</b></div>"
        f"<label>layer <select>{layer_choice}</select></label> "
        f"<label>head <select>{head_choice}</select></label> <span></span>"
        '<div style="font-family:monospace;white-space:pre-wrap;line-height:1.7;margin:.6em 0">'
        f"{spans}</div><script>{_script(id, data)}</script></div>"
    )


def _full(row: NDArray[np.float64]) -> float:
    """The weight of the strongest shade: the largest but the first token's, which in many models
    takes so much that nothing else would show."""
    others = row[1:] if len(row) > 1 else row
    return max(float(others.max(initial=0.0)), 1e-30)


def _options(choices: list[tuple[str, Any]]) -> str:
    return "".join(f'<option value="{value}">{name}</option>' for name, value in choices)


def _script(id: str, data: dict[str, Any]) -> str:
    """Recolour when a choice is made. The data are numbers and base64: nothing of the text."""
    ends = [int(STRONGEST[at : at + 2], 16) for at in (1, 3, 5)]
    return (
        "(function(){"
        f"const root=document.getElementById({json.dumps(id)}),d={json.dumps(data)},e={ends};"
        "const raw=atob(d.bytes),[ls,hs]=root.querySelectorAll('select'),"
        "note=root.querySelector(':scope > span');"
        "const tokens=[...root.lastElementChild.previousElementSibling.children];"
        "function paint(){let r=0;if(ls.value!==''){const l=+ls.value;"
        "for(const o of hs.options)o.disabled=o.value!==''&&+o.value>=d.heads[l];"
        "if(hs.selectedOptions[0].disabled)hs.value='';"
        "r=d.at[l]+(hs.value===''?0:1+(+hs.value));}else{hs.value='';}"
        "hs.disabled=ls.value==='';"
        "note.textContent='full colour: '+d.full[r]+' or more';"
        "tokens.forEach((t,i)=>{const s=raw.charCodeAt(r*tokens.length+i)/255;"
        "t.style.background='rgb('+e.map(c=>Math.round(255+(c-255)*s)).join()+')';"
        "t.title=i+': '+(s*d.full[r]).toPrecision(3)+(s===1?' or more':'');});}"
        "ls.onchange=paint;hs.onchange=paint;paint();})();"
    )
