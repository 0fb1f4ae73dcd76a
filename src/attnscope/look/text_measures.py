"""Measure one text: the attention each token receives, and the mass and lift of each class.

Values are means over layers and heads. The lift is the mean mass divided by the mean mass under
uniform attention. `weights` is the attention received per query (or from one chosen query). It adds
up to 1, minus the mass of a learned sink. `terminal.py` and `html.py` show the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope import zoo
from attnscope.errors import InputError, unknown
from attnscope.loading.compatibility import check_fit, warn_without_bos
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
    position = None if query is None else _find(query, names)
    weights, uniform, visible, heads = _measure(model, tokens, layer, head, position)
    table = classes.table(tokenizer).classes[tokens.ids]
    return Look(
        tokens=names,
        classes=tuple(classes.names[c] if c >= 0 else None for c in table.tolist()),
        weights=weights.numpy(),
        visible=visible.numpy(),
        names=classes.names,
        rows=_rows(classes, shares, weights, uniform, visible),
        title=_title(model, names, layer, head, heads, position),
        colour=colour,
        query=position,
    )


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


def _find(query: int | str, names: tuple[str, ...]) -> int:
    """The index of the query token."""
    if isinstance(query, str):
        matches = [n for n, name in enumerate(names) if query in (name, name.strip())]
        if matches:
            return matches[-1]
        try:
            query = int(query)
        except ValueError:
            raise InputError(
                f"no token of this text is {query!r}; give the text of a token, or its index, "
                f"0 to {len(names) - 1}",
                code="unknown-token",
                value=query,
                tokens=len(names),
            ) from None
    if not -len(names) <= query < len(names):
        raise InputError(
            f"there is no token {query}; the text has tokens 0 to {len(names) - 1}",
            code="unknown-token",
            value=query,
            tokens=len(names),
        )
    return query % len(names)


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
    received, uniform = torch.zeros(2, len(tokens), dtype=torch.float64)
    visible = torch.zeros(len(tokens), dtype=torch.bool)
    heads = 0
    for number in scope.layers:
        by_head = scope.received(number)[0].double().cpu()
        heads = max(heads, len(by_head))
        if head is not None and not 0 <= head < len(by_head):
            raise InputError(
                f"there is no head {head} in layer {number}; known: 0 to {len(by_head) - 1}",
                code="unknown-head",
                value=head,
                layer=number,
            )
        count = float(scope.count(number)[0]) * len(scope.layers)
        received += (by_head.mean(0) if head is None else by_head[head]) / count
        uniform += scope.uniform(number)[0].double().cpu() / count
        visible |= scope.eligible(number)[0].cpu() > 0
    return received, uniform, visible, heads


def _rows(
    classes: ClassSet, shares: Tensor, weights: Tensor, uniform: Tensor, visible: Tensor
) -> tuple[ClassRow, ...]:
    # One sequence, one head (the mean), one query (the mean).
    of_keys, one = shares[None], shares.new_ones(1)
    measured, level = (mass(of[None, None], of_keys, one) for of in (weights, uniform))
    columns = (shares[visible].sum(0), measured[0, 0], lift(measured, level)[0, 0])
    rows = zip(classes.names, *(column.tolist() for column in columns), strict=True)
    return tuple(ClassRow(*row) for row in rows if row[1] > 0)


def _title(
    model: PreTrainedModel,
    names: tuple[str, ...],
    layer: int | None,
    head: int | None,
    heads: int,
    query: int | None,
) -> str:
    where = "mean over layers" if layer is None else f"layer {layer}"
    which = f"mean over {heads} heads" if head is None else f"head {head}"
    who = "all queries" if query is None else f"query {query} {names[query]!r}"
    return f"{_name(model)} · {where} · {which} · {who}"


def _name(model: PreTrainedModel) -> str:
    path = getattr(model, "name_or_path", "")
    return zoo.name_of(path) or path or type(model).__name__
