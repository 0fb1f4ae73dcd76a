"""Render a look in the terminal: coloured tokens, class table, tokens with the largest weights."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnscope.look.colours import back_colours, legend, token_colours
from attnscope.look.text_measures import PART, Look
from attnscope.tokens.visible import visible_text

_MOST = 8


def render(look: Look) -> RenderableType:
    """Render a look for rich."""
    below = [*look.notes, *filter(None, [legend(look)])]
    return Group(
        Text(look.title, style="bold"),
        Text(),
        _tokens(look),
        Text(),
        _table(look),
        _most(look),
        *map(Text, below),
    )


def _tokens(look: Look) -> Text:
    text = Text()
    for n, (token, back) in enumerate(zip(look.tokens, token_colours(look), strict=True)):
        mark = " bold underline" if n == look.query else ""
        text.append(visible_text(token), style=f"#000000 on {back}{mark}")
    return text


def _table(look: Look) -> Table:
    table = Table(show_footer=True)
    tokens, mass = look.totals
    table.add_column("class", footer="total")
    table.add_column("tokens", justify="right", footer=f"{tokens:g}")
    table.add_column("mass", justify="right", footer=f"{mass:.4f}")
    table.add_column("lift", justify="right")
    colours = back_colours(look)
    for row in look.rows:
        style = f"#000000 on {colours[row.name]}" if look.colour == "class" else ""
        count = f"{row.tokens:.4g}"
        table.add_row(Text(row.name, style=style), count, f"{row.mass:.4f}", f"{row.lift:.2f}")
    return table


def _named(look: Look, token: int) -> str:
    """The text of a token; for a part of a character, that character."""
    if look.tokens[token] != PART:
        return repr(look.tokens[token])
    before = [name for name in look.tokens[:token] if name != PART]
    return f"{PART} of {before[-1][-1]!r}" if before else PART


def _most(look: Look) -> Table:
    """The tokens with the largest weights as text, for terminals without colours."""
    table = Table()
    table.add_column("largest weights", no_wrap=True)
    table.add_column("position", justify="right")
    table.add_column("weight", justify="right")
    for n in sorted(range(len(look.tokens)), key=lambda n: -look.weights[n])[:_MOST]:
        table.add_row(Text(_named(look, n)), str(n), f"{look.weights[n]:.3f}")
    return table
