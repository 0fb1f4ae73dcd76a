"""Measure one text: the attention each token receives, and the mass and lift of each class.

Values are means over layers and heads. The lift is the mean mass divided by the mean mass under
uniform attention. `weights` is the attention received per query (or from one chosen query). It adds
up to 1, minus the mass of a learned sink. `terminal.py` and `html.py` show the result.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope import zoo
from attnscope.errors import InputError, unknown
from attnscope.loading.compatibility import check_fit, warn_without_bos
from attnscope.look.data_frame import received_per_query
from attnscope.measures.mass import lift, mass
from attnscope.tokens import (
    DEFAULT,
    ClassSet,
    Prompt,
    TokenizedPrompt,
    apply_chat_template,
    as_question,
    pad,
    read_vocabulary,
    tokenize,
)
from attnscope.tokens.visible import visible_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ClassRow:
    """One line of the class table."""

    name: str
    tokens: float
    """The number of tokens of the class that the queries can see; fractions for split tokens."""
    mass: float
    lift: float


@dataclass(frozen=True, eq=False)
class Look:
    """The measured text. rich prints it in a terminal, and notebooks show it as HTML."""

    tokens: tuple[str, ...]
    """The text of each token, including spaces before it; the name of a special token. If several
    tokens form one character, the first has the character and the others have `PART`."""
    classes: tuple[str | None, ...]
    """The class of each token; for a split token, the class with the largest share."""
    weights: NDArray[np.float64]
    """[K] the attention that each token receives per query."""
    visible: NDArray[np.bool_]
    """[K] whether any of the queries can see the token."""
    names: tuple[str, ...]
    """All classes of the set, in order."""
    rows: tuple[ClassRow, ...]
    """The classes with visible tokens, in the order of the set."""
    title: str
    """Model, layer, head and queries as text."""
    colour: str = "class"
    """How tokens are coloured: by `class` or by `attention`."""
    query: int | None = None
    """The query whose attention row this is; None for all queries."""
    notes: tuple[str, ...] = ()
    """Sentences that the reader needs: about the first token, the query, and signs."""

    @property
    def totals(self) -> tuple[float, float]:
        """The number of tokens and the mass of all rows."""
        return sum(row.tokens for row in self.rows), sum(row.mass for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The results as plain data."""
        tokens = zip(self.tokens, self.classes, self.weights.tolist(), strict=True)
        return {
            "title": self.title,
            "query": self.query,
            "notes": list(self.notes),
            "tokens": [{"text": text, "class": c, "weight": w} for text, c, w in tokens],
            "classes": [asdict(row) for row in self.rows],
        }

    def __rich__(self) -> RenderableType:
        from attnscope.look.terminal import render

        return render(self)

    def _repr_html_(self) -> str:
        from attnscope.look.html import render

        return render(self)


def look(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Prompt,
    *,
    layer: int | None = None,
    head: int | None = None,
    query: int | str | None = None,
    keys: str = "all",
    classes: ClassSet = DEFAULT,
    colour: str = "class",
    color: str | None = None,
    chat: bool = False,
    system: str | None = None,
    beyond_positions: bool = False,
) -> Look:
    """Run the model on a text and measure where its attention goes.

    layer, head   one layer or head, from 0; default: the mean over all
    query         measure the attention row of one token: its index (negative: from the end), or
                  its text (the last token with this text); default: all queries
    keys          "all", or "not-first" to leave out the attention to the first token
    classes       the class set of the table
    colour        colour tokens by `class` or by `attention`
    color         the same, in the other spelling
    chat          apply the model's chat template, with the text as the user's question
    system        a system prompt; implies the chat template
    beyond_positions   allow more tokens than the model has positions, if it can compute them
    """
    import torch

    colour = color or colour
    if colour not in ("class", "attention"):
        raise unknown("colour", colour, ("class", "attention"))
    if keys not in ("all", "not-first"):
        raise unknown("keys", keys, ("all", "not-first"))
    if not isinstance(text, Prompt):
        text = as_question(text, tokenizer, system=system, chat=chat)
    elif system is not None:
        raise InputError(
            "system needs a plain text; a Prompt has its own region 'system'",
            code="conflicting-arguments",
        )
    elif chat:
        text = apply_chat_template(text, tokenizer)
    tokens = tokenize(text, tokenizer)
    check_fit(model.config, tokens.ids, beyond=beyond_positions)
    warn_without_bos(model.config, tokenizer, tokens.ids, _name(model))
    shares = torch.from_numpy(classes.weights(tokens.ids, tokenizer)).double()
    if not bool(shares.any()):
        raise InputError(
            f"no token of this text is in any class of the set ({', '.join(classes.names)})",
            code="no-classified-token",
            classes=list(classes.names),
        )
    names = token_names(tokens, tokenizer)
    matches = [] if query is None else _find(query, names)
    position = matches[-1] if matches else None
    weights, uniform, visible, heads = _measure(model, tokens, layer, head, position)
    notes = _notes(names, matches, float(weights[0]), keys)
    if keys == "not-first":
        weights[0], uniform[0], visible[0] = 0.0, 0.0, False
    table = classes.main_class(tokens.ids, tokenizer)
    where = "mean over layers" if layer is None else f"layer {layer}"
    which = f"mean over {heads} heads" if head is None else f"head {head}"
    who = "all queries" if position is None else f"query {position} {names[position]!r}"
    restriction = ("without the first token",) if keys == "not-first" else ()
    return Look(
        tokens=names,
        classes=tuple(classes.names[c] if c >= 0 else None for c in table.tolist()),
        weights=weights.numpy(),
        visible=visible.numpy(),
        names=classes.names,
        rows=_rows(classes, shares, weights, uniform, visible),
        title=" · ".join((_name(model), where, which, who, *restriction)),
        colour=colour,
        query=position,
        notes=notes,
    )


