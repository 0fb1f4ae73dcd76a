"""Render a look as HTML for a notebook: tokens and class table, self-contained and escaped."""

from html import escape

from attnscope.look.colours import back_colours, legend, token_colours
from attnscope.look.text_measures import Look
from attnscope.tokens.visible import visible_text


def render(look: Look) -> str:
    """Render a look as an HTML fragment without scripts."""
    lines = [*look.notes, *filter(None, [legend(look)])]
    note = "".join(f"<div>{escape(line)}</div>" for line in lines)
    return (
        f'<div class="attnscope-look"><div><b>{escape(look.title)}</b></div>'
        '<div style="font-family:monospace;white-space:pre-wrap;line-height:1.7;margin:.6em 0">'
        f"{_tokens(look)}</div>{_table(look)}{note}</div>"
    )


def _tokens(look: Look) -> str:
    spans = []
    for n, (token, back) in enumerate(zip(look.tokens, token_colours(look), strict=True)):
        tip = f"{n} {token!r}: {look.classes[n] or 'no class'}, {look.weights[n]:.4f}"
        ring = "outline:2px solid #000;" if n == look.query else ""
        spans.append(
            f'<span title="{escape(tip)}" style="background:{back};color:#000;{ring}">'
            f"{escape(visible_text(token))}</span>"
        )
    return "".join(spans)


def _table(look: Look) -> str:
    colours = back_colours(look)
    rows = "".join(
        f'<tr><td style="background:{colours[row.name]};color:#000">{escape(row.name)}</td>'
        f"<td>{row.tokens:.4g}</td><td>{row.mass:.4f}</td><td>{row.lift:.2f}</td></tr>"
        for row in look.rows
    )
    tokens, mass = look.totals
    return (
        "<table><thead><tr><th>class</th><th>tokens</th><th>mass</th><th>lift</th></tr></thead>"
        f"<tbody>{rows}</tbody><tfoot><tr><td>total</td><td>{tokens:g}</td>"
        f"<td>{mass:.4f}</td><td></td></tr></tfoot></table>"
    )
