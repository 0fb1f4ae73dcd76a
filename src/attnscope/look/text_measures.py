"""Measure one text: what each token receives, and the mass and lift of each class.

The numbers are those of the definitions. Over layers and heads they are means; the lift is the
mean mass over the mean mass that uniform attention would give. `weights` is what a token receives
from the average query (from the one query, where one was chosen), so it adds up to 1, less what a
learned sink takes.

This module must not know colours, terminals or HTML: see `terminal.py` and `html.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope import zoo
from attnscope.errors import InputError
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
    """How many tokens of the class the queries could see; shares, where tokens are divided."""
    mass: float
    lift: float


@dataclass(frozen=True, eq=False)
class Look:
    """What was seen. Shows itself in a terminal (rich) and in a notebook (HTML)."""

    tokens: tuple[str, ...]
    """What each token adds to the text, spaces in front included; special tokens by their name. A
    character that several tokens make is shown at the first, and `PART` at the others."""
    classes: tuple[str | None, ...]
    """The class of each token; of a divided one, the class with the largest share."""
    weights: NDArray[np.float64]
    """[K] what each token receives from the average query."""
    visible: NDArray[np.bool_]
    """[K] whether any of the queries could see the token."""
    names: tuple[str, ...]
    """All classes of the set, in order."""
    rows: tuple[ClassRow, ...]
    """The classes that the queries could see something of, in the order of the set."""
    title: str
    """Model, layer, head and queries, in words."""
    colour: str = "class"
    """What the tokens are coloured by: `class` or `attention`."""
    query: int | None = None
    """The token whose gaze this is."""

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
    chat: bool = False,
    system: str | None = None,
    beyond_positions: bool = False,
) -> Look:
    """Run the model on a text and look where its attention goes.

    layer, head   which one, counted from 0; the mean over all of them by default
    query         one token's gaze instead of everybody's: its index (from the end if negative),
                  or its text, where the last token that says so is meant
    classes       the class set of the table
    colour        colour tokens by `class` or by `attention`
    chat          put the text into the model's chat template first, as the user's question
    system        with this system prompt in front of it, in the chat template
    beyond_positions   allow a text longer than the model was made for, where it can be computed
    """
    import torch

    if colour not in ("class", "attention"):
        raise InputError(f"unknown colour {colour!r}; known: class, attention")
    if not isinstance(text, Prompt):
        text = as_question(text, tokenizer, system=system, chat=chat)
    elif system is not None:
        raise InputError("system goes with a plain text; a Prompt has a region 'system'")
    elif chat:
        text = apply_chat_template(text, tokenizer)
    tokens = tokenize(text, tokenizer)
    check_fit(model.config, tokens.ids, beyond=beyond_positions)
    warn_without_bos(model.config, tokenizer, tokens.ids, _name(model))
    shares = torch.from_numpy(classes.weights(tokens.ids, tokenizer)).double()
    if not bool(shares.any()):
        raise InputError(
            f"no token of this text is in any class of the set ({', '.join(classes.names)})"
        )
    names = token_names(tokens, tokenizer)
    asked = None if query is None else _find(query, names)
    weights, uniform, visible, heads = _measure(model, tokens, layer, head, asked)
    table = classes.table(tokenizer).classes[tokens.ids]
    return Look(
        tokens=names,
        classes=tuple(classes.names[c] if c >= 0 else None for c in table.tolist()),
        weights=weights.numpy(),
        visible=visible.numpy(),
        names=classes.names,
        rows=_rows(classes, shares, weights, uniform, visible),
        title=_title(model, names, layer, head, heads, asked),
        colour=colour,
        query=asked,
    )


PART = "₊"
"""Stands for a token that only has more bytes of a character that is shown already."""


def token_names(tokens: TokenizedPrompt, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """What each token adds to the text, by its place there: tokens split characters, drop spaces
    and change capitals, and the text knows better."""
    special = read_vocabulary(tokenizer).special
    pieces = tokenizer.convert_ids_to_tokens(tokens.ids.tolist())
    names, shown = [], 0
    text, places = tokens.prompt.text, tokens.offsets.tolist()
    for id, piece, (start, end) in zip(tokens.ids.tolist(), pieces, places, strict=True):
        names.append(text[shown:start] + piece if id in special else text[shown:end] or PART)
        shown = max(shown, end)
    return tuple(names)


def _find(query: int | str, names: tuple[str, ...]) -> int:
    """The index of the token that is meant."""
    if isinstance(query, str):
        said = [n for n, name in enumerate(names) if query in (name, name.strip())]
        if said:
            return said[-1]
        try:
            query = int(query)
        except ValueError:
            raise InputError(
                f"no token of this text says {query!r}; give one that does, or its index, "
                f"0 to {len(names) - 1}"
            ) from None
    if not -len(names) <= query < len(names):
        raise InputError(f"there is no token {query}; the text has tokens 0 to {len(names) - 1}")
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
                f"there is no head {head} in layer {number}; it has 0 to {len(by_head) - 1}"
            )
        count = float(scope.count(number)[0]) * len(scope.layers)
        received += (by_head.mean(0) if head is None else by_head[head]) / count
        uniform += scope.uniform(number)[0].double().cpu() / count
        visible |= scope.eligible(number)[0].cpu() > 0
    return received, uniform, visible, heads


def _rows(
    classes: ClassSet, shares: Tensor, weights: Tensor, uniform: Tensor, visible: Tensor
) -> tuple[ClassRow, ...]:
    # Of the average query of the average head: one sequence, one head, one query.
    of_keys, one = shares[None], shares.new_ones(1)
    found, level = (mass(of[None, None], of_keys, one) for of in (weights, uniform))
    columns = (shares[visible].sum(0), found[0, 0], lift(found, level)[0, 0])
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
