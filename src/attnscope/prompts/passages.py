"""Passages and a query that one of them answers, for a seed: known relevance without a data set.

All passages have the same form. Each is about another person, who carries something somewhere; the
query names the person and the place of one passage. Sentences without meaning make them longer.
"""

from collections.abc import Iterator
from random import Random

from attnscope.prompts.math import NAMES
from attnscope.prompts.word_list import english, word_list

WORDS = 12
"""Words without meaning in a passage, at least."""


def passage_records(count: int, *, documents: int = 10, seed: int = 0) -> Iterator[dict[str, str]]:
    """Records with `passages`, `query` and `number`, that of the relevant passage from 1; with
    every passage under `d1`, `d2` …, and once more the `relevant` one and another, the
    `distractor`."""
    for n in range(count):
        draw = Random(f"passages:{seed}:{n}")
        nouns = draw.sample(word_list("noun"), 2 * documents)
        names = draw.sample(NAMES, documents)
        passages = [
            _passage(draw, name, thing, destination)
            for name, thing, destination in zip(names, nouns[::2], nouns[1::2], strict=True)
        ]
        right, other = draw.sample(range(documents), 2)
        listed = "\n\n".join(f"[{k}] {one}" for k, one in enumerate(passages, 1))
        yield {
            "passages": listed,
            "query": f"What does {names[right]} carry to the {nouns[2 * right + 1]}?",
            "number": str(right + 1),
            "relevant": passages[right],
            "distractor": passages[other],
            **{f"d{k}": one for k, one in enumerate(passages, 1)},
        }


def _passage(draw: Random, name: str, thing: str, destination: str) -> str:
    kind = draw.choice(word_list("adjective"))
    text = f"Every morning {name} carries the {kind} {thing} to the {destination}."
    for piece in english(draw):
        text += piece if text[-1] != "." or piece[0] in " .," else f" {piece}"
        if piece == "." and len(text.split()) >= WORDS + 9:
            break
    return text
