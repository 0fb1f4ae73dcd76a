"""What is inserted: meaningless tokens, and what they are compared with.

* `repeat`: a string over and over, by default `/`;
* `word`: a meaningful word over and over, by default `he`;
* `random-tokens`: tokens of the vocabulary, drawn at random;
* `sentence`: random English sentences from a bundled word list and grammar;
* `lorem`: pseudo-Latin text.

By text, `count` is the number of repetitions for the first two (a tokenizer may well write
`////` as one token) and the number of tokens for the others. By ids it is the number of tokens
for all five, exactly. Everything random follows the seed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from random import Random
from typing import TYPE_CHECKING

from attnscope.errors import InputError, unknown
from attnscope.prompts.word_list import english, latin, word_list
from attnscope.tokens.vocabulary import PART_OF_A_CHARACTER, read_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEFAULT_UNITS = {"repeat": "/", "word": "he"}


@dataclass(frozen=True, kw_only=True)
class Filler:
    """What to insert, and how much of it."""

    kind: str = "repeat"
    """One of `FILLERS`."""
    count: int = 55
    """Repetitions or tokens; see the module. 0 inserts nothing."""
    unit: str | None = None
    """What is repeated; only for `repeat` and `word`."""
    seed: int = 0
    """Same seed, same filler, on every machine."""

    def __post_init__(self) -> None:
        if self.kind not in FILLERS:
            raise unknown("kind of filler", self.kind, FILLERS)
        if self.count < 0:
            raise InputError(
                f"the filler's count is {self.count}; it must be 0 or more",
                code="bad-count",
                value=self.count,
            )
        if self.unit is not None and self.kind not in _DEFAULT_UNITS:
            raise InputError(
                f"a filler of kind {self.kind!r} repeats nothing, so it takes no unit",
                code="unit-not-used",
                value=self.kind,
            )
        if self.unit == "":
            raise InputError(
                "the filler's unit is empty: give the text to repeat, such as '/'",
                code="empty-unit",
            )

    @property
    def repeated(self) -> str:
        """The unit, or the kind's own."""
        return self.unit if self.unit is not None else _DEFAULT_UNITS[self.kind]


def filler_text(filler: Filler, tokenizer: PreTrainedTokenizerBase) -> str:
    """The filler as text. Only the kinds counted in tokens look at the tokenizer."""
    return _TEXT[filler.kind](filler, tokenizer) if filler.count else ""


def filler_ids(filler: Filler, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The filler as exactly `count` token ids."""
    return _IDS[filler.kind](filler, tokenizer) if filler.count else []


def _repeat_text(filler: Filler, tokenizer: PreTrainedTokenizerBase) -> str:
    return filler.repeated * filler.count


def _word_text(filler: Filler, tokenizer: PreTrainedTokenizerBase) -> str:
    return " ".join([filler.repeated] * filler.count)


def _random_text(filler: Filler, tokenizer: PreTrainedTokenizerBase) -> str:
    text: str = tokenizer.decode(_random_ids(filler, tokenizer))
    return text


def _prose_text(
    pieces: Callable[[Random], Iterator[str]],
    last_words: tuple[str, ...],
    filler: Filler,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Running text of `count` tokens.

    The longest beginning of a long text that is not longer than that; if it is shorter, it or one
    a little shorter still, with a few more words that make up the difference. Should none do so,
    some tokens are missing: what was inserted in the end is counted by the alignment.
    """
    draw = Random(f"{filler.kind}:{filler.seed}")
    parts = list(islice(pieces(draw), 2 * filler.count + 2))
    stop = "." if filler.count > 3 else ""
    ends = [n + 1 for n in range(len(parts)) if parts[n] != "."]

    def beginning(end: int) -> str:
        return "".join(parts[:end])  # made when it is asked for: all of them would be n² characters

    def lengths(texts: list[str]) -> list[int]:
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    fitting = bisect_right(ends, filler.count, key=lambda end: lengths([beginning(end) + stop])[0])
    longest = beginning(ends[fitting - 1]) if fitting else ""
    if longest and lengths([longest + stop]) == [filler.count]:
        return longest + stop
    words = [word for kind in last_words for word in word_list(kind)]
    for end in [0, *ends[:fitting]][:-9:-1]:
        text = beginning(end)
        for _ in range(4):
            some = [f"{text} {word}".lstrip() for word in draw.sample(words, 64)]
            token_counts = lengths([one + stop for one in some])
            if filler.count in token_counts:
                return some[token_counts.index(filler.count)] + stop
            text = next(
                (t for t, n in zip(some, token_counts, strict=True) if n < filler.count), text
            )
    return longest + stop if longest else words[0]


def _repeat_ids(filler: Filler, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """One token that says just the unit, if the vocabulary has it; else the unit's tokens."""
    texts = read_vocabulary(tokenizer).texts
    spellings = [f" {filler.repeated}", filler.repeated] if filler.kind == "word" else []
    for text in [*spellings, filler.repeated]:
        if text in texts:
            return [texts.index(text)] * filler.count
    unit = _ids_of((spellings or [filler.repeated])[0], tokenizer)
    if not unit or tokenizer.unk_token_id in unit:
        raise _unsayable(filler.repeated)
    return list(islice(cycle(unit), filler.count))


def _random_ids(filler: Filler, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that say something: whole characters, nothing special, nothing added by hand."""
    vocabulary = read_vocabulary(tokenizer)
    sayable = [
        id
        for id, text in enumerate(vocabulary.texts)
        if text and PART_OF_A_CHARACTER not in text and id not in vocabulary.added
    ]
    draw = Random(f"random-tokens:{filler.seed}")
    return [draw.choice(sayable) for _ in range(filler.count)]


def _prose_ids(
    pieces: Callable[[Random], Iterator[str]], filler: Filler, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    draw = Random(f"{filler.kind}:{filler.seed}")
    # Words a small vocabulary does not know are passed over, so there must be some to spare.
    text = "".join(islice(pieces(draw), 4 * filler.count + 20))
    unknown_id = tokenizer.unk_token_id
    known = [id for id in _ids_of(text, tokenizer) if id != unknown_id]
    if len(known) < filler.count:
        raise _unsayable(text)
    return known[: filler.count]


def _ids_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _unsayable(text: str) -> InputError:
    return InputError(
        f"the tokenizer has no tokens for {text[:40]!r}, so it cannot be inserted by ids; "
        "choose another filler",
        code="no-tokens",
        text=text[:40],
    )


_Text = Callable[[Filler, "PreTrainedTokenizerBase"], str]
_Ids = Callable[[Filler, "PreTrainedTokenizerBase"], list[int]]

_TEXT: dict[str, _Text] = {
    "repeat": _repeat_text,
    "word": _word_text,
    "random-tokens": _random_text,
    "sentence": partial(_prose_text, english, ("determiner", "noun")),
    "lorem": partial(_prose_text, latin, ("latin",)),
}
_IDS: dict[str, _Ids] = {
    "repeat": _repeat_ids,
    "word": _repeat_ids,
    "random-tokens": _random_ids,
    "sentence": partial(_prose_ids, english),
    "lorem": partial(_prose_ids, latin),
}
FILLERS = tuple(_TEXT)
