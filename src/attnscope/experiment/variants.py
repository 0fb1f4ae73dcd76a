"""A prompt's tokens under each condition, aligned with the tokens of the base."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeWarning, InputError
from attnscope.experiment.picture_writer import PictureWriter
from attnscope.measures.registry import MEASURES
from attnscope.prompts import Filler, insert
from attnscope.prompts.filler import filler_ids
from attnscope.prompts.insertion import Insertion, Pair, character_at, insertion
from attnscope.prompts.rewriting import (
    Edit,
    change_system,
    rendered_with_places,
    replace_region,
    replace_text,
)
from attnscope.spec.conditions import Condition
from attnscope.spec.experiment import Experiment
from attnscope.spec.prompt_sources import TokenPrompts
from attnscope.tokens import (
    Alignment,
    Prompt,
    TokenizedPrompt,
    align_by,
    apply_chat_template,
    apply_chat_template_to_all,
    prompt_from_ids,
    tokenize,
    tokenize_all,
    turns_of,
)
from attnscope.tokens.chat import Turn

T = TypeVar("T")
Variant = tuple[TokenizedPrompt, Alignment]
Row = dict[str, tuple[TokenizedPrompt, Alignment | None]]
"""A prompt's tokens under each condition, the base first."""


def tokenize_variants(
    experiment: Experiment,
    label: str,
    prompts: list[Prompt],
    tokenizer: Any,
    *,
    chat: bool,
    writer: PictureWriter | None = None,
) -> list[Row]:
    """Every prompt under every condition, as this tokenizer writes it; `chat` applies the chat
    template, `writer` writes out the tokens of pictures."""
    at, generate = _PromptCounter(), experiment.generate is not None
    render = partial(_rendered, tokenizer=tokenizer, chat=chat)
    try:
        if isinstance(experiment.prompts, TokenPrompts):
            of = experiment.prompts
            drawn = (_drawn(of, n % of.count, tokenizer) for n in range(len(prompts)))
            bases = list(at.each(drawn))
        elif writer is not None:
            bases = list(at.each(_with_pictures(prompts, experiment, render, writer)))
        else:
            first = _PromptCounter()  # rendering runs ahead of tokenisation
            rendered = first.each(
                _all_rendered(prompts, tokenizer, first, chat=chat, generate=generate)
            )
            bases = list(at.each(tokenize_all(rendered, tokenizer)))
        full_texts, bases = bases, [_truncate(base, experiment.truncate) for base in bases]
        rows: list[Row] = [{experiment.base: (base, None)} for base in bases]
        for name in experiment.variants:
            condition = experiment.conditions[name]
            if condition.insert is not None:
                changed = _inserted(full_texts, bases, condition, tokenizer, at)
            else:
                changed = (
                    _compared(
                        base,
                        *_changed(prompt, base, name, condition, n, render, tokenizer, writer),
                        experiment.truncate,
                    )
                    for n, (prompt, base) in enumerate(zip(prompts, bases, strict=True))
                )
            for row, variant in zip(rows, at.each(changed), strict=True):
                row[name] = variant
        if writer is not None:
            for n, row in at.each(enumerate(rows)):
                writer.check(n, row)
    except InputError as error:
        hint = ""
        if chat and not getattr(tokenizer, "chat_template", None):
            hint = ". In an experiment: chat: false (--no-chat)"
        if experiment.truncate is not None:
            hint += f". Every text is truncated to {experiment.truncate} tokens ('truncate')"
        number = getattr(error, "prompt", at.number)
        message = f"model {label!r}, prompt {number}: {error}{hint}"
        values = {**error.values, "model": label, "prompt": number}
        raise InputError(message, code=error.code, **values) from error
    _warn_unaligned(experiment, label, rows)
    return rows


class _PromptCounter:
    """The prompt at hand, for errors."""

    number = 0

    def each(self, things: Iterable[T]) -> Iterator[T]:
        """One for each prompt, in order."""
        waiting = iter(things)
        for self.number in count():
            try:
                thing = next(waiting)
            except StopIteration:
                self.number = 0  # reset for the next pass
                return
            except InputError as error:  # where it is the next that fails, and not its use
                error.__dict__.setdefault("prompt", self.number)
                raise
            yield thing


def _all_rendered(
    prompts: list[Prompt], tokenizer: Any, at: _PromptCounter, *, chat: bool, generate: bool
) -> Iterator[Prompt]:
    """The prompts as the model is to read them. Those that end alike go through the template many
    at a time, which is most of the work of a plan."""
    if not chat and not generate:
        yield from prompts
        return
    chats = [turns_of(prompt) for prompt in at.each(prompts)]
    done = 0
    for ends, some in groupby(chats, _ends_with_assistant):
        chats_of_group = list(some)
        if ends and generate:
            raise _ends_with_an_answer()
        if chat:
            # What ends with the assistant is read as it stands: nothing is to be added to it.
            yield from apply_chat_template_to_all(
                chats_of_group, tokenizer, generation_prompt=not ends
            )
        else:
            yield from prompts[done : done + len(chats_of_group)]
        done += len(chats_of_group)


