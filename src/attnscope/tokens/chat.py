"""Through a chat template without losing the regions.

A template is a program: it may trim what it is given, fold the system prompt into the user's
turn, put anything around anything. So the text is rendered twice, plainly and with invisible
marks around the content of each turn; the marks say where the content went, and the plain
rendering proves that they changed nothing.

This module must not know what the regions mean, beyond the names of the roles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from attnscope.errors import InputError
from attnscope.tokens.regions import Prompt, Region, join
from attnscope.tokens.template_check import check_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = tuple[str, Prompt]
"""A role (`system`, `user`, `assistant`) and what it says."""

# Private-use characters: no template looks for them and no text should hold them.
_FIRST_MARK = 0xF0000


def apply_chat_template(
    prompt: Prompt | Sequence[Turn],
    tokenizer: PreTrainedTokenizerBase,
    *,
    generation_prompt: bool = True,
    **template_options: Any,
) -> Prompt:
    """The prompt as the tokenizer's chat template writes it, regions and all.

    A plain prompt is divided into turns by `turns_of`. With `generation_prompt` the text ends
    where the assistant's answer begins. Other options go to the template as they are.
    """
    turns = turns_of(prompt) if isinstance(prompt, Prompt) else list(prompt)
    return next(_through([turns], tokenizer, generation_prompt, template_options))


def apply_chat_template_to_all(
    chats: Sequence[Sequence[Turn]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    generation_prompt: bool = True,
    **template_options: Any,
) -> Iterator[Prompt]:
    """Many chats, in order: the same as one by one, in three quarters of the time."""
    for start in range(0, len(chats), _TOGETHER):
        some = chats[start : start + _TOGETHER]
        yield from _through(some, tokenizer, generation_prompt, template_options)


_TOGETHER = 512  # chats: more take memory and no less time


def _through(
    chats: Sequence[Sequence[Turn]],
    tokenizer: PreTrainedTokenizerBase,
    generation_prompt: bool,
    template_options: dict[str, Any],
) -> Iterator[Prompt]:
    render = _Rendering(tokenizer, generation_prompt, template_options)
    if len(chats) > 1:
        render.beforehand(chats)
    for turns in chats:
        if not turns:
            raise InputError(
                "the chat has no turns; give at least one, such as a user's question",
                code="empty-chat",
            )
        roles = tuple(role for role, _ in turns)
        text, content_at = _follow([turn.text for _, turn in turns], partial(render, roles))
        regions = []
        for (_, turn), (start, end, skipped) in zip(turns, content_at, strict=True):
            for region in turn.regions:
                first = min(max(start, start - skipped + region.start), end)
                last = min(max(start, start - skipped + region.end), end)
                regions.append(Region(first, last, region.name))
        yield Prompt(text, tuple(regions), complete=True)


class _Rendering:
    """A tokenizer's template at work; what was rendered with others is not rendered again."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        generation_prompt: bool,
        template_options: dict[str, Any],
    ):
        self.tokenizer = tokenizer
        self.options = {"add_generation_prompt": generation_prompt} | template_options
        self.known: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
        """By roles and what they say."""
        if not (template_options.get("chat_template") or getattr(tokenizer, "chat_template", None)):
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise InputError(
                f"tokenizer {name!r} has no chat template; use the prompt as it is, or set "
                "tokenizer.chat_template",
                code="no-chat-template",
                tokenizer=name,
            )

    def __call__(self, roles: tuple[str, ...], contents: list[str]) -> str:
        """What the template makes of a chat."""
        key = roles, tuple(contents)
        if key in self.known:
            return self.known[key]
        try:
            return self._texts([key])[0]
        except InputError:
            raise
        except Exception as error:  # whatever the template's author raises, in Jinja or through it
            raise InputError(
                f"the chat template refuses turns of {', '.join(roles)}: {error}",
                code="chat-template-error",
                roles=roles,
            ) from error

    def beforehand(self, chats: Sequence[Sequence[Turn]]) -> None:
        """Render chats, and the same with marks, all at once: most of the time of one by one is
        not the template's. Where any fails, each is rendered when it comes, and fails there."""
        keys = []
        for turns in chats:
            roles, contents = tuple(role for role, _ in turns), [turn.text for _, turn in turns]
            with suppress(InputError):  # there is no mark for it: said when it comes
                marked, _ = _marked(contents, trimmed=False)
                keys += [(roles, tuple(contents)), (roles, tuple(marked))]
        try:
            self.known = dict(zip(keys, self._texts(keys), strict=True))
        except InputError:  # the template itself
            raise
        except Exception:
            self.known = {}

    def _texts(self, keys: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[str]:
        chats = [
            [{"role": role, "content": content} for role, content in zip(*key, strict=True)]
            for key in keys
        ]
        asked = self.options
        check_ends(
            self.tokenizer.get_chat_template(asked.get("chat_template"), asked.get("tools")),
            chats[0],
            self.tokenizer.special_tokens_map | asked,
        )
        texts: list[str] = self.tokenizer.apply_chat_template(chats, tokenize=False, **asked)
        return texts


def as_question(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    system: str | None = None,
    chat: bool = False,
) -> Prompt:
    """A text as the user's question: in the chat template, if it is asked for or there is a system
    prompt to put before it."""
    before = [] if system is None else [("system", system)]
    prompt = join([*before, ("question", text)])
    return apply_chat_template(prompt, tokenizer) if chat or before else prompt


def turns_of(prompt: Prompt) -> list[Turn]:
    """A prompt's turns: who says what."""
    return [(role, prompt.cut(start, end)) for role, start, end in turn_spans(prompt)]


def turn_spans(prompt: Prompt) -> list[tuple[str, int, int]]:
    """Divide a prompt by its regions: `system`, `assistant` and `turn:N:ROLE` are turns, the rest
    is the user's.

    Text in front of the system prompt goes with it. The blank space between two turns is dropped,
    since a template writes its own.
    """
    found = [(_role(r.name), r) for r in prompt.regions if r.end > r.start]
    roles = [(role, region) for role, region in found if role is not None]
    spans: list[tuple[str, int, int]] = []
    position = 0

    def add(role: str, start: int, end: int) -> None:
        text = prompt.text[start:end]
        start += len(text) - len(text.lstrip())
        end -= len(text) - len(text.rstrip())
        if start < end:
            spans.append((role, start, end))

    for n, (role, region) in enumerate(roles):
        if region.start < position:
            raise InputError(
                f"region {region.name!r} at character {region.start} starts inside the turn "
                "before it; turns must not overlap",
                code="overlapping-turns",
                region=region.name,
                start=region.start,
            )
        if role == "system" and n == 0:
            add("system", 0, region.end)
        else:
            add("user", position, region.start)
            add(role, region.start, region.end)
        position = region.end
    add("user", position, len(prompt.text))
    return spans


def _role(name: str) -> str | None:
    """The role whose turn a region of that name is."""
    if name in ("system", "assistant"):
        return name
    turn = re.fullmatch(r"turn:[0-9]+:(user|assistant)", name)
    return turn[1] if turn else None


def _follow(
    contents: list[str], render: Callable[[list[str]], str]
) -> tuple[str, list[tuple[int, int, int]]]:
    """Render, and find each content: start, end, and how many characters were trimmed before it."""
    first = _unused_mark(contents)
    plain = render(contents)
    for trimmed in (False, True):
        marked, skips = _marked(contents, trimmed=trimmed)
        text, found = _lift_marks(render(marked), first, 2 * len(contents))
        if text == plain and len(found) == 2 * len(contents):
            return plain, [(found[2 * n], found[2 * n + 1], skip) for n, skip in enumerate(skips)]
    raise InputError(
        "the chat template leaves out, repeats or changes the text of a turn, so attnscope cannot "
        "locate the regions in its output; render the text yourself and mark its regions",
        code="chat-template-changes-text",
    )


def _marked(contents: list[str], *, trimmed: bool) -> tuple[list[str], list[int]]:
    """Each content between marks of its own, and how many characters stand before the first."""
    first = _unused_mark(contents)
    marked, skips = [], []
    for n, content in enumerate(contents):
        core = content.strip() if trimmed else content
        # Where the template trims, the blank space must stay outside the marks to be trimmed.
        before = content[: len(content) - len(content.lstrip())] if trimmed and core else ""
        after = content[len(content.rstrip()) :] if trimmed and core else ""
        opening, closing = chr(first + 2 * n), chr(first + 2 * n + 1)
        marked.append(f"{before}{opening}{core}{closing}{after}")
        skips.append(len(before))
    return marked, skips


def _unused_mark(contents: list[str]) -> int:
    wanted = 2 * len(contents)
    wide = [content for content in contents if not content.isascii()]
    highest = max((ord(max(content)) for content in wide), default=0)
    first = max(_FIRST_MARK, highest + 1)
    if first + wanted > 0x10FFFE:
        raise InputError(
            "the prompt contains the last private-use characters of Unicode, which attnscope needs "
            "as marks; remove them",
            code="no-unused-character",
        )
    return first


def _lift_marks(text: str, first: int, count: int) -> tuple[str, dict[int, int]]:
    """Take the marks out of the text: what is left, and where each stood (those seen once)."""
    any_mark = re.compile(f"[{chr(first)}-{chr(first + count - 1)}]")
    places: dict[int, list[int]] = {}
    for before, found in enumerate(any_mark.finditer(text)):
        places.setdefault(ord(found[0]) - first, []).append(found.start() - before)
    once = {mark: at[0] for mark, at in places.items() if len(at) == 1}
    return any_mark.sub("", text), once
