"""Token classes: which token is a hash, a star, whitespace, a digit, a word.

A class is a rule over the decoded text of a token. The rule marks characters: those of a list, or
those that a regular expression matches. The judgement decides which tokens the class takes:

* `pure`: tokens whose characters are all marked, or that one match of the pattern covers
  completely, so that `no|not` takes "not" too;
* `contains`: tokens with at least one marked character;
* `fraction`: the marked share of every token; later classes get the rest.

A token belongs to the first class that takes it. A set that ends with a class for every token is
a partition of any vocabulary, so the masses of its classes add up to 1.

Part of a UTF-8 character (see `vocabulary.py`) is never marked. Special tokens have no text; only
`every: special`, `every: token` and token ids can take them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import regex
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown
from attnscope.tokens.vocabulary import PART_OF_A_CHARACTER, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Judgement = Literal["pure", "contains", "fraction"]
JUDGEMENTS = ("pure", "contains", "fraction")
EVERY = ("special", "token")
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
    """Whole tokens, in any case and with any whitespace around them: `["no", "not"]`. A word that
    the tokenizer divides into several tokens is not matched."""
    token_ids: Collection[int] | None = None
    """Token ids. They are whole tokens, so no judgement applies."""
    every: Literal["special", "token"] | None = None
    """`special`: every special token; `token`: every remaining token."""
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

    @cached_property
    def _folded(self) -> frozenset[str]:
        return frozenset(word.strip().casefold() for word in self.words or ())

    @property
    def _limit(self) -> float | None:
        """Seconds for one token; None for a list of characters, which needs no limit."""
        return None if self.pattern is None else SECONDS_PER_TOKEN

    def marks(self, text: str) -> NDArray[np.bool_]:
        """[characters of text] True where the rule matches."""
        if self.words is not None:
            return np.full(len(text), self.takes(text))
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
        """Whether a `pure` or `contains` class takes a token with this text."""
        if self.words is not None:
            return PART_OF_A_CHARACTER not in text and text.strip().casefold() in self._folded
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


@dataclass(frozen=True, eq=False)
class ClassTable:
    """A class set applied to a vocabulary: the class of every id."""

    names: tuple[str, ...]
    classes: NDArray[np.int64]
    """[ids] index of the class, -1 for none; of a divided token, the class of the largest share."""
    weights: NDArray[np.float32] | None
    """[ids, classes] shares of each token; None if no token is divided."""


@dataclass(frozen=True)
class ClassSet:
    """Token classes in order; a token belongs to the first that takes it."""

    classes: tuple[TokenClass, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))
        if not self.classes:
            raise InputError(
                "the class set is empty: give it at least one class", code="empty-class-set"
            )
        if len(set(self.names)) < len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise InputError(
                f"class {twice[0]!r} is in the set twice; give every class a name of its own",
                code="duplicate-class",
                token_class=twice[0],
            )
        for earlier, later in zip(self.classes, self.classes[1:], strict=False):
            if earlier.every == "token":
                raise InputError(
                    f"class {later.name!r} comes after {earlier.name!r}, which takes every "
                    f"remaining token; move {later.name!r} before it",
                    code="unreachable-class",
                    token_class=later.name,
                    after=earlier.name,
                )

    def __len__(self) -> int:
        return len(self.classes)

    def __iter__(self) -> Iterator[TokenClass]:
        return iter(self.classes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes, in order: `names[c]` is class number `c`."""
        return tuple(token_class.name for token_class in self.classes)

    def index(self, name: str) -> int:
        """The number of a class; for an unknown name, an error that lists the names."""
        if name not in self.names:
            raise unknown("class", name, self.names)
        return self.names.index(name)

    @property
    def full(self) -> bool:
        """Whether the set takes every token of every vocabulary."""
        return self.classes[-1].every == "token"

    @property
    def rules(self) -> list[dict[str, Any]]:
        """The classes as plain data without default values; `class_set` reads it."""
        return [
            {
                field.name: _listed(field.name, value)
                for field in fields(one)
                if (value := getattr(one, field.name)) != field.default
            }
            for one in self.classes
        ]

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the rules; sets with the same rules have the same digest."""
        rules = [asdict(token_class) for token_class in self.classes]
        for rule in rules:
            if rule["words"] is None:  # keeps the digest of sets without words
                del rule["words"]
        text = json.dumps(rules, sort_keys=True, default=sorted)
        return hashlib.sha256(text.encode()).hexdigest()

    def table(self, tokenizer: PreTrainedTokenizerBase) -> ClassTable:
        """The class of every id of a vocabulary; computed once per process."""
        vocabulary = read_vocabulary(tokenizer)
        key = (vocabulary.fingerprint, self.fingerprint)
        if key not in _tables:
            _tables[key] = _classify(self, vocabulary)
        return _tables[key]

    def ids(
        self, input_ids: Any, tokenizer: PreTrainedTokenizerBase, attention_mask: Any = None
    ) -> NDArray[np.int64]:
        """The class of every token, -1 for none and for padding; `scope.mass` takes it.

        `input_ids` is an array, a list or a tensor of any shape; `attention_mask`, of the same
        shape, is 0 at padding.
        """
        table = self.table(tokenizer)
        if table.weights is not None:
            divided = [c.name for c in self.classes if c.judgement == "fraction"]
            raise InputError(
                f"class {divided[0]!r} has judgement 'fraction', so one token can belong to "
                "several classes; use weights(...) instead of ids(...)",
                code="fraction-class",
                token_class=divided[0],
            )
        numbers = table.classes[_checked(input_ids, len(table.classes))]
        if attention_mask is not None:
            numbers = np.where(_real(attention_mask, numbers.shape), numbers, -1)
        return numbers

    def weights(
        self, input_ids: Any, tokenizer: PreTrainedTokenizerBase, attention_mask: Any = None
    ) -> NDArray[np.float32]:
        """[..., classes] the share of each token that each class takes; 0 at padding.

        The mass of the classes is `received @ weights / number of queries`, also for classes
        with judgement `fraction`.
        """
        table = self.table(tokenizer)
        tokens = _checked(input_ids, len(table.classes))
        if table.weights is not None:
            shares = table.weights[tokens]
        else:
            shares = (table.classes[tokens][..., None] == np.arange(len(self))).astype(np.float32)
        if attention_mask is not None:
            shares = shares * _real(attention_mask, tokens.shape)[..., None]
        return shares


def _listed(field: str, value: Any) -> Any:
    if field == "words":
        return list(value)
    return sorted(value) if field == "token_ids" else value


_tables: dict[tuple[str, str], ClassTable] = {}


def _array(values: Any) -> NDArray[Any]:
    """A list, array or tensor of any device as a numpy array, without importing torch."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def _real(attention_mask: Any, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    mask = _array(attention_mask)
    if mask.shape != shape:
        raise InputError(
            f"the attention mask has the shape {mask.shape}, but the token ids have {shape}; the "
            "shapes must be equal",
            code="mask-shape",
            mask=mask.shape,
            ids=shape,
        )
    return np.asarray(mask != 0)


