"""Regions round-trip through chat templates."""

import copy
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscope.errors import InputError
from attnscope.tokens import (
    Prompt,
    Region,
    apply_chat_template,
    apply_chat_template_to_all,
    join,
    template_check,
    tokenize,
    turns_of,
)
from support_errors import raises

contents = st.text("ab \n#user<|>é", max_size=12)


def with_template(tokenizer: Any, template: str | None) -> Any:
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(contents, min_size=1, max_size=3),
    system=st.none() | contents,
    data=st.data(),
)
def test_regions_round_trip(
    byte_level: Any,
    chat_template: str,
    turns: list[str],
    system: str | None,
    data: st.DataObject,
) -> None:
    """Each region reads the same after the template, but for blank space that it trimmed."""
    tokenizer = with_template(byte_level, chat_template)
    roles = ["user", "assistant", "user"][: len(turns)]
    written = list(zip(roles, turns, strict=True))
    if system is not None:
        written.insert(0, ("system", system))
    chat = []
    for n, (role, text) in enumerate(written):
        text += "."  # a prompt is not empty
        points = st.integers(0, len(text))
        start, end = sorted([data.draw(points), data.draw(points)])
        inner = (Region(0, len(text), f"all {n}"), Region(start, end, f"part {n}"))
        chat.append((role, Prompt(text, inner)))

    rendered = apply_chat_template(chat, tokenizer)
    plain = tokenizer.apply_chat_template(
        [{"role": role, "content": turn.text} for role, turn in chat],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered.text == plain
    assert rendered.complete
    for n, (_, turn) in enumerate(chat):
        assert rendered.read(f"all {n}") in (turn.text, turn.text.strip())
        kept = rendered.read(f"part {n}")
        before = turn.read(f"part {n}")
        assert kept == before or kept.strip() == before.strip()
        assert kept in rendered.read(f"all {n}")


def test_regions_reach_the_tokens(tokenizer: Any, chat_template: str) -> None:
    prompt = join([("system", "Think twice."), (None, "\n\n"), ("question", "  How many apples? ")])
    chat = apply_chat_template(prompt, with_template(tokenizer, chat_template))
    assert chat.read("system") == "Think twice."
    assert chat.read("question") == "How many apples?"
    tokens = tokenize(chat, tokenizer)
    system, question = tokens.mask("system"), tokens.mask("question")
    assert system.any()
    assert question.any()
    assert not (system & question).any()
    assert system.argmax() < question.argmax()
    special = set(tokenizer.all_special_ids)
    assert not special & set(tokens.ids[system | question].tolist())
    if chat.text.startswith("<s>"):
        assert tokens.ids.tolist().count(tokenizer.bos_token_id) == 1


def test_a_prompt_is_divided_into_turns() -> None:
    prompt = join(
        [
            (None, "//// "),
            ("system", "Be brief."),
            (None, "\n\n"),
            ("question", "Why?"),
            (None, "\n"),
            ("assistant", "Because."),
            (None, "\nReally? "),
        ]
    )
    found = [(role, turn.text) for role, turn in turns_of(prompt)]
    assert found == [
        ("system", "//// Be brief."),
        ("user", "Why?"),
        ("assistant", "Because."),
        ("user", "Really?"),
    ]
    assert turns_of(prompt)[1][1].read("question") == "Why?"


def test_the_same_words_in_two_turns_are_two_regions(byte_level: Any, chat_template: str) -> None:
    chat = [
        ("system", join([("first", "user")])),
        ("user", join([("second", "user")])),
    ]
    rendered = apply_chat_template(chat, with_template(byte_level, chat_template))
    assert rendered.read("first") == rendered.read("second") == "user"
    assert rendered.spans("first")[0].end < rendered.spans("second")[0].start


def test_many_chats_equal_one_chat_at_a_time(byte_level: Any, chat_template: str) -> None:
    tokenizer = with_template(byte_level, chat_template)
    prompts = [
        join([("system", "Be kind."), ("question", "What is 2 + 2?")]),
        join([("question", "  trimmed, or not? \n ")]),
        join([("system", "\U000f0003 is \U000f0000"), ("question", "naïve")]),
        join([("system", "Be kind."), ("question", "What is 2 + 2?")]),
    ]
    chats = [[("user", prompts[1])] if n == 1 else turns_of(p) for n, p in enumerate(prompts)]
    alone = [apply_chat_template(chat, tokenizer) for chat in chats]
    assert list(apply_chat_template_to_all(chats, tokenizer)) == alone
    assert list(apply_chat_template_to_all([], tokenizer)) == []


def test_one_of_many_that_is_refused_is_refused_in_its_turn(byte_level: Any) -> None:
    picky = (
        "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.content }}]{% endfor %}"
    )
    tokenizer = with_template(byte_level, picky)
    chats = [turns_of(Prompt(text)) for text in ("one", "two", "bad", "three")]
    rendered = apply_chat_template_to_all(chats, tokenizer)
    assert [next(rendered).text, next(rendered).text] == ["[one]", "[two]"]
    with raises(InputError, "chat-template-error", roles=("user",)):
        next(rendered)


def test_bad_input_is_refused(byte_level: Any) -> None:
    prompt = join([("system", "a"), ("question", "b")])
    with raises(InputError, "no-chat-template"):
        apply_chat_template(prompt, with_template(byte_level, None))
    with raises(InputError, "empty-chat"):
        apply_chat_template([], with_template(byte_level, "x"))
    refusing = "{{ raise_exception('no system role here') }}"
    with raises(InputError, "chat-template-error", roles=("system", "user")):
        apply_chat_template(prompt, with_template(byte_level, refusing))
    for rewriting in ("{{ messages[0].content | upper }}", "{{ messages[1].content }}", "x"):
        with raises(InputError, "chat-template-changes-text"):
            apply_chat_template(prompt, with_template(byte_level, rewriting))
    twice = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    with raises(InputError, "chat-template-changes-text"):
        apply_chat_template(prompt, with_template(byte_level, twice))


NO_LIMIT = {"SECONDS": 250, "PATIENCE": 250, "MEMORY": 1 << 40}
"""Each case has the one limit that it must meet: a busy machine meets no other."""
FEW_SECONDS, LITTLE_MEMORY = {"SECONDS": 1}, {"MEMORY": 1 << 28}


@pytest.mark.parametrize(
    ("template", "limits", "exceeded"),
    {
        "loops": (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            FEW_SECONDS,
            "seconds",
        ),
        "computes": ("{{ (10 ** (10 ** 9)) % 7 }}", FEW_SECONDS, "seconds"),
        "grows": ("{{ 'a' * 10 ** 11 }}", LITTLE_MEMORY, "memory"),
        "doubles": (
            "{% set n = namespace(x='ab') %}{% for a in range(60) %}"
            "{% set n.x = n.x ~ n.x %}{% endfor %}",
            LITTLE_MEMORY,
            "memory",
        ),
        "writes": (
            "{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}",
            {},
            "characters",
        ),
    }.values(),
    ids=["loops", "computes", "grows", "doubles", "writes"],
)
def test_a_template_without_end_is_refused(
    byte_level: Any,
    template: str,
    limits: dict[str, int],
    exceeded: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "MEMORY" in limits and sys.platform != "linux":
        pytest.skip("a limit of memory (RLIMIT_AS) is enforced on Linux alone")
    for name, limit in (NO_LIMIT | limits).items():
        monkeypatch.setattr(template_check, name, limit)
    prompt = Prompt("Which way does the arrow point now?")
    with raises(InputError, "chat-template-limit", limit=exceeded):
        apply_chat_template(prompt, with_template(byte_level, template))


def test_a_template_is_tried_once(byte_level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for turn in messages %}[{{ turn.content }}]{% endfor %}<tried once>"
    tokenizer = with_template(byte_level, template)
    assert apply_chat_template(Prompt("one"), tokenizer).text == "[one]<tried once>"
    monkeypatch.setattr(template_check.subprocess, "run", None)
    assert apply_chat_template(Prompt("two"), tokenizer).text == "[two]<tried once>"
