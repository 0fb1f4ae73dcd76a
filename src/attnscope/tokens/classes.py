"""Token classes: which token is a hash, a star, whitespace, a digit, a word.

A class is a rule over the decoded text of a token (`token_class.py`). `words` takes the tokens of
whole words instead. A word may have several tokens, so this rule needs the text; `table`, which
judges every id alone, leaves such classes empty.

A token belongs to the first class that takes it. A set that ends with a class for every token is
a partition of any vocabulary, so the masses of its classes add up to 1.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown
from attnscope.tokens.modalities import MODALITIES, Ids, modality_ids, tokenizer_in
from attnscope.tokens.token_class import SECONDS_PER_VOCABULARY, TokenClass
from attnscope.tokens.vocabulary import Vocabulary, normalized, read_vocabulary, token_bytes
from attnscope.tokens.whole_words import NOT_TEXT, WholeWords

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class ClassTable:
    """A class set applied to a vocabulary: the class of every id, but for classes of words."""

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
        tokenizer = tokenizer_in(tokenizer)
        vocabulary = read_vocabulary(tokenizer)
        by_modality = any(one.every in MODALITIES for one in self.classes)
        ids = modality_ids(tokenizer) if by_modality else {}
        key = (vocabulary.fingerprint, self.fingerprint, *map(frozenset, ids.values()))
        if key not in _tables:
            _tables[key] = _classify(self, vocabulary, ids)
        return _tables[key]

    def ids(
        self, input_ids: Any, tokenizer: PreTrainedTokenizerBase, attention_mask: Any = None
    ) -> NDArray[np.int64]:
        """The class of every token, -1 for none and for padding; `scope.mass` takes it.

        `input_ids` is an array, a list or a tensor [..., tokens of a text]; `attention_mask`, of
        the same shape, is 0 at padding.
        """
        divided = [c.name for c in self.classes if c.judgement == "fraction"]
        if divided:
            raise InputError(
                f"class {divided[0]!r} has judgement 'fraction', so one token can belong to "
                "several classes; use weights(...) instead of ids(...)",
                code="fraction-class",
                token_class=divided[0],
            )
        return self.main_class(input_ids, tokenizer, attention_mask)

    def main_class(
        self, input_ids: Any, tokenizer: PreTrainedTokenizerBase, attention_mask: Any = None
    ) -> NDArray[np.int64]:
        """As `ids`; of a token that several classes share, the one with the largest share."""
        table = self.table(tokenizer)
        tokens = _checked(input_ids, len(table.classes))
        real = None if attention_mask is None else _real(attention_mask, tokens.shape)
        numbers = table.classes[tokens]
        for number, taken in self._words_in(tokens, real, tokenizer):
            numbers = np.where(taken & ((numbers < 0) | (numbers > number)), number, numbers)
        return numbers if real is None else np.where(real, numbers, -1)

    def _words_in(
        self,
        tokens: NDArray[np.int64],
        real: NDArray[np.bool_] | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """The number of each class of words, and which tokens are of such a word."""
        of_words = [(n, c.words) for n, c in enumerate(self.classes) if c.words is not None]
        if not of_words:
            return
        tokenizer = tokenizer_in(tokenizer)
        texts = _texts(tokens, real, tokenizer)
        for number, words in of_words:
            pattern = WholeWords([normalized(word, tokenizer) for word in words], ignore_case=True)
            taken = [pattern.in_tokens(pieces) for pieces in texts]
            yield number, np.array(taken, dtype=bool).reshape(tokens.shape)

    def weights(
        self, input_ids: Any, tokenizer: PreTrainedTokenizerBase, attention_mask: Any = None
    ) -> NDArray[np.float32]:
        """[..., classes] the share of each token that each class takes; 0 at padding.

        The mass of the classes is `received @ weights / number of queries`, also for classes
        with judgement `fraction`.
        """
        table = self.table(tokenizer)
        tokens = _checked(input_ids, len(table.classes))
        real = None if attention_mask is None else _real(attention_mask, tokens.shape)
        if table.weights is not None:
            shares = table.weights[tokens]
        else:
            shares = (table.classes[tokens][..., None] == np.arange(len(self))).astype(np.float32)
        for number, taken in self._words_in(tokens, real, tokenizer):
            shares[taken, number] = 1 - shares[taken, :number].sum(-1)
            shares[taken, number + 1 :] = 0
        return shares if real is None else shares * real[..., None]


def _listed(field: str, value: Any) -> Any:
    if field == "words":
        return list(value)
    return sorted(value) if field == "token_ids" else value


_tables: dict[tuple[object, ...], ClassTable] = {}


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


def _texts(
    tokens: NDArray[np.int64], real: NDArray[np.bool_] | None, tokenizer: PreTrainedTokenizerBase
) -> list[list[bytes]]:
    """The bytes of each token of each text; `NOT_TEXT` for special tokens and padding."""
    hidden = np.isin(tokens, sorted(read_vocabulary(tokenizer).special))
    if real is not None:
        hidden |= ~real
    width = tokens.shape[-1] if tokens.ndim else 1
    rows = zip(tokens.reshape(-1, width).tolist(), hidden.reshape(-1, width), strict=True)
    return [
        [
            NOT_TEXT if h else b
            for h, b in zip(out.tolist(), token_bytes(row, tokenizer), strict=True)
        ]
        for row, out in rows
    ]


def _classify(classes: ClassSet, vocabulary: Vocabulary, modalities: Ids) -> ClassTable:
    numbers = np.full(len(vocabulary), -1, dtype=np.int64)
    weights = None
    if any(token_class.judgement == "fraction" for token_class in classes):
        weights = _shares(classes, vocabulary, modalities)
        numbers = np.where(weights.any(axis=1), weights.argmax(axis=1), -1)
    else:
        left = list(range(len(vocabulary)))
        for number, token_class in enumerate(classes):
            taken = [
                id
                for id in _within_limit(token_class, left)
                if _takes(token_class, vocabulary, modalities, id)
            ]
            numbers[taken] = number
            left = [id for id in left if numbers[id] < 0]
    if (numbers < 0).all() and not any(one.words is not None for one in classes):
        raise InputError(
            f"the class set ({', '.join(classes.names)}) matches no token of this vocabulary, so "
            "there is nothing to measure; check its rules, or end it with 'every: token'",
            code="no-token-in-classes",
            classes=classes.names,
        )
    return ClassTable(classes.names, numbers, weights)


def _takes(token_class: TokenClass, vocabulary: Vocabulary, modalities: Ids, id: int) -> bool:
    if token_class.every in MODALITIES:
        return id in modalities[token_class.every]
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


def _shares(classes: ClassSet, vocabulary: Vocabulary, modalities: Ids) -> NDArray[np.float32]:
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
            elif _takes(token_class, vocabulary, modalities, id):
                taken = free[id].copy()
            else:
                continue
            shares[id, number] = taken.sum() / len(taken)
            free[id] &= ~taken
    return shares
