"""Documents in order: several short texts, one after the other, and a question behind them.

The regions are `document:1`, `document:2` … and `question`. What a document says is drawn anew for
every place, so that places differ by where they are and by nothing else.
"""

from collections.abc import Iterator
from random import Random

from attnscope.prompts.sample import Sample
from attnscope.prompts.word_list import english
from attnscope.tokens.regions import join


def document_samples(
    count: int, *, documents: int = 10, words: int = 40, seed: int = 0
) -> Iterator[Sample]:
    """Prompts of so many documents of about so many words."""
    for number in range(count):
        draw = Random(f"documents:{seed}:{number}")
        parts: list[tuple[str | None, str]] = [(None, "Read these documents.\n\n")]
        for index in range(1, documents + 1):
            parts.append((f"document:{index}", f"Document {index}: {_about(draw, words)}"))
            parts.append((None, "\n\n"))
        parts.append(("question", "What are these documents about? Answer in one sentence."))
        yield Sample(join(parts), None, {"documents": documents})


def _about(draw: Random, words: int) -> str:
    """Whole sentences of at least so many words."""
    text = ""
    for piece in english(draw):
        text += piece
        if piece == "." and len(text.split()) >= words:
            break
    return text
