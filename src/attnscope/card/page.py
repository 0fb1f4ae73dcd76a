"""Writes the page of one card, or of two side by side: one HTML file without network requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count as count_up
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from attnscope.card.compare import differs, distances_of, heads_of, layers_of, numbers_table
from attnscope.card.experiments import texts
from attnscope.card.numbers import CLASSES, GENERATED, LARGEST, OTHERS, RATIO, Card
from attnscope.figures.head_types import HEAD_TYPES
from attnscope.figures.page import templates
from attnscope.figures.registry import draw_table
from attnscope.figures.text_format import BUNDLED, count, join, model_name, upper_first
from attnscope.measures.residual import TIMES
from attnscope.recipes.sinks import SINK

if TYPE_CHECKING:
    from jinja2 import Template

    from attnscope.figures import Drawing


@cache
def _template() -> Template:
    return templates(Path(__file__).parent / "templates").get_template("card.html")


def card_page(cards: Sequence[Card]) -> str:
    """The page of one card or of two."""
    labels = [card["label"] for card in cards]
    rows, figures = numbers_table(cards), _figures(cards)
    return _template().render(
        title=f"Attention card: {' and '.join(labels)}",
        cards=cards,
        models=_models(cards),
        sentences=_differences(cards, rows) if len(cards) == 2 else _sentences(cards[0]),
        notes=_notes(cards),
        numbers=_shown(cards, rows),
        types=_types(cards),
        rows=_numbered(figures),
        of_heads=len(cards),  # rows of figures with a cell for each head
        drawings=[drawing for row in figures for drawing in row],
        texts=texts(),
        command=f"attnscope card {' '.join(model_name(card['model']['name']) for card in cards)}"
        + (" --bos" if any(card["settings"]["bos"] for card in cards) else ""),
        sortable=False,
    )


def _models(cards: Sequence[Card]) -> pl.DataFrame:
    """What the models are, a column for each."""
    keys = ("name", "architecture", "layers", "heads", "kv_heads", "parameters", "dtype", "device")
    names = {"kv_heads": "key/value heads", "dtype": "data type"}
    table = {"": [names.get(key, key) for key in keys] + ["begin-of-sequence token"]}
    for card in cards:
        model = card["model"] | {"name": model_name(card["model"]["name"])}
        values = [model[key] for key in keys]
        shown = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
        added = "put in front" if card["settings"]["bos"] else "as the tokenizer does"
        table[card["label"]] = [*shown, added]
    return pl.DataFrame(table)


def _notes(cards: Sequence[Card]) -> list[str]:
    notes = [f"{card['label']}: {BUNDLED}." for card in cards if card["model"]["bundled"]]
    if len(cards) == 2:
        a, b = cards
        if a["settings"]["tokens"] != b["settings"]["tokens"]:
            notes.append(
                "The two tokenizers divide the texts into different tokens. Token classes, "
                "distances in tokens and entropies then differ even where attention is alike."
            )
        if a["settings"]["bos"] != b["settings"]["bos"]:
            notes.append("Only one of the two got a begin-of-sequence token in front.")
    return notes


def _value(card: Card, name: str) -> float:
    return float(next(one["value"] for one in card["numbers"] if one["name"] == name))


def _sentences(card: Card) -> list[str]:
    """The card in a few sentences, each computed from its numbers."""
    heads = len(card["heads"])
    by_type = [f"{row['certain']} {row['kind']}" for row in card["types"]]
    share = 100 * _value(card, f"share of heads with more than {SINK:g} on it")
    return [
        f"{100 * _value(card, 'mass on the first token'):.0f} % of the attention goes to the "
        f"first token; {share:.0f} % of the heads put more than {SINK:g} of theirs there.",
        _massive(card),
        f"Types of the {heads} heads, on the prompts of attnscope heads: {join(by_type)}.",
        f"The mean distance from query to key is {_value(card, 'distance (tokens)'):.1f} tokens, "
        f"the mean entropy {_value(card, 'entropy (nats)'):.2f} nats.",
        _classes(card),
        _generated(card),
    ]


def _massive(card: Card) -> str:
    """The layers with massive activations."""
    depth = layers_of([card], "depth", "measure").filter(pl.col("measure") == RATIO)
    value = _value(card, LARGEST)
    layers = depth.filter(pl.col("value") >= pl.lit(TIMES).log10())["layer"]
    where = (
        f"it is above {TIMES:,.0f} times the median after {count(len(layers), 'layer')}, "
        f"first after layer {layers[0]}"
        if len(layers)
        else f"it is below {TIMES:,.0f} times the median after every layer"
    )
    return f"The largest value of the residual stream is {value:,.0f}; {where}."


def _classes(card: Card) -> str:
    """The token classes with the most and the least attention, compared with uniform attention."""
    known = [one for one in card["numbers"] if one["group"] == CLASSES and one.get("uniform")]
    known = [one for one in known if one["name"] != OTHERS]
    ranked = sorted(known, key=lambda one: one["value"] / one["uniform"])
    (most, more), (least, less) = (
        (one["name"], one["value"] / one["uniform"]) for one in (ranked[-1], ranked[0])
    )
    return (
        f"Apart from the first token, the class “{most}” gets {more:.2g} times the attention that "
        f"uniform attention would give it, “{least}” {less:.2g} times."
    )


def _generated(card: Card) -> str:
    parts = [one for one in card["numbers"] if one["group"] == GENERATED]
    shares = join([f"{one['name']} {100 * one['value']:.0f} %" for one in parts])
    return f"Attention of generated tokens: {shares}."


def _differences(cards: Sequence[Card], rows: Sequence[dict[str, Any]]) -> list[str]:
    """The significant differences, and how many numbers do not differ."""
    a, b = (card["label"] for card in cards)
    tested = [row for row in rows if row["q"] is not None]
    significant = [row for row in tested if differs(row)]
    lines = [
        f"{upper_first(row['name'])}: {b} has {'more' if row['difference'] > 0 else 'less'} "
        f"than {a} ({_number(row['cells'][1]['value'], row)} and "
        f"{_number(row['cells'][0]['value'], row)})."
        for row in significant
    ]
    rest = len(tested) - len(significant)
    lines.append(f"No significant difference (q < 0.05) in {count(rest, 'further number')}.")
    return [*lines, *_other_types(cards)]


def _other_types(cards: Sequence[Card]) -> list[str]:
    """How many heads have another type, if both models have the same layers and heads."""
    a, b = (heads_of(card).select("layer", "head", "kind") for card in cards)
    if not a.select("layer", "head").equals(b.select("layer", "head")):
        return []
    changed = int((a["kind"] != b["kind"]).sum())
    return [f"{changed} of {a.height} heads have another type."]


def _number(value: float, row: dict[str, Any]) -> str:
    return f"{value:,.{row['digits']}f}"


def _interval(cell: dict[str, Any] | None, row: dict[str, Any], key: str = "value") -> str:
    """A value with its interval; a dash where there is none."""
    if cell is None or cell[key] is None:
        return "—"
    shown = _number(cell[key], row)
    if cell["low"] is not None:
        low, high = (_number(cell[end], row) for end in ("low", "high"))
        shown += f" [{low}, {high}]"
    fewer = cell.get("n", len(texts())) < len(texts())
    return f"{shown}, n = {cell['n']}" if fewer else shown


def _shown(cards: Sequence[Card], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table of numbers as text, by group."""
    groups: dict[str, list[list[str]]] = {}
    for row in rows:
        cells = [row["name"], *(_interval(cell, row) for cell in row["cells"])]
        if len(cards) == 2:
            q = "—" if row["q"] is None else "< 0.001" if row["q"] < 0.001 else f"{row['q']:.3f}"
            cells += [_interval(row, row, "difference"), q]
        groups.setdefault(row["group"], []).append(cells)
    return [{"title": title, "rows": part} for title, part in groups.items()]


