"""The rule of a token class: which tokens it takes.

A rule over characters marks those of a list, or those that a regular expression matches. The
judgement decides which tokens the class takes:

* `pure`: tokens whose characters are all marked, or that one match of the pattern covers
  completely, so that `no|not` takes "not" too;
* `contains`: tokens with at least one marked character;
* `fraction`: the marked share of every token; later classes get the rest.

Part of a UTF-8 character (see `vocabulary.py`) is never marked. Special tokens have no text; only
`every` and token ids can take them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import regex
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown
from attnscope.tokens.modalities import MODALITIES
from attnscope.tokens.vocabulary import PART_OF_A_CHARACTER

Judgement = Literal["pure", "contains", "fraction"]
JUDGEMENTS = ("pure", "contains", "fraction")
EVERY = ("special", *MODALITIES, "token")
_RULES = ("characters", "pattern", "words", "token_ids", "every")
SECONDS_PER_TOKEN = 1.0
"""Limit of processor time of a pattern for one token; most need a millionth of it."""
SECONDS_PER_VOCABULARY = 60.0
"""Limit of processor time of a class for all tokens of a vocabulary."""
_MOST_REPEATS = 1_000_000
"""Limit of the product of the counts in braces, which `regex` expands when it compiles."""


@dataclass(frozen=True, kw_only=True)
class TokenClass:
    """A name and exactly one rule: `characters`, `pattern`, `words`, `token_ids` or `every`."""

    name: str
    characters: str | None = None
    """The characters of the class, written one after the other: `"#"`, `"+-="`."""
    pattern: str | None = None
    r"""A regular expression in the syntax of the `regex` package, so `\p{L}` works; it marks the
    characters that its matches cover."""
    words: Collection[str] | None = None
    """Whole words or phrases, in any case: `["no", "not", "by no means"]`. The class takes all
    tokens of a word, and a token that has marks beside the word, such as `("not`; it does not
    take "no" inside "know"."""
    token_ids: Collection[int] | None = None
    """Token ids. They are whole tokens, so no judgement applies."""
    every: Literal["special", "image", "video", "audio", "token"] | None = None
    """`special`: every special token; `image`, `video`, `audio`: every token that stands for a part
    of a picture, video or sound; `token`: every remaining token."""
    judgement: Judgement = "pure"
    strip: bool = False
    """Ignore whitespace around a token, because many tokenizers join a space to the next word:
    `" *"` is then a star."""

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("a token class needs a name, such as 'hash'", code="missing-name")
        rules = [rule for rule in _RULES if getattr(self, rule) is not None]
        if len(rules) != 1:
            raise InputError(
                f"class {self.name!r} has {len(rules)} rules ({', '.join(rules) or 'none'}); "
                f"give exactly one of {', '.join(_RULES)}",
                code="number-of-rules",
                token_class=self.name,
                rules=rules,
            )
        if self.judgement not in JUDGEMENTS:
            raise unknown_in_class(self.name, "judgement", self.judgement, JUDGEMENTS)
        if self.every is not None and self.every not in EVERY:
            raise unknown_in_class(self.name, "every", self.every, EVERY)
        if self.strip and self.judgement == "fraction":
            raise InputError(
                f"class {self.name!r}: judgement 'fraction' counts every character, so strip "
                "cannot be true",
                code="strip-with-fraction",
                token_class=self.name,
            )
        if self.characters == "" or self.pattern == "":
            raise InputError(
                f"class {self.name!r} has an empty rule; give at least one character or a pattern",
                code="empty-rule",
                token_class=self.name,
            )
        if self.token_ids is not None:
            object.__setattr__(self, "token_ids", frozenset(self.token_ids))
            if not self.token_ids or min(self.token_ids) < 0:
                raise InputError(
                    f"class {self.name!r}: token_ids must be one or more ids of at least 0, "
                    f"not {sorted(self.token_ids)}",
                    code="bad-token-ids",
                    token_class=self.name,
                    token_ids=sorted(self.token_ids),
                )
        if self.words is not None:
            self._check_words()
        if self.pattern is not None:
            _check_repeats(self.name, self.pattern)
            try:
                regex.compile(self.pattern)
            except regex.error as error:
                raise InputError(
                    f"class {self.name!r}: the pattern {self.pattern!r} does not compile: {error}",
                    code="bad-pattern",
                    token_class=self.name,
                    pattern=self.pattern,
                ) from error

    @cached_property
    def _compiled(self) -> regex.Pattern[str]:
        if self.pattern is not None:
            return regex.compile(self.pattern)
        return regex.compile(f"[{regex.escape(self.characters or '', special_only=False)}]+")

    def _check_words(self) -> None:
        words = self.words
        if isinstance(words, str) or not words or self.judgement != "pure":
            raise InputError(
                f"class {self.name!r}: words must be a list of one or more words, such as "
                f"['no', 'not'], with judgement 'pure', not {words!r} with {self.judgement!r}",
                code="bad-words",
                words=words,
            )
        wrong = [word for word in words if not isinstance(word, str) or not word.strip()]
        if wrong:
            raise InputError(
                f"class {self.name!r}: {wrong[0]!r} is not a word; in YAML, write the words true, "
                "false, null and numbers in quotes",
                code="bad-words",
                words=words,
            )
        object.__setattr__(self, "words", tuple(words))

    @property
    def _limit(self) -> float | None:
        """Seconds for one token; None for a list of characters, which needs no limit."""
        return None if self.pattern is None else SECONDS_PER_TOKEN

    def marks(self, text: str) -> NDArray[np.bool_]:
        """[characters of text] True where the rule matches."""
        marked = np.zeros(len(text), dtype=bool)
        try:
            for match in self._compiled.finditer(text, timeout=self._limit):
                marked[match.start() : match.end()] = True
        except TimeoutError as error:
            raise self.too_slow() from error
        if PART_OF_A_CHARACTER in text:
            marked &= np.array([letter != PART_OF_A_CHARACTER for letter in text], dtype=bool)
        return marked

    def takes(self, text: str) -> bool:
        """Whether a `pure` or `contains` class takes a token with this text, whatever the text
        around it is."""
        if self.words is not None:
            return False  # a matter of the tokens around it
        if self.strip:
            text = text.strip()
        try:
            if self._compiled.search(text, timeout=self._limit) is None:
                return False  # the most frequent case
            marked = self.marks(text)
            if self.judgement == "contains":
                return bool(marked.any())
            if not marked.size or PART_OF_A_CHARACTER in text:
                return False
            complete = marked.all() or self._compiled.fullmatch(text, timeout=self._limit)
            return bool(complete)
        except TimeoutError as error:
            raise self.too_slow() from error

    def too_slow(self) -> InputError:
        """The error for a pattern that needs too much time."""
        return InputError(
            f"class {self.name!r}: the pattern {self.pattern!r} takes too long; write it without "
            "a repeat inside a repeat, or alternatives that match the same text",
            code="pattern-too-slow",
            token_class=self.name,
            pattern=self.pattern,
        )


def unknown_in_class(name: str, what: str, value: object, known: Iterable[object]) -> InputError:
    """The error for a value of a class that is outside a known set."""
    error = unknown(what, value, known)
    return InputError(f"class {name!r}: {error}", code=error.code, token_class=name, **error.values)


def _check_repeats(name: str, pattern: str) -> None:
    counts = [int(n[:9]) for n in regex.findall(r"(?<=\{[\d,\s]*)\d+(?=[\d,\s]*\})", pattern)]
    if math.prod(max(count, 1) for count in counts) > _MOST_REPEATS:
        raise InputError(
            f"class {name!r}: the counts in braces of the pattern {pattern!r:.80} multiply to more "
            f"than {_MOST_REPEATS:,}; use + or *, or smaller counts",
            code="pattern-too-large",
            token_class=name,
            pattern=pattern,
        )
