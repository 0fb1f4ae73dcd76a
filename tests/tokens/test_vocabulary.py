"""The decoded text of every token, for every kind of tokenizer."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attnscope.errors import InputError
from attnscope.tokens import read_vocabulary
from made_tokenizers import KINDS, made
from support_errors import raises


@settings(max_examples=20, deadline=None)
@given(text=st.text("abc XYZ12 #*/\n\té日👍", min_size=1, max_size=30))
def test_token_texts_follow_the_written_text(tokenizer: Any, text: str) -> None:
    """Whole characters appear in the tokens' texts, in order; pieces of them as U+FFFD."""
    texts = read_vocabulary(tokenizer).texts
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    decoded = "".join(texts[id] for id in ids).replace("\ufffd", "")
    written = "".join(text.split())
    remaining = iter(written)
    unknown = getattr(tokenizer, "unk_token_id", None) in ids
    # A subsequence of what was written, and all of its ASCII, where nothing was unknown.
    assert all(letter in remaining for letter in "".join(decoded.split()))
    if not unknown:
        kept = [letter for letter in decoded if letter.isascii() and not letter.isspace()]
        assert kept == [letter for letter in written if letter.isascii()]


@pytest.mark.parametrize(
    ("kind", "piece", "text"),
    [
        ("byte-level", "Ġ#", " #"),
        ("byte-level", "Ċ", "\n"),
        ("byte-level", "ð", "\ufffd"),
        ("byte-level", "ĠnaÃ¯ve", " naïve"),
        ("sentencepiece-unigram", "▁the", " the"),
        ("sentencepiece-unigram", "<0x0A>", "\n"),
        ("sentencepiece-bpe", "<0xE2>", "\ufffd"),
        ("sentencepiece-bpe", "▁", " "),
        ("wordpiece", "##t", "t"),
        ("wordpiece", "#", "#"),
    ],
)
def test_the_code_of_each_kind_is_undone(kind: str, piece: str, text: str) -> None:
    tokenizer = made(kind)
    assert read_vocabulary(tokenizer).texts[tokenizer.get_vocab()[piece]] == text


def test_marks_at_the_end_of_a_word_are_no_text() -> None:
    """CLIP's way: byte-level letters, and `</w>` where a word ends."""
    pieces = {"a": 0, "b</w>": 1, "ab</w>": 2}
    model = models.BPE(vocab=pieces, merges=[("a", "b</w>")], end_of_word_suffix="</w>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert read_vocabulary(tokenizer).texts[:3] == ("a", "b", "ab")


def test_tokens_added_by_hand_are_plain_text() -> None:
    tokenizer = KINDS["byte-level"]()
    tokenizer.add_tokens(["é!"])
    assert read_vocabulary(tokenizer).texts[-1] == "é!"


def test_special_tokens_have_no_text(tokenizer: Any) -> None:
    vocabulary = read_vocabulary(tokenizer)
    assert tokenizer.get_vocab()["<|im_start|>"] in vocabulary.special
    assert {vocabulary.texts[id] for id in vocabulary.special} == {""}


def test_a_tokenizer_without_offsets_is_refused() -> None:
    slow = SimpleNamespace(is_fast=False)
    with raises(InputError, "slow-tokenizer", tokenizer="SimpleNamespace"):
        read_vocabulary(slow)  # type: ignore[arg-type]
