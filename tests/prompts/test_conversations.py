"""Conversations of several turns: their regions, their way through a template, what is wrong."""

import json

import pytest

from attnscope.errors import InputError
from attnscope.prompts import made_conversations, read_conversations
from attnscope.prompts.conversations import conversation
from attnscope.tokens import turns_of
from support_errors import raises

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "How are you?"},
]


def test_every_turn_is_a_region():
    prompt = conversation(TALK)
    assert {name: prompt.read(name) for name in prompt.names} == {
        "system": "Be brief.",
        "turn:1:user": "Hello?",
        "turn:1:assistant": "Hi.",
        "turn:2:user": "How are you?",
        "question": "How are you?",
    }
    assert [(role, turn.text) for role, turn in turns_of(prompt)] == [
        (one["role"], one["content"]) for one in TALK
    ]


def test_a_file_of_conversations(tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": TALK, "topic": "weather"}) + "\n")
    (sample,) = read_conversations(file)
    assert sample.metadata == {"topic": "weather"}
    file.write_text(json.dumps({"chat": TALK}))
    with raises(InputError, "unknown-field", value="messages", known=["chat"]):
        list(read_conversations(file))


@pytest.mark.parametrize(
    ("messages", "code", "values"),
    [
        ([], "bad-conversation", {}),
        ("Hello", "bad-conversation", {}),
        ([{"role": "user"}], "bad-message", {"message_number": 0}),
        ([{"role": "bot", "content": "x"}], "unknown-role", {"value": "bot"}),
        ([{"role": "user", "content": " "}], "empty-message", {"message_number": 0}),
        ([TALK[1], TALK[0]], "bad-turn-order", {"message_number": 1}),
        ([TALK[1], TALK[3]], "bad-turn-order", {"message_number": 1}),
        ([TALK[2]], "bad-turn-order", {"message_number": 0}),
        ([TALK[0]], "no-user-turn", {}),
    ],
)
def test_what_is_no_conversation(messages, code, values):
    with raises(InputError, code, **values):
        conversation(messages)


def test_made_conversations_follow_a_seed():
    one, same, other = (
        [sample.prompt.text for sample in made_conversations(3, turns=4, seed=seed)]
        for seed in (1, 1, 2)
    )
    assert one == same != other
    assert len(set(one)) == 3
    prompt = next(made_conversations(1, turns=4)).prompt
    assert prompt.names[-2:] == ("question", "turn:4:assistant")
