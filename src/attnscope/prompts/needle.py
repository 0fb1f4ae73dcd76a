"""A needle in a haystack: one sentence that matters, at a depth of a long text that does not.

The regions are `document` (all of the haystack), `needle` (the sentence in it), `answer` (the words
of the needle that are asked for) and `question`. Lengths count words, so that every model is given
the same text. A depth of 0 is the beginning of the document, 1 its end; needles stand between
sentences.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from attnscope.errors import InputError
from attnscope.prompts.sample import Sample
from attnscope.prompts.word_list import english, word_list
from attnscope.tokens.regions import Prompt, Region

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (100, 200, 400)


def needle_samples(
    count: int | None = None,
    *,
    depths: Sequence[float] = DEPTHS,
    lengths: Sequence[int] = LENGTHS,
    seed: int = 0,
    path: str | Path | None = None,
    needle: str | None = None,
    question: str | None = None,
    answer: str | None = None,
    stem: bool = False,
) -> Iterator[Sample]:
    """Prompt n has the depth and length of n, in turn, and a needle of its own; one for each depth
    and length by default.

    The haystack is made up of sentences that mean nothing, or taken from a text file, from its
    beginning. A needle of one's own needs its `question` (and its `answer`; default: the whole
    needle). With `stem` the prompt ends with the words of the needle before the answer, which a
    model without instruction tuning continues.
    """
    if (needle is None) != (question is None):
        raise InputError(
            "a needle needs its question, and a question its needle: give both",
            code="incomplete-needle",
        )
    places = [(depth, length) for length in lengths for depth in depths]
    text = None if path is None else _sentences_of(Path(path), max(lengths))
    for number in range(len(places) if count is None else count):
        depth, length = places[number % len(places)]
        draw = Random(f"needle:{seed}:{number}")
        texts = _make_needle(draw) if needle is None else (needle, question or "", answer or needle)
        hay = _enough(_sentences(draw) if text is None else iter(text), length)
        yield _sample(hay, depth, length, *texts, stem=stem)


def _sample(
    hay: list[str],
    depth: float,
    length: int,
    needle: str,
    question: str,
    answer: str,
    *,
    stem: bool,
) -> Sample:
    at = round(depth * len(hay))
    document = " ".join([*hay[:at], needle, *hay[at:]])
    if not answer or answer not in needle:
        raise InputError(
            f"the answer {answer!r:.80} is not in the needle {needle!r:.80}",
            code="answer-not-in-needle",
            answer=answer,
        )
    start, inside = sum(len(one) + 1 for one in hay[:at]), needle.index(answer)
    text = f"{document}\n\n{question}"
    if stem:
        text += f"\n\nAnswer: {needle[:inside]}".rstrip()
    after = len(document) + 2
    regions = (
        Region(0, len(document), "document"),
        Region(start, start + len(needle), "needle"),
        Region(start + inside, start + inside + len(answer), "answer"),
        Region(after, after + len(question), "question"),
    )
    prompt = Prompt(text, regions)
    return Sample(prompt, answer, {"depth": depth, "length": length, "needle": needle})


def recall(answer: str, completion: str) -> float:
    """The fraction of the answer's words, counted with repetition, in the completion. A needle
    counts as found where it is above a half, as published (arXiv 2404.15574)."""
    expected, words_found = (
        Counter(re.findall(r"\w+", text.lower())) for text in (answer, completion)
    )
    return (expected & words_found).total() / max(1, expected.total())


def _make_needle(draw: Random) -> tuple[str, str, str]:
    """A needle, its question and its answer: a sentence that a small model can repeat, of words
    that a model cannot guess."""
    noun, *nouns = draw.sample(word_list("noun"), 3)
    one, other = draw.sample(word_list("adjective"), 2)
    answer = f"look for the {one} {nouns[0]} behind the {other} {nouns[1]}"
    return (
        f"The first thing to do in the {noun} is to {answer}.",
        f"What is the first thing to do in the {noun}?",
        answer,
    )


def _sentences(draw: Random) -> Iterator[str]:
    sentence = ""
    for piece in english(draw):
        sentence += piece
        if piece == ".":
            yield sentence.strip()
            sentence = ""


def _sentences_of(path: Path, longest: int) -> list[str]:
    if not path.is_file():
        raise InputError(
            f"the haystack file {path} does not exist; give a text file",
            code="file-missing",
            path=str(path),
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: {error}", code="not-utf8", path=str(path)
        ) from error
    sentences = [one for one in re.split(r"(?<=[.!?])\s+", text.strip()) if one]
    words = sum(len(one.split()) for one in sentences)
    if words < longest:
        raise InputError(
            f"{path} has {words} words, and the longest document needs {longest}",
            code="text-too-short",
            words=words,
            needed=longest,
        )
    return sentences


def _enough(sentences: Iterator[str], words: int) -> list[str]:
    """Sentences until so many words are there."""
    sentences_found: list[str] = []
    words_found = 0
    while words_found < words:
        sentences_found.append(next(sentences))
        words_found += len(sentences_found[-1].split())
    return sentences_found
