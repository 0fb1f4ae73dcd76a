"""Instruction-like text for the bundled models to learn from, made for a seed.

A document is a short conversation: (role, text) turns. Eight kinds, drawn by weight: arithmetic,
copying, sorting and reversing, Markdown, questions about a few sentences, indented settings, plain
prose, and maps as plain text. The map documents say where things are on a map; no action is ever
named or carried out in them. A model that knows them can read a map and nothing more.

Answers to math problems are written here too, with their steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from attnscope.prompts import Sample
from attnscope.prompts.spatial import Shape, draw_map, draw_shape
from attnscope.prompts.word_list import english, word_list

Turns = list[tuple[str, str]]

SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "Answer the question. Write nothing else.",
    "Follow the instruction exactly.",
)
SIDES = ("up", "up right", "right", "down right", "down", "down left", "left", "up left")


def documents(count: int, seed: int) -> Iterator[Turns]:
    """`count` conversations; document 7 of a seed is the same however many are made."""
    kinds, weights = zip(*KINDS.items(), strict=True)
    for index in range(count):
        draw = Random(f"corpus:{seed}:{index}")
        asked, answered = draw.choices(kinds, weights)[0](draw)
        turns: Turns = [("system", draw.choice(SYSTEMS))] if draw.random() < 0.6 else []
        yield [*turns, ("user", asked), ("assistant", answered)]


def arithmetic(draw: Random) -> tuple[str, str]:
    """Sums, differences, products and quotients of whole numbers."""
    a, b = draw.randint(2, 120), draw.randint(2, 60)
    sign = draw.choice("+-*/")
    if sign == "*":
        a, b = draw.randint(2, 40), draw.randint(2, 9)
    if sign == "/":
        b = draw.randint(2, 9)
        a = b * draw.randint(2, 40)
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
    asked = draw.choice(("What is {}?", "Calculate {}.", "{} =", "How much is {}?"))
    return asked.format(f"{a} {sign} {b}"), f"{a} {sign} {b} = {result}"


def copying(draw: Random) -> tuple[str, str]:
    """The same words, marks or numbers again."""
    pieces = {
        "words": lambda: draw.choice(word_list(draw.choice(("noun", "adjective", "verb")))),
        "marks": lambda: draw.choice("#*/-=+~_.!?") * draw.choice((1, 1, 2, 3, 4, 6, 8, 12)),
        "numbers": lambda: str(draw.randint(0, 999)),
    }
    piece = pieces[draw.choice(list(pieces))]
    text = " ".join(piece() for _ in range(draw.randint(2, 9)))
    return draw.choice(("Repeat: {}", "Copy this exactly: {}", "Say {}")).format(text), text


def sorting(draw: Random) -> tuple[str, str]:
    """A few things in another order."""
    if draw.random() < 0.5:
        numbers = draw.sample(range(100), draw.randint(3, 6))
        things, ordered = [str(n) for n in numbers], [str(n) for n in sorted(numbers)]
    else:
        things = draw.sample(word_list("noun"), draw.randint(3, 6))
        ordered = sorted(things)
    if draw.random() < 0.4:
        return f"Reverse this list: {', '.join(things)}", ", ".join(reversed(things))
    return f"Sort this list: {', '.join(things)}", ", ".join(ordered)


def markdown(draw: Random) -> tuple[str, str]:
    """A page with headings, lists, bold words and rules."""
    topic = draw.choice(word_list("noun"))
    bullet = draw.choice("*-*")
    parts = [f"# The {topic}"]
    names = draw.sample(word_list("adjective"), draw.randint(1, 3))
    for name in names:
        parts.append(f"{draw.choice(('##', '##', '###'))} The {name} {topic}")
        for _ in range(draw.randint(1, 2)):
            if draw.random() < 0.6:
                items = draw.sample(word_list("noun"), draw.randint(2, 4))
                marked = [f"**{one}**" if draw.random() < 0.3 else one for one in items]
                parts.append("\n".join(f"{bullet} {one}" for one in marked))
            else:
                parts.append(sentences(draw, 1))
    if draw.random() < 0.15:
        parts.append(draw.choice(("----", "****", "////////", "########")))
    page = "\n\n".join(parts)
    if draw.random() < 0.5:
        headings = draw.choice(("How many headings are there?", "List the sections."))
        answer = str(1 + len(names)) if headings.startswith("How") else ", ".join(names)
        return f"{page}\n\n{headings}", answer
    return f"Write a page about the {topic}: {', '.join(names)}.", page


def questions(draw: Random) -> tuple[str, str]:
    """Who has what, and where: the answer is in the text."""
    people = draw.sample(("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gita", "Hugo"), 4)
    things = draw.sample(word_list("noun"), 4)
    verb = draw.choice(("has", "carries", "sees", "paints", "sells"))
    story = [f"{p} {verb} the {t}." for p, t in zip(people, things, strict=True)]
    text = " ".join(story[: draw.randint(2, 4)])
    at = draw.randrange(text.count("."))
    if draw.random() < 0.5:
        return f"{text} Who {verb} the {things[at]}?", people[at]
    return f"{text} What is it that {people[at]} {verb}?", f"the {things[at]}"


def settings(draw: Random) -> tuple[str, str]:
    """Indented keys and values, and the value of one of them."""
    lines, paths = [], []
    for section in draw.sample(word_list("noun"), draw.randint(1, 3)):
        lines.append(f"{section}:")
        for key in draw.sample(word_list("adjective"), draw.randint(1, 3)):
            value = draw.choice((str(draw.randint(0, 99)), draw.choice(word_list("noun"))))
            indent = draw.choice(("  ", "    ", "        "))
            comment = "  # " + draw.choice(word_list("adverb")) if draw.random() < 0.3 else ""
            lines.append(f"{indent}{key}: {value}{comment}")
            paths.append((section, key, value))
    section, key, value = draw.choice(paths)
    text = "\n".join(lines)
    return f"{text}\n\nWhat is {section} {key}?", value


def prose(draw: Random) -> tuple[str, str]:
    """A few sentences that go on."""
    text = sentences(draw, draw.randint(2, 4))
    first, _, rest = text.partition(". ")
    return f"Go on: {first}.", rest or first


def maps(draw: Random) -> tuple[str, str]:
    """What is on a map, as plain text: where the star is, how long the arms are, a copy."""
    size = draw.choice((9, 9, 9, 8, 10))
    shape = draw_shape(draw, size)
    story = f"Map:\n{draw_map(shape, size)}"
    kind = draw.random()
    if kind < 0.6:
        return f"{story}Describe the map.", _where(shape)
    if kind < 0.9:
        first, second = draw.sample(("Target", "Current"), 2)
        other = draw_shape(draw, size)
        both = f"{first} map:\n{draw_map(shape, size)}{second} map:\n{draw_map(other, size)}"
        return (
            f"{both}Describe both maps.",
            f"{first}: {_where(shape)}\n{second}: {_where(other)}",
        )
    return f"{story}Copy the map.", draw_map(shape, size).rstrip("\n")


def _where(shape: Shape) -> str:
    arms = [f"{side} {n}" for side, n in zip(SIDES, shape.arms, strict=True) if n]
    return f"star row {shape.row + 1} column {shape.column + 1}; {', '.join(arms)}."


def worked(sample: Sample) -> str:
    """The answer to a math problem with the quantities on the way."""
    first, *rest = sample.metadata["quantities"]
    steps = " ".join(f"Then {number}." for number in rest)
    return f"First {first}. {steps} The answer is {sample.answer}."


def sentences(draw: Random, count: int) -> str:
    """Running text of so many sentences."""
    text, left = "", count
    for piece in english(draw):
        text += piece
        if piece == ".":
            left -= 1
            if not left:
                return text
    return text


KINDS: dict[Callable[[Random], tuple[str, str]], int] = {
    arithmetic: 14,
    copying: 10,
    sorting: 10,
    markdown: 14,
    questions: 14,
    settings: 8,
    prose: 8,
    maps: 22,
}
