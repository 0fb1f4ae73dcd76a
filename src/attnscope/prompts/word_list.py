"""Running text from a bundled word list and a small grammar, for a seed.

The sentences are grammatical and mean nothing in particular: they stand where a filler of
meaningless tokens would stand, to compare the two.
"""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from random import Random

# Each sentence follows one of these; a capital letter and a full stop are added.
_GRAMMAR = (
    "determiner adjective noun verb determiner noun",
    "determiner noun adverb verb determiner adjective noun",
    "determiner noun preposition determiner noun verb determiner noun adverb",
    "pronoun verb determiner adjective noun preposition determiner noun",
    "determiner noun verb determiner noun conjunction pronoun verb determiner noun",
    "adverb determiner adjective noun verb determiner noun preposition determiner adjective noun",
)


@cache
def word_list(kind: str) -> tuple[str, ...]:
    """The bundled words of one kind (`noun`, `verb`, `latin` …)."""
    text = files("attnscope.prompts").joinpath("words.txt").read_text(encoding="utf-8")
    by_class = dict(line.split(": ", 1) for line in text.splitlines() if not line.startswith("#"))
    return tuple(by_class[kind].split())


def english(draw: Random) -> Iterator[str]:
    """Endless English, in pieces that make running text when put together."""
    first = True
    while True:
        words = [draw.choice(word_list(kind)) for kind in draw.choice(_GRAMMAR).split()]
        for n, following in enumerate(words[1:]):
            if words[n] == "a" and following[0] in "aeiou":
                words[n] = "an"
        yield from _sentence(words, first)
        first = False


def latin(draw: Random) -> Iterator[str]:
    """Endless pseudo-Latin text in pieces; it starts with "lorem ipsum"."""
    words = ["lorem", "ipsum", "dolor", "sit", "amet"]
    first = True
    while True:
        words += [draw.choice(word_list("latin")) for _ in range(draw.randint(3, 9))]
        yield from _sentence(words, first)
        words, first = [], False


def _sentence(words: list[str], first: bool) -> Iterator[str]:
    yield ("" if first else " ") + words[0].capitalize()
    yield from (f" {word}" for word in words[1:])
    yield "."
