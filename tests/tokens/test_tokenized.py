"""Regions in tokens: by characters, through truncation and padding, for every tokenizer."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from attnscope.errors import InputError
from attnscope.tokens import Prompt, Region, join, pad, read_vocabulary, tokenize, tokenize_all
from made_tokenizers import made
from support_errors import raises

texts = st.text("ab cd\n #*/7é日👍", min_size=1, max_size=40)


def spans_over(text: str) -> st.SearchStrategy[Region]:
    points = st.integers(0, len(text))
    return st.tuples(points, points).map(lambda s: Region(min(s), max(s), "part"))


@settings(max_examples=40, deadline=None)
@given(text=texts, data=st.data())
def test_a_token_is_in_a_region_when_it_holds_one_of_its_characters(
    tokenizer: Any, text: str, data: st.DataObject
) -> None:
    region = data.draw(spans_over(text))
    tokens = tokenize(Prompt(text + ".", (region,)), tokenizer)
    expected = [
        bool(set(range(start, end)) & set(range(region.start, region.end)))
        for start, end in tokens.offsets.tolist()
    ]
    assert tokens.mask("part").tolist() == expected


@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_no_character_is_lost(tokenizer: Any, text: str) -> None:
    """Every character a token can hold is held: also spaces where offsets leave them out."""
    text += "."  # WordPiece makes no token of blank space, and a prompt needs one
    tokens = tokenize(Prompt(text), tokenizer)
    held = {n for start, end in tokens.offsets.tolist() for n in range(start, end)}
    keeps_spaces = " " in read_vocabulary(tokenizer).texts
    missing = [letter for n, letter in enumerate(text) if n not in held]
    assert not "".join(missing).strip()
    assert not (keeps_spaces and missing)


@settings(max_examples=40, deadline=None)
@given(text=texts)
def test_the_text_of_a_token_is_at_its_offsets(tokenizer: Any, text: str) -> None:
    text += "."  # WordPiece makes no token of blank space, and a prompt needs one
    tokens = tokenize(Prompt(text), tokenizer)
    texts = read_vocabulary(tokenizer).texts
    for id, (start, end) in zip(tokens.ids.tolist(), tokens.offsets.tolist(), strict=True):
        token_text = texts[id]
        if token_text and "\ufffd" not in token_text:
            # SentencePiece adds one space in front of the text.
            assert text[start:end] in (token_text, token_text.removeprefix(" ")) or (
                token_text == " " and start == 0
            )


def example(words: int = 6) -> Prompt:
    return join(
        [("system", "Solve it."), (None, "\n\n"), ("question", "How many apples? " * words)]
    )


def test_truncation_keeps_regions_and_names_the_lost(tokenizer: Any) -> None:
    whole = tokenize(example(), tokenizer)
    assert whole.lost == ()
    cut = tokenize(example(), tokenizer, max_length=6)
    assert len(cut) == 6
    written = cut.offsets[:, 1] > cut.offsets[:, 0]
    kept = cut.ids[written]
    n = len(kept)
    first = int(np.flatnonzero(whole.offsets[:, 1] > 0)[0])
    assert (kept == whole.ids[first : first + n]).all()
    assert (cut.mask("system")[written] == whole.mask("system")[first : first + n]).all()
    tiny = tokenize(example(), tokenizer, max_length=3)
    assert tiny.lost == ("question",)


def test_truncation_on_the_left(byte_level: Any) -> None:
    whole = tokenize(example(), byte_level)
    byte_level.truncation_side = "left"
    try:
        cut = tokenize(example(), byte_level, max_length=5)
    finally:
        byte_level.truncation_side = "right"
    assert (cut.ids == whole.ids[-5:]).all()
    assert cut.mask("question").all()
    assert cut.lost == ("system",)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_moves_regions_and_is_part_of_none(tokenizer: Any, side: Any) -> None:
    rows = [tokenize(example(words), tokenizer) for words in (1, 5, 3)]
    batch = pad(rows, tokenizer, side=side)
    mask = batch.mask("question")
    assert not (mask & (batch.attention_mask == 0)).any()
    for n, row in enumerate(rows):
        assert (batch.input_ids[n, batch.columns(n)] == row.ids).all()
        assert (mask[n, batch.columns(n)] == row.mask("question")).all()
        assert batch.attention_mask[n].sum() == len(row)
    padding = batch.attention_mask[0] == 0
    assert padding[0 if side == "left" else -1]
    assert (batch.input_ids[0][padding] == tokenizer.pad_token_id).all()


def test_a_batch_is_what_a_model_takes(byte_level: Any) -> None:
    torch = pytest.importorskip("torch")
    inputs = pad([tokenize(example(), byte_level)]).inputs
    assert set(inputs) == {"input_ids", "attention_mask"}
    assert inputs["input_ids"].dtype == torch.int64


def test_a_complete_prompt_gets_no_second_begin(tokenizer: Any) -> None:
    text = "<s>Hello"
    begin = tokenizer.bos_token_id
    assert tokenize(Prompt(text, complete=True), tokenizer).ids.tolist().count(begin) == 1


def test_bad_input_is_refused(byte_level: Any) -> None:
    with raises(InputError, "slow-tokenizer"):
        tokenize(example(), SimpleNamespace(is_fast=False))  # type: ignore[arg-type]
    with raises(InputError, "bad-max-length", max_length=0):
        tokenize(example(), byte_level, max_length=0)
    with raises(InputError, "no-tokens", text=" \n"):
        tokenize(Prompt(" \n", complete=True), made("wordpiece"))
    with raises(InputError, "empty-batch"):
        pad([], byte_level)
    with raises(InputError, "unknown-padding-side", value="top", known=["left", "right"]):
        pad([tokenize(example(), byte_level)], side="top")  # type: ignore[arg-type]
    with raises(InputError, "unknown-region", value="filler", known=["system", "question"]):
        tokenize(example(), byte_level).mask("filler")


def test_tokenize_all_equals_tokenize(tokenizer: Any) -> None:
    some = ["Tom has 12 apples.", "  # * \n\n ##*", "日本語 👍 naïve", "he he"]
    prompts = [Prompt(text, complete=n % 2 == 1) for n, text in enumerate(some)]
    for one, prompt in zip(tokenize_all(prompts, tokenizer), prompts, strict=True):
        alone = tokenize(prompt, tokenizer)
        assert one.prompt is prompt
        assert one.ids.tolist() == alone.ids.tolist()
        assert one.offsets.tolist() == alone.offsets.tolist()
    assert list(tokenize_all([], tokenizer)) == []


def test_one_of_many_without_tokens_is_refused_in_its_turn(byte_level: Any) -> None:
    tokenizer = copy.deepcopy(byte_level)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("!", "")
    tokenized = tokenize_all([Prompt(text, complete=True) for text in "a!b"], tokenizer)
    assert next(tokenized).prompt.text == "a"
    with raises(InputError, "no-tokens", text="!"):
        next(tokenized)
