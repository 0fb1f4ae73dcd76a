"""Conversations of several turns: their regions, their way through a template, what is wrong."""

import json

import pytest

from attnscope.errors import InputError
from attnscope.prompts import made_conversations, read_conversations
from attnscope.prompts.conversations import conversation
from attnscope.tokens import turns_of

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
    with pytest.raises(InputError, match=r"line 1: there is no field 'messages'.*chat"):
        list(read_conversations(file))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "a list of messages"),
        ("Hello", "a list of messages"),
        ([{"role": "user"}], "message 0 is no object with 'role' and 'content'"),
        ([{"role": "bot", "content": "x"}], "unknown role of message 0: 'bot'"),
        ([{"role": "user", "content": " "}], r"message 0 \(user\) says nothing"),
        ([TALK[1], TALK[0]], "message 1 is a system prompt"),
        ([TALK[1], TALK[3]], "messages 0 and 1 are both the user's"),
        ([TALK[2]], "nobody asked before it"),
        ([TALK[0]], "no turn of the user's"),
    ],
)
def test_what_is_no_conversation(messages, words):
    with pytest.raises(InputError, match=words):
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
