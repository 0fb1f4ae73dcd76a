"""Applies a chat template to a prompt and locates the regions of the prompt in the result.

A template is a program: it may trim a turn, or move the system prompt into the user turn. So the
text is rendered twice, plainly and with private-use characters around each turn. The marks give
the position of each turn. The two texts must be equal without the marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from attnscope.errors import InputError
from attnscope.tokens.regions import Prompt, Region, join
from attnscope.tokens.template_check import check_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = tuple[str, Prompt]
"""A role (`system`, `user`, `assistant`) and its text."""

_Role = str | tuple[str, tuple[bool, ...]]
"""The role of a turn; in prompts with pictures also which of its parts are pictures."""

# Private-use characters: templates do not use them, and texts should not contain them.
_FIRST_MARK = 0xF0000


def apply_chat_template(
    prompt: Prompt | Sequence[Turn],
    tokenizer: PreTrainedTokenizerBase,
    *,
    generation_prompt: bool = True,
    image_mark: str | None = None,
    **template_options: Any,
) -> Prompt:
    """The prompt after the tokenizer's chat template, with its regions.

    `turns_of` divides a plain prompt into turns. With `generation_prompt` the text ends where the
    completion begins. With `image_mark`, the template gets a picture in place of each such text.
    Other options are passed to the template.
    """
    turns = turns_of(prompt) if isinstance(prompt, Prompt) else list(prompt)
    return next(_render_all([turns], tokenizer, generation_prompt, template_options, image_mark))


def apply_chat_template_to_all(
    chats: Sequence[Sequence[Turn]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    generation_prompt: bool = True,
    **template_options: Any,
) -> Iterator[Prompt]:
    """The same for many chats, in order, in three quarters of the time."""
    for start in range(0, len(chats), _BATCH):
        some = chats[start : start + _BATCH]
        yield from _render_all(some, tokenizer, generation_prompt, template_options)


_BATCH = 512  # chats; larger batches need more memory and save no time


def _render_all(
    chats: Sequence[Sequence[Turn]],
    tokenizer: PreTrainedTokenizerBase,
    generation_prompt: bool,
    template_options: dict[str, Any],
    image_mark: str | None = None,
) -> Iterator[Prompt]:
    render = _Rendering(tokenizer, generation_prompt, template_options)
    if len(chats) > 1:
        render.render_together(chats)
    for turns in chats:
        if not turns:
            raise InputError(
                "the chat has no turns; give at least one, such as a user's question",
                code="empty-chat",
            )
        parts = [_parts(turn.text, image_mark) for _, turn in turns]
        contents = [text for of in parts for _, text in of if text != image_mark]
        at = 0
        roles: list[_Role] = [
            role if image_mark is None else (role, tuple(text == image_mark for _, text in of))
            for (role, _), of in zip(turns, parts, strict=True)
        ]
        text, content_at = _locate(contents, partial(render, tuple(roles)))
        regions = list[Region]()
        for (_, turn), of in zip(turns, parts, strict=True):
            texts = [(start, text) for start, text in of if text != image_mark]
            spans = content_at[at : at + len(texts)]
            at += len(texts)
            regions += _moved_regions(turn, texts, spans)
        yield Prompt(text, tuple(regions), complete=True)


def _parts(text: str, image_mark: str | None) -> list[tuple[int, str]]:
    """The pieces of a turn, texts and marks of pictures, each with its start."""
    if image_mark is None:
        return [(0, text)]
    pieces = re.split(f"({re.escape(image_mark)})", text)
    starts = accumulate(map(len, pieces), initial=0)
    return [(start, piece) for start, piece in zip(starts, pieces, strict=False) if piece]


def _moved_regions(
    turn: Prompt, texts: list[tuple[int, str]], spans: list[tuple[int, int, int]]
) -> Iterator[Region]:
    """The regions of a turn at the places of its texts; one without a text is gone."""
    for region in turn.regions:
        parts = []
        for (at, text), (start, end, skipped) in zip(texts, spans, strict=True):
            if (at, len(text)) == (0, len(turn.text)) or (
                region.start < at + len(text) and region.end > at
            ):
                first = min(max(start, start - skipped + region.start - at), end)
                parts.append((first, min(max(start, start - skipped + region.end - at), end)))
        if parts:
            yield Region(parts[0][0], parts[-1][1], region.name)


class _Rendering:
    """Renders chats with a template, and caches what `render_together` rendered."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        generation_prompt: bool,
        template_options: dict[str, Any],
    ):
        self.tokenizer = tokenizer
        self.options = {"add_generation_prompt": generation_prompt} | template_options
        self.cache: dict[tuple[tuple[_Role, ...], tuple[str, ...]], str] = {}
        """Rendered text by roles and contents."""
        if not (template_options.get("chat_template") or getattr(tokenizer, "chat_template", None)):
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise InputError(
                f"tokenizer {name!r} has no chat template; use the prompt as it is, or set "
                "tokenizer.chat_template",
                code="no-chat-template",
                tokenizer=name,
            )

    def __call__(self, roles: tuple[_Role, ...], contents: list[str]) -> str:
        """Render one chat."""
        key = roles, tuple(contents)
        if key in self.cache:
            return self.cache[key]
        try:
            return self._texts([key])[0]
        except InputError:
            raise
        except Exception as error:  # a template may raise any error
            names = tuple(role if isinstance(role, str) else role[0] for role in roles)
            raise InputError(
                f"the chat template refuses turns of {', '.join(names)}: {error}",
                code="chat-template-error",
                roles=names,
            ) from error

    def render_together(self, chats: Sequence[Sequence[Turn]]) -> None:
        """Render chats with and without marks in one call, which saves most of the overhead.

        If a chat fails, the cache stays empty, and each chat is rendered by itself later.
        """
        keys = []
        for turns in chats:
            roles, contents = tuple(role for role, _ in turns), [turn.text for _, turn in turns]
            with suppress(InputError):  # no unused character: raised again for the chat itself
                marked, _ = _marked(contents, trimmed=False)
                keys += [(roles, tuple(contents)), (roles, tuple(marked))]
        try:
            self.cache = dict(zip(keys, self._texts(keys), strict=True))
        except InputError:  # the template itself
            raise
        except Exception:
            self.cache = {}

    def _texts(self, keys: Sequence[tuple[tuple[_Role, ...], tuple[str, ...]]]) -> list[str]:
        chats = [_messages(*key) for key in keys]
        options = self.options
        check_ends(
            self.tokenizer.get_chat_template(options.get("chat_template"), options.get("tools")),
            chats[0],
            self.tokenizer.special_tokens_map | options,
        )
        texts: list[str] = self.tokenizer.apply_chat_template(chats, tokenize=False, **options)
        return texts