def _with_pictures(
    prompts: list[Prompt],
    experiment: Experiment,
    render: Callable[..., Prompt],
    writer: PictureWriter,
) -> Iterator[TokenizedPrompt]:
    """The prompts of the base with the tokens of their pictures, one by one."""
    for number, prompt in enumerate(prompts):
        if experiment.generate is not None and _ends_with_assistant(turns_of(prompt)):
            raise _ends_with_an_answer()
        rendered = render(prompt, writer=writer, number=number, condition=experiment.base)
        yield writer.tokenized(rendered, number, experiment.base)


def _ends_with_an_answer() -> InputError:
    return InputError(
        "the conversation ends with the assistant's turn, so the model has nothing to complete; "
        "end it with a user turn, or leave out 'generate'",
        code="ends-with-assistant",
    )


def _rendered(
    prompt: Prompt,
    *,
    tokenizer: Any,
    chat: bool,
    template: str | None = None,
    writer: PictureWriter | None = None,
    number: int = 0,
    condition: str = "",
) -> Prompt:
    """The prompt as the model is to read it."""
    if not chat:
        return prompt if writer is None else writer.plain(prompt, number, condition)
    turns = turns_of(prompt)
    asking = not _ends_with_assistant(turns)
    other = {} if template is None else {"chat_template": template}
    if writer is not None:
        return writer.chat(turns, asking, number, condition, other)
    return apply_chat_template(turns, tokenizer, generation_prompt=asking, **other)


def _ends_with_assistant(turns: list[Turn]) -> bool:
    return [role for role, _ in turns][-1:] == ["assistant"]


def _inserted(
    full_texts: list[TokenizedPrompt],
    bases: list[TokenizedPrompt],
    condition: Condition,
    tokenizer: Any,
    at: _PromptCounter,
) -> Iterator[Variant]:
    """Every base, cut already where the experiment cuts, with its filler; by text they are
    tokenised many at a time, which is most of the work of a plan."""
    assert condition.insert is not None
    fillers = [condition.insert.filler(n) for n in range(len(bases))]
    for base in at.each(bases):
        if not base.offsets[:, 1].any():
            raise InputError(
                "'truncate' leaves no text to insert a filler into; keep more tokens",
                code="nothing-to-insert-into",
                tokens=len(base),
            )
    if condition.by == "ids":
        for base, filler in zip(bases, fillers, strict=True):
            pair = insert(base, filler, tokenizer, position=condition.position, by="ids")
            yield pair.variant, pair.alignment
        return
    put = [
        insertion(
            full.prompt,
            filler,
            tokenizer,
            position=character_at(base.prompt, condition.position, seed=filler.seed),
        )
        for full, base, filler in at.each(zip(full_texts, bases, fillers, strict=True))
    ]
    variants = tokenize_all([one.prompt for one in put], tokenizer)
    for full, base, one, variant in zip(full_texts, bases, put, variants, strict=True):
        yield _truncate_variant(full, base, one.pair(full, variant), one)


def _truncate_variant(
    full: TokenizedPrompt, base: TokenizedPrompt, pair: Pair, put: Insertion
) -> Variant:
    """The whole text's variant, cut where the base is cut: the text is tokenised as a whole, so
    that the tokens in front of the cut are those of the base."""
    off = len(full) - len(base)
    if not off:
        return pair.variant, pair.alignment
    if np.isin(np.arange(len(base), len(full)), pair.alignment.base).all():
        kept = len(pair.variant) - off
    else:  # the filler stands at the cut, and changed the token behind it
        end = base.offsets[:, 1].max() + put.inserted.end - put.inserted.start
        kept = int(np.flatnonzero(pair.variant.offsets[:, 0] < end)[-1]) + 1
    variant = _truncate(pair.variant, kept)
    return variant, put.pair(base, variant).alignment


def _compared(
    base: TokenizedPrompt, tokens: TokenizedPrompt, places: NDArray[np.int64], most: int | None
) -> Variant:
    tokens = _truncate(tokens, most)
    return tokens, align_by(base, tokens, places)