SINK = 0.2
"""Attention to the first token from which a note mentions it."""


def _notes(names: tuple[str, ...], queries: list[int], first: float, keys: str) -> tuple[str, ...]:
    notes = []
    if len(queries) > 1:
        places = ", ".join(map(str, queries))
        notes.append(f"{len(queries)} tokens have this text ({places}); the query is the last one.")
    if first >= SINK and keys == "all":
        notes.append(
            f"{first:.2f} of the attention is on the first token {names[0]!r} (an attention "
            "sink); keys not-first leave it out."
        )
    if PART in names:
        notes.append(f"{PART} is a further token of the character before it.")
    if any("‹" in visible_text(name) and "‹" not in name for name in names):
        notes.append("A code in ‹ › is an invisible character.")
    return tuple(notes)


PART = "₊"
"""The text of a token that only adds bytes to the character of the token before it."""


def token_names(tokens: TokenizedPrompt, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The text of each token, by its offsets in the prompt.

    The vocabulary would not do: its tokens split characters, drop spaces and change capitals.
    """
    special = read_vocabulary(tokenizer).special
    pieces = tokenizer.convert_ids_to_tokens(tokens.ids.tolist())
    names, shown = [], 0
    text, places = tokens.prompt.text, tokens.offsets.tolist()
    for id, piece, (start, end) in zip(tokens.ids.tolist(), pieces, places, strict=True):
        names.append(text[shown:start] + piece if id in special else text[shown:end] or PART)
        shown = max(shown, end)
    return tuple(names)


def _find(query: int | str, names: tuple[str, ...]) -> list[int]:
    """The indices of the tokens that are meant."""
    if isinstance(query, str):
        matches = [n for n, name in enumerate(names) if query in (name, name.strip())]
        if matches:
            return matches
    if not re.fullmatch(r"-?\d{1,9}", str(query)) or not -len(names) <= int(query) < len(names):
        raise InputError(
            f"no token of this text is {query!r}; give the text of a token, or its index, "
            f"0 to {len(names) - 1}",
            code="unknown-token",
            value=query,
            tokens=len(names),
        )
    return [int(query) % len(names)]


def _measure(
    model: PreTrainedModel,
    tokens: TokenizedPrompt,
    layer: int | None,
    head: int | None,
    query: int | None,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """[K] received, [K] received under uniform attention (both per query), [K] visible, heads."""
    import torch

    import attnscope

    queries: Any = "all"
    if query is not None:
        queries = torch.zeros(1, len(tokens), dtype=torch.bool)
        queries[0, query] = True
    inputs = {name: value.to(model.device) for name, value in pad([tokens]).inputs.items()}
    with torch.no_grad(), attnscope.watch(model, layers=layer, queries=queries) as scope:
        model(**inputs)
    received, uniform, visible, heads = [], [], [], 0
    for number in scope.layers:
        by_head = torch.from_numpy(received_per_query(scope, number))
        heads = max(heads, len(by_head))
        if head is not None and not 0 <= head < len(by_head):
            raise unknown("head", head, range(len(by_head)))
        received.append(by_head.mean(0) if head is None else by_head[head])
        uniform.append(scope.uniform(number)[0].double().cpu() / float(scope.count(number)[0]))
        visible.append(scope.eligible(number)[0].cpu() > 0)
    mean, expected = (torch.stack(of).mean(0) for of in (received, uniform))
    return mean, expected, torch.stack(visible).any(0), heads


def _rows(
    classes: ClassSet, shares: Tensor, weights: Tensor, uniform: Tensor, visible: Tensor
) -> tuple[ClassRow, ...]:
    # One sequence, one head (the mean), one query (the mean).
    of_keys, one = shares[None], shares.new_ones(1)
    measured, level = (mass(of[None, None], of_keys, one) for of in (weights, uniform))
    columns = (shares[visible].sum(0), measured[0, 0], lift(measured, level)[0, 0])
    rows = zip(classes.names, *(column.tolist() for column in columns), strict=True)
    return tuple(ClassRow(*row) for row in rows if row[1] > 0)


def _name(model: PreTrainedModel) -> str:
    path = getattr(model, "name_or_path", "")
    return zoo.name_of(path) or path or type(model).__name__