def _checked(input_ids: Any, known: int) -> NDArray[np.int64]:
    ids = _array(input_ids)
    if ids.dtype.kind not in "iu":
        raise InputError(
            f"token ids must be whole numbers, not {ids.dtype}",
            code="bad-token-ids",
            dtype=str(ids.dtype),
        )
    if ids.size and (ids.min() < 0 or ids.max() >= known):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise InputError(
            f"token id {wrong} is outside the tokenizer's vocabulary (0 to {known - 1}); "
            "use the tokenizer of the model that the ids are for",
            code="unknown-token-id",
            value=int(wrong),
            vocabulary=known,
        )
    return ids


def _classify(classes: ClassSet, vocabulary: Vocabulary) -> ClassTable:
    numbers = np.full(len(vocabulary), -1, dtype=np.int64)
    weights = None
    if any(token_class.judgement == "fraction" for token_class in classes):
        weights = _shares(classes, vocabulary)
        numbers = np.where(weights.any(axis=1), weights.argmax(axis=1), -1)
    else:
        left = list(range(len(vocabulary)))
        for number, token_class in enumerate(classes):
            taken = [
                id for id in _within_limit(token_class, left) if _takes(token_class, vocabulary, id)
            ]
            numbers[taken] = number
            left = [id for id in left if numbers[id] < 0]
    if (numbers < 0).all():
        raise InputError(
            f"the class set ({', '.join(classes.names)}) matches no token of this vocabulary, so "
            "there is nothing to measure; check its rules, or end it with 'every: token'",
            code="no-token-in-classes",
            classes=classes.names,
        )
    return ClassTable(classes.names, numbers, weights)


def _takes(token_class: TokenClass, vocabulary: Vocabulary, id: int) -> bool:
    if token_class.every is not None:
        return token_class.every == "token" or id in vocabulary.special
    if token_class.token_ids is not None:
        return id in token_class.token_ids
    return token_class.takes(vocabulary.texts[id])


def _within_limit(token_class: TokenClass, ids: Iterable[int]) -> Iterator[int]:
    """Yield the ids; raise an error when they take longer than `SECONDS_PER_VOCABULARY`."""
    start = time.process_time()
    for number, id in enumerate(ids):
        if number % 16 == 15 and time.process_time() - start > SECONDS_PER_VOCABULARY:
            raise token_class.too_slow()
        yield id


def _shares(classes: ClassSet, vocabulary: Vocabulary) -> NDArray[np.float32]:
    """[ids, classes] the share of each token by class; each character counts for the first class
    that takes it."""
    free = [np.ones(max(len(text), 1), dtype=bool) for text in vocabulary.texts]
    shares = np.zeros((len(vocabulary), len(classes)), dtype=np.float32)
    for number, token_class in enumerate(classes):
        by_text = token_class.every is None and token_class.token_ids is None
        by_fraction = by_text and token_class.judgement == "fraction"
        for id in _within_limit(token_class, range(len(vocabulary))):
            text = vocabulary.texts[id]
            if by_fraction:
                taken = free[id] & token_class.marks(text) if text else np.zeros(1, dtype=bool)
            elif _takes(token_class, vocabulary, id):
                taken = free[id].copy()
            else:
                continue
            shares[id, number] = taken.sum() / len(taken)
            free[id] &= ~taken
    return shares