def _changed(
    source: Prompt,
    base: TokenizedPrompt,
    name: str,
    condition: Condition,
    number: int,
    render: Callable[..., Prompt],
    tokenizer: Any,
    writer: PictureWriter | None,
) -> tuple[TokenizedPrompt, NDArray[np.int64]]:
    """The prompt under a condition that changes what is there, and where it has the base's
    characters."""
    tokens, places = base, np.arange(len(base.prompt.text))
    if set(condition.rewrites) - {"bos", "random"}:
        edits = _edits(source, condition)
        others: dict[str, Any] = {}
        if condition.chat is not None:
            others["chat"] = condition.chat
        if condition.template is not None:
            others |= {"chat": True, "template": condition.template}
        as_base, changed = render, partial(render, **others)
        if writer is not None:
            as_base = partial(render, writer=writer, number=number, condition="")
            changed = partial(changed, writer=writer, number=number, condition=name)
        variant, places = rendered_with_places(
            source, edits, as_base, changed, same_markup=not others
        )
        if writer is None:
            tokens = tokenize(variant, tokenizer)
        else:
            tokens = writer.tokenized(variant, number, name)
    if condition.bos is False:
        tokens = _without_bos(tokens, tokenizer)
    if condition.random is not None:
        tokens = _at_random(tokens, condition.random + number, tokenizer)
        places = np.full_like(places, -1)
    return tokens, places


def _edits(source: Prompt, condition: Condition) -> list[Edit]:
    edits: list[Edit] = []
    if condition.replace is not None and condition.replace.region is not None:
        edits += replace_region(source, condition.replace.region, condition.replace.new)
    elif condition.replace is not None:
        edits += replace_text(source, condition.replace.old or "", condition.replace.new)
    if condition.system is not None:
        edits += change_system(source, condition.system or None)
    return edits


def _without_bos(tokens: TokenizedPrompt, tokenizer: Any) -> TokenizedPrompt:
    begin = tokenizer.bos_token_id
    if begin is None or len(tokens) < 2 or tokens.ids[0] != begin:
        raise InputError(
            f"bos: false has no token to remove: the text starts with "
            f"{tokenizer.convert_ids_to_tokens(int(tokens.ids[0]))!r}, not with "
            f"{tokenizer.bos_token!r}; 'bos: true' of the experiment adds it to the base",
            code="no-bos-token",
            first=int(tokens.ids[0]),
        )
    return TokenizedPrompt(tokens.prompt, tokens.ids[1:], tokens.offsets[1:])


def _at_random(tokens: TokenizedPrompt, seed: int, tokenizer: Any) -> TokenizedPrompt:
    """As many tokens, drawn at random; a begin-of-sequence token stays."""
    first = [int(tokens.ids[0])] if tokens.ids[0] == tokenizer.bos_token_id else []
    filler = Filler(kind="random-tokens", count=len(tokens) - len(first), seed=seed)
    return prompt_from_ids(filler_ids(filler, tokenizer), tokenizer, first=first)


def _drawn(prompts: TokenPrompts, number: int, tokenizer: Any) -> TokenizedPrompt:
    """Different random tokens, repeated, after the tokenizer's begin-of-sequence token."""
    filler = Filler(kind="random-tokens", count=4 * prompts.length, seed=prompts.seed + number)
    first_id = tokenizer("a")["input_ids"][:1]
    first = first_id if first_id == [tokenizer.bos_token_id] else []
    repeats = {f"repeat:{n + 1}": prompts.length for n in range(prompts.repeats)}
    different = list(dict.fromkeys(filler_ids(filler, tokenizer)))[: prompts.length]
    if len(different) < prompts.length:
        raise InputError(
            f"prompts.length is {prompts.length}, and the vocabulary has only {len(different)} "
            "different tokens to draw; give a smaller length",
            code="vocabulary-too-small",
            tokens=len(different),
            needed=prompts.length,
        )
    ids = different * prompts.repeats
    return prompt_from_ids(ids, tokenizer, first=first, regions=repeats)


def _truncate(tokens: TokenizedPrompt, most: int | None) -> TokenizedPrompt:
    """The first `most` tokens, with the text and the regions that they have."""
    if most is None or len(tokens) <= most:
        return tokens
    ids, offsets = tokens.ids[:most], tokens.offsets[:most]
    end = int(offsets[:, 1].max())
    return TokenizedPrompt(tokens.prompt.cut(0, end) if end else tokens.prompt, ids, offsets)


def _warn_unaligned(experiment: Experiment, label: str, rows: list[Row]) -> None:
    """Warn about conditions without aligned tokens: measures that compare tokens are null there."""
    if not any(MEASURES[measure].compares_to_base for measure in experiment.measures):
        return
    for name in experiment.variants:
        alone = [n for n, row in enumerate(rows) if (pair := row[name][1]) and not len(pair.base)]
        if alone:
            warnings.warn(
                f"model {label!r}, condition {name!r}: in {len(alone)} of {len(rows)} prompts no "
                "token is the same as in the base; measures that compare tokens are null there",
                AttnscopeWarning,
                stacklevel=2,
            )
