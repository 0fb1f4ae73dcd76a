"""Insertions and their alignment: every kind, place, length, tokenizer, by text and by ids."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscope.errors import InputError
from attnscope.prompts.filler import FILLERS, Filler
from attnscope.prompts.insertion import POSITIONS, Pair, character_at, insert
from attnscope.tokens import Prompt, apply_chat_template, join, tokenize
from made_tokenizers import CHATML, made
from support_errors import raises

LENGTHS = (0, 10, 25, 40, 55, 70)
PROMPT = join(
    [
        ("system", "Solve the problem, then write the answer."),
        (None, "\n\n"),
        ("question", "Tom has 12 apples/pears (naïve, 日本 👍) and eats 5. How many are left?"),
    ]
)


def check(pair: Pair) -> None:
    """The promise of an alignment, worked out again from ids and characters alone."""
    base, variant, found = pair.base, pair.variant, pair.alignment
    assert base.ids[found.base].tolist() == variant.ids[found.variant].tolist()
    assert sorted([*found.base, *found.base_boundary]) == list(range(len(base)))
    counted = sorted([*found.variant, *found.filler, *found.variant_boundary])
    assert counted == list(range(len(variant)))
    assert (np.diff(found.base) > 0).all()
    assert (np.diff(found.variant) > 0).all()
    # Aligned tokens have the same characters; filler tokens have those of the filler.
    for b, v in zip(found.base, found.variant, strict=True):
        there = slice(*variant.offsets[v])
        assert base.prompt.text[slice(*base.offsets[b])] == variant.prompt.text[there]
    inside = variant.mask("filler")
    assert inside[found.filler].all()
    assert not inside[found.variant].any()
    # Regions of the base are still on their text.
    for name in base.prompt.names:
        decoded = variant.prompt.read(name)
        filler = variant.prompt.read("filler")
        assert decoded.replace(filler, "", 1).split() == base.prompt.read(name).split() or (
            base.prompt.read(name) == decoded
        )


@pytest.mark.parametrize("by", ["text", "ids"])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kind", FILLERS)
def test_every_insertion_is_aligned(tokenizer: Any, kind: str, position: str, by: Any) -> None:
    base = tokenize(PROMPT, tokenizer)
    for count in LENGTHS:
        filler = Filler(kind=kind, count=count, seed=count)
        pair = insert(base, filler, tokenizer, position=position, by=by)
        check(pair)
        if by == "ids":
            assert len(pair.alignment.filler) == count
            assert not len(pair.alignment.base_boundary)
            assert not len(pair.alignment.variant_boundary)
        elif count:
            assert len(pair.alignment.filler)
            # Boundary tokens are at the edges, never the better part of the prompt.
            assert len(pair.alignment.base) >= 0.75 * len(base)
        else:
            assert pair.variant.prompt.text == PROMPT.text


texts = st.text("ab /#\n7é👍.", min_size=1, max_size=30).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(
    text=texts,
    unit=st.text("ab /#\n7.", min_size=1, max_size=3),
    count=st.integers(0, 5),
    by=st.sampled_from(["text", "ids"]),
    separator=st.sampled_from(["", "\n", " "]),
    data=st.data(),
)
def test_any_insertion_anywhere_is_aligned(
    tokenizer: Any,
    text: str,
    unit: str,
    count: int,
    by: Any,
    separator: str,
    data: st.DataObject,
) -> None:
    """Also where the filler looks just like the text around it."""
    at = data.draw(st.integers(0, len(text)))
    filler = Filler(unit=unit, count=count)
    try:
        pair = insert(Prompt(text), filler, tokenizer, position=at, by=by, separator=separator)
    except InputError as error:
        assert error.code == "no-tokens"  # noqa: PT017  blank space, for WordPiece
        return
    check(pair)


def test_the_filler_lands_inside_the_turns_of_a_chat(tokenizer: Any, chat_template: str) -> None:
    kept = tokenizer.chat_template
    tokenizer.chat_template = chat_template
    try:
        chat = apply_chat_template(PROMPT, tokenizer)
    finally:
        tokenizer.chat_template = kept
    for position in POSITIONS:
        for by in ("text", "ids"):
            pair = insert(chat, Filler(seed=3), tokenizer, position=position, by=by)  # type: ignore[arg-type]
            check(pair)
            text, filler = pair.variant.prompt.text, pair.variant.prompt.spans("filler")[0]
            special = ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "<s>")
            assert text.startswith(special)
            assert filler.start > 0
            assert not text[filler.end :].strip().startswith("<s>")


def test_between_in_chatml_leaves_no_boundary_in_the_base(byte_level: Any) -> None:
    byte_level.chat_template = CHATML
    chat = apply_chat_template(PROMPT, byte_level)
    pair = insert(chat, Filler(), byte_level)
    assert not len(pair.alignment.base_boundary)
    assert "user\n" + "/" * 55 + "\nTom has" in pair.variant.prompt.text


def test_boundary_tokens_are_reported() -> None:
    """`//` in the base, cut in two by the filler: two tokens where there was one."""
    tokenizer = made("byte-level")
    base = Prompt("a // b")
    pair = insert(base, Filler(unit="#", count=2), tokenizer, position=3, separator="")
    assert pair.variant.prompt.text == "a /##/ b"
    found = pair.alignment
    assert len(found.base_boundary) == 1
    lost = pair.base.offsets[found.base_boundary[0]]
    assert base.text[slice(*lost)] == " //"
    decoded = "".join(
        pair.variant.prompt.text[slice(*o)] for o in pair.variant.offsets[found.variant_boundary]
    )
    assert "/" in decoded
    check(pair)


def test_by_ids_no_token_is_divided() -> None:
    """A space goes with its word, behind the filler; anything else stays in front of it."""
    tokenizer = made("byte-level")
    for at, first in ((1, 1), (2, 1), (3, 2), (4, 2)):
        pair = insert(Prompt("a // #"), Filler(unit="*", count=2), tokenizer, position=at, by="ids")
        assert pair.alignment.filler.tolist() == [first, first + 1]
        check(pair)


def test_a_separator_keeps_words_apart_and_is_no_filler(byte_level: Any) -> None:
    pair = insert(PROMPT, Filler(kind="word", count=2), byte_level, position="end")
    assert pair.variant.prompt.text.endswith("left?\nhe he")
    pair = insert(PROMPT, Filler(kind="word", count=2), byte_level, position="between")
    assert "\n\nhe he\nTom" in pair.variant.prompt.text
    assert pair.variant.prompt.read("filler") == "he he"
    pair = insert(PROMPT, Filler(count=2), byte_level, position="between", separator="")
    assert "\n\n//Tom" in pair.variant.prompt.text


def test_a_special_token_can_be_the_filler(tokenizer: Any) -> None:
    filler = Filler(unit="<pad>", count=7)
    for by in ("text", "ids"):
        pair = insert(PROMPT, filler, tokenizer, by=by, separator="")  # type: ignore[arg-type]
        check(pair)
        inserted = pair.variant.ids[pair.alignment.filler].tolist()
        assert inserted.count(tokenizer.pad_token_id) == 7
        assert pair.variant.prompt.read("filler") == "<pad>" * 7


def test_random_places_follow_the_seed_and_end_words() -> None:
    places = [character_at(PROMPT, "random", seed=seed) for seed in range(40)]
    assert places == [character_at(PROMPT, "random", seed=seed) for seed in range(40)]
    assert len(set(places)) > 8
    for at in places:
        assert not PROMPT.text[at - 1].isspace()
        assert at == len(PROMPT.text) or PROMPT.text[at].isspace()


def test_places_by_name() -> None:
    question = PROMPT.spans("question")[0]
    assert character_at(PROMPT, "before-system") == 0
    assert (
        character_at(PROMPT, "between") == question.start == character_at(PROMPT, "before:question")
    )
    assert character_at(PROMPT, "end") == question.end == len(PROMPT.text)
    assert character_at(PROMPT, "after:system") == PROMPT.spans("system")[0].end
    assert character_at(PROMPT, 5) == 5


@pytest.mark.parametrize(
    ("position", "code"),
    [
        ("middle", "unknown-position"),
        ("before:", "unknown-position"),
        ("after:maps", "unknown-region"),
        (1000, "position-outside-prompt"),
        (-1, "position-outside-prompt"),
    ],
)
def test_positions_that_do_not_exist(byte_level: Any, position: str | int, code: str) -> None:
    with raises(InputError, code):
        insert(PROMPT, Filler(), byte_level, position=position)


def test_other_bad_input(byte_level: Any) -> None:
    with raises(InputError, "unknown-region", value="system", known=[]):
        insert(Prompt("Hello."), Filler(), byte_level, position="before-system")
    with raises(InputError, "unknown-way-to-insert", value="token"):
        insert(PROMPT, Filler(), byte_level, by="token")  # type: ignore[arg-type]
    with raises(InputError, "no-word"):
        character_at(Prompt(" \n"), "random")