def _types(cards: Sequence[Card]) -> pl.DataFrame:
    """How many heads of each type a model has."""
    about = {one.name: one for one in HEAD_TYPES}
    table: dict[str, list[Any]] = {"type": [], "rule": []}
    for row in cards[0]["types"]:
        rule = about[row["kind"]]
        table["type"].append(row["kind"])
        table["rule"].append(f"{rule.about} > {rule.threshold:g}")
    for card in cards:
        n = len(card["heads"])
        table[card["label"]] = [
            f"{row['certain']} ({100 * row['certain'] / n:.0f} %)" for row in card["types"]
        ]
    return pl.DataFrame(table)


def _numbered(figures: Sequence[Sequence[Drawing]]) -> list[list[tuple[int, Drawing]]]:
    """The figures with their numbers on the page."""
    numbers = count_up()
    return [[(next(numbers), drawing) for drawing in row] for row in figures]


def _figures(cards: Sequence[Card]) -> list[list[Drawing]]:
    """The figures, those of one list side by side."""
    maps = [
        replace(
            draw_table(
                "heads",
                heads_of(card).select(pl.exclude("^distance.*$")),
                model=card["label"],
                prompts=card["settings"]["head_prompts"],
            ),
            name=f"heads-{at}",
        )
        for at, card in enumerate(cards)
    ]
    distance = draw_table("card-distance", distances_of(cards))
    depth = draw_table("card-depth", layers_of(cards, "depth", "measure"))
    classes = draw_table("card-classes", layers_of(cards, "classes", "class"))
    generated = draw_table("card-generated", layers_of(cards, "generated", "part"))
    if len(cards) == 1:
        return [[*maps, distance], [depth], [classes, generated]]
    return [maps, [distance], [depth], [classes], [generated]]