def _messages(roles: tuple[_Role, ...], contents: Sequence[str]) -> list[dict[str, Any]]:
    """The turns as a chat template gets them."""
    texts, messages = iter(contents), list[dict[str, Any]]()
    for role in roles:
        if isinstance(role, str):
            messages.append({"role": role, "content": next(texts)})
            continue
        name, pictures = role
        parts = [
            {"type": "image"} if picture else {"type": "text", "text": next(texts)}
            for picture in pictures
        ]
        messages.append({"role": name, "content": parts})
    return messages


def as_question(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    system: str | None = None,
    chat: bool = False,
) -> Prompt:
    """A text as the user's question; `chat` or a system prompt puts it into the chat template."""
    before = [] if system is None else [("system", system)]
    prompt = join([*before, ("question", text)])
    return apply_chat_template(prompt, tokenizer) if chat or before else prompt


def turns_of(prompt: Prompt) -> list[Turn]:
    """The turns of a prompt: role and text of each."""
    return [(role, prompt.cut(start, end)) for role, start, end in turn_spans(prompt)]


def turn_spans(prompt: Prompt) -> list[tuple[str, int, int]]:
    """Role, start and end of the turns of a prompt, by its regions.

    The regions `system`, `assistant` and `turn:N:ROLE` are turns; other text belongs to the user.
    Text before the system prompt is part of it. Whitespace between two turns is dropped, because
    a template writes its own.
    """
    named = [(_role(r.name), r) for r in prompt.regions if r.end > r.start]
    roles = [(role, region) for role, region in named if role is not None]
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
    """The role of a region that is a turn; None for other regions."""
    if name in ("system", "assistant"):
        return name
    turn = re.fullmatch(r"turn:[0-9]+:(user|assistant)", name)
    return turn[1] if turn else None


def _locate(
    contents: list[str], render: Callable[[list[str]], str]
) -> tuple[str, list[tuple[int, int, int]]]:
    """Render, and locate each content: start, end, and number of characters trimmed before it."""
    first = _unused_mark(contents)
    plain = render(contents)
    if not contents:  # pictures alone
        return plain, []
    for trimmed in (False, True):
        marked, skips = _marked(contents, trimmed=trimmed)
        text, at = _remove_marks(render(marked), first, 2 * len(contents))
        if text == plain and len(at) == 2 * len(contents):
            return plain, [(at[2 * n], at[2 * n + 1], skip) for n, skip in enumerate(skips)]
    raise InputError(
        "the chat template leaves out, repeats or changes the text of a turn, so attnscope cannot "
        "locate the regions in its output; render the text yourself and mark its regions",
        code="chat-template-changes-text",
    )


def _marked(contents: list[str], *, trimmed: bool) -> tuple[list[str], list[int]]:
    """Each content between two marks, and the number of characters before the first mark."""
    first = _unused_mark(contents)
    marked, skips = [], []
    for n, content in enumerate(contents):
        core = content.strip() if trimmed else content
        # A template trims only whitespace at the ends, so it must stay outside the marks.
        before = content[: len(content) - len(content.lstrip())] if trimmed and core else ""
        after = content[len(content.rstrip()) :] if trimmed and core else ""
        opening, closing = chr(first + 2 * n), chr(first + 2 * n + 1)
        marked.append(f"{before}{opening}{core}{closing}{after}")
        skips.append(len(before))
    return marked, skips


def _unused_mark(contents: list[str]) -> int:
    count = 2 * len(contents)
    wide = [content for content in contents if not content.isascii()]
    highest = max((ord(max(content)) for content in wide), default=0)
    first = max(_FIRST_MARK, highest + 1)
    if first + count > 0x10FFFE:
        raise InputError(
            "the prompt contains the last private-use characters of Unicode, which attnscope needs "
            "as marks; remove them",
            code="no-unused-character",
        )
    return first


def _remove_marks(text: str, first: int, count: int) -> tuple[str, dict[int, int]]:
    """The text without marks, and the position of each mark that occurs exactly once."""
    any_mark = re.compile(f"[{chr(first)}-{chr(first + count - 1)}]")
    places: dict[int, list[int]] = {}
    for before, match in enumerate(any_mark.finditer(text)):
        places.setdefault(ord(match[0]) - first, []).append(match.start() - before)
    once = {mark: at[0] for mark, at in places.items() if len(at) == 1}
    return any_mark.sub("", text), once
