"""What is inserted: the right amount, the same for a seed, for every kind and tokenizer."""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscope.errors import InputError
from attnscope.prompts.filler import FILLERS, Filler, filler_ids, filler_text
from attnscope.prompts.word_list import word_list
from attnscope.tokens import read_vocabulary
from support_errors import raises


@pytest.mark.parametrize("kind", FILLERS)
@settings(max_examples=8, deadline=None)
@given(count=st.integers(0, 70), seed=st.integers(0, 10**6))
def test_by_ids_there_are_exactly_as_many_tokens(
    tokenizer: Any, kind: str, count: int, seed: int
) -> None:
    filler = Filler(kind=kind, count=count, seed=seed)
    ids = filler_ids(filler, tokenizer)
    assert len(ids) == count
    assert ids == filler_ids(filler, tokenizer), "the same for a seed"
    vocabulary = read_vocabulary(tokenizer)
    assert not set(ids) & vocabulary.special
    assert all(vocabulary.texts[id] for id in ids)


def test_by_text_a_unit_is_repeated(tokenizer: Any) -> None:
    assert filler_text(Filler(count=55), tokenizer) == "/" * 55
    assert filler_text(Filler(unit="?!", count=2), tokenizer) == "?!?!"
    assert filler_text(Filler(kind="word", count=3), tokenizer) == "he he he"
    assert filler_text(Filler(kind="word", unit="she", count=0), tokenizer) == ""


@pytest.mark.parametrize("kind", ["sentence", "lorem"])
@pytest.mark.parametrize("count", [10, 25, 40, 55, 70])
def test_running_text_has_the_length_asked_for(byte_level: Any, kind: str, count: int) -> None:
    for seed in range(4):
        text = filler_text(Filler(kind=kind, count=count, seed=seed), byte_level)
        assert len(byte_level(text)["input_ids"]) == count
        assert text.endswith(".")
        assert text[0].isupper()


@pytest.mark.parametrize("kind", ["sentence", "lorem"])
def test_running_text_is_never_longer_than_asked_for(tokenizer: Any, kind: str) -> None:
    for seed in range(5):
        text = filler_text(Filler(kind=kind, count=30, seed=seed), tokenizer)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert 28 <= len(ids) <= 30


@pytest.mark.parametrize("kind", ["random-tokens", "sentence", "lorem"])
def test_another_seed_is_another_text(byte_level: Any, kind: str) -> None:
    texts = {filler_text(Filler(kind=kind, count=40, seed=s), byte_level) for s in range(8)}
    assert len(texts) == 8


def test_the_same_on_every_machine() -> None:
    """Nothing depends on the hash seed of the process."""
    program = (
        "import json, itertools, random; from attnscope.prompts.word_list import english;"
        "print(json.dumps(list(itertools.islice(english(random.Random('sentence:7')), 12))))"
    )
    decoded = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", program],
                env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
                capture_output=True,
                check=True,
            ).stdout
        )
        for seed in ("1", "2")
    ]
    assert decoded[0] == decoded[1]


def test_the_word_list_is_large_and_clean() -> None:
    kinds = ["noun", "verb", "adjective", "adverb"]
    assert sum(len(word_list(kind)) for kind in kinds) > 1000
    for kind in kinds:
        words = word_list(kind)
        assert len(set(words)) == len(words)
        assert all(word.isalpha() and word.islower() for word in words)


def test_bad_fillers_are_refused(byte_level: Any) -> None:
    with raises(InputError, "unknown-kind-of-filler", value="slash"):
        Filler(kind="slash")
    with raises(InputError, "bad-count", value=-1):
        Filler(count=-1)
    with raises(InputError, "unit-not-used", value="lorem"):
        Filler(kind="lorem", unit="x")
    with raises(InputError, "empty-unit"):
        Filler(unit="")


def test_a_unit_without_tokens() -> None:
    from made_tokenizers import made

    with raises(InputError, "no-tokens", text="→"):
        filler_ids(Filler(unit="→"), made("wordpiece"))
