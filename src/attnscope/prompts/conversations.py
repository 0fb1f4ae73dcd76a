"""Conversations of several turns: from a file with `messages`, or made up for a seed.

The regions are `system`, `turn:1:user`, `turn:1:assistant`, `turn:2:user` …; the last of the
user's turns is the region `question` too. A conversation may end with the assistant: then it is
read as it stands, and there is nothing left to answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from attnscope.errors import InputError
from attnscope.prompts.datasets import records_of
from attnscope.prompts.sample import Sample
from attnscope.prompts.word_list import word_list
from attnscope.tokens.regions import Prompt, Region

ROLES = ("system", "user", "assistant")


def read_conversations(path: str | Path, field: str = "messages") -> Iterator[Sample]:
    """The conversations of a file (JSONL or Parquet), one a record: a list of messages with a
    `role` and its `content`, under `field`. Other fields are metadata."""
    for where, record in records_of(path):
        try:
            if field not in record:
                raise InputError(
                    f"there is no field {field!r} with messages; the fields are "
                    f"{', '.join(record)}",
                    code="unknown-field",
                    value=field,
                    known=list(record),
                )
            prompt = conversation(record[field])
        except InputError as error:
            raise InputError(
                f"{where}: {error}", code=error.code, **{**error.values, "where": where}
            ) from error
        metadata = {name: value for name, value in record.items() if name != field}
        yield Sample(prompt, None, metadata)


def conversation(messages: Any) -> Prompt:
    """Messages as a prompt: a region for each turn, an empty line between them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(
            "a conversation is a list of messages, each with a role and its content",
            code="bad-conversation",
        )
    text, regions, turn, before = "", [], 0, "system"
    for number, message in enumerate(messages):
        role, content = _read(message, number)
        if role == "system" and number > 0:
            raise InputError(
                f"message {number} is a system prompt; only the first message can be one",
                code="bad-turn-order",
                message_number=number,
            )
        if role == "assistant" and before != "user":
            raise InputError(
                f"message {number} is the assistant's; a user message must come before it",
                code="bad-turn-order",
                message_number=number,
            )
        if role == "user" and before == "user":
            raise InputError(
                f"messages {number - 1} and {number} are both the user's; join them",
                code="bad-turn-order",
                message_number=number,
            )
        turn += role == "user"
        text += "\n\n" if number else ""
        name = role if role == "system" else f"turn:{turn}:{role}"
        regions.append(Region(len(text), len(text) + len(content), name))
        text, before = text + content, role
    if not turn:
        raise InputError("the conversation has no user message", code="no-user-turn")
    last = next(r for r in reversed(regions) if r.name == f"turn:{turn}:user")
    return Prompt(text, (*regions, Region(last.start, last.end, "question")))


def _read(message: Any, number: int) -> tuple[str, str]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        raise InputError(
            f"message {number} is not an object with 'role' and 'content': {message!r:.60}",
            code="bad-message",
            message_number=number,
        )
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise InputError(
            f"message {number} has the unknown role {role!r}; known: {', '.join(ROLES)}",
            code="unknown-role",
            value=role,
            known=list(ROLES),
            message_number=number,
        )
    if not isinstance(content, str) or not content.strip():
        raise InputError(
            f"message {number} ({role}) is empty: its content is {content!r:.40}",
            code="empty-message",
            message_number=number,
        )
    return role, content.strip()


_PERSONA = (
    "You are {name}, a {trait} {work}. Always answer in one short sentence, and mention {thing} "
    "whenever you can. Never say that you are a program."
)
_NAMES = ("Mara", "Otto", "Ines", "Bram", "Tilda", "Jonas", "Wanda", "Emil")
_WORK = ("baker", "sailor", "gardener", "teacher", "carpenter", "nurse", "painter", "farmer")
_TRAITS = ("cheerful", "grumpy", "patient", "curious", "shy", "proud", "sleepy", "honest")
_QUESTIONS = (
    "What did you do with the {adjective} {noun} yesterday?",
    "Do you like the {noun} more than the {other}?",
    "Where would you look for a {adjective} {noun}?",
    "Can you tell me something about a {noun}?",
    "Why is the {noun} so {adjective} today?",
    "How many times have you seen the {other}?",
    "Would you give your {noun} to a friend?",
    "What comes to your mind when you hear of a {adjective} {other}?",
)
_RESPONSES = (
    "I left the {noun} near the {other}, as anybody would.",
    "The {noun} is fine, but a {adjective} {other} is better.",
    "I would look behind the {other} first.",
    "A {adjective} {noun} is all that I know of.",
    "Because the {other} was there before it.",
    "Perhaps twice, and both times it was {adjective}.",
    "Only if the {other} comes with it.",
    "A long walk to the {noun}, and nothing else.",
)


def made_conversations(count: int, *, turns: int = 8, seed: int = 0) -> Iterator[Sample]:
    """Conversations with a persona as the system prompt, and `turns` rounds of small talk, drawn
    with a seed; only the position of a turn matters."""
    for number in range(count):
        draw = Random(f"conversation:{seed}:{number}")
        nouns, adjectives = word_list("noun"), word_list("adjective")
        persona = _PERSONA.format(
            name=draw.choice(_NAMES),
            trait=draw.choice(_TRAITS),
            work=draw.choice(_WORK),
            thing=f"the {draw.choice(nouns)}",
        )
        messages = [{"role": "system", "content": persona}]
        for _ in range(turns):
            words = {
                "noun": draw.choice(nouns),
                "other": draw.choice(nouns),
                "adjective": draw.choice(adjectives),
            }
            messages.append({"role": "user", "content": draw.choice(_QUESTIONS).format(**words)})
            messages.append(
                {"role": "assistant", "content": draw.choice(_RESPONSES).format(**words)}
            )
        yield Sample(conversation(messages), None, {"turns": turns})
