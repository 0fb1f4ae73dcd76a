"""Where a filler goes, and the pair of prompts that comes of it.

Positions: `before-system`, `between` (system prompt and question: right before the question),
`end` (right after the question), `random` (after a word of the prompt, seeded), `before:REGION`,
`after:REGION`, or the number of a character. Regions survive chat templates, so insert into the
rendered prompt and the filler lands inside the right turn.

By text, a separator keeps the filler from running into a neighbouring word; it is part of what
was inserted, but not of the region `filler`. By ids, exactly the filler's tokens go between two
tokens of the base, so that nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal

import numpy as np
import regex

from attnscope.errors import InputError, unknown
from attnscope.prompts.filler import Filler, filler_ids, filler_text
from attnscope.tokens.align import Alignment, align
from attnscope.tokens.regions import Prompt, Region
from attnscope.tokens.tokenized import TokenizedPrompt, tokenize
from attnscope.tokens.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POSITIONS = ("before-system", "between", "end", "random")
_AT_REGION = {
    "before-system": ("before", "system"),
    "between": ("before", "question"),
    "end": ("after", "question"),
}


@dataclass(frozen=True, eq=False)
class Pair:
    """A base prompt, its variant with a filler, and the aligned tokens of both."""

    base: TokenizedPrompt
    variant: TokenizedPrompt
    """Has the region `filler`."""
    alignment: Alignment


def insert(
    base: Prompt | TokenizedPrompt,
    filler: Filler,
    tokenizer: PreTrainedTokenizerBase,
    *,
    position: str | int = "between",
    by: Literal["text", "ids"] = "text",
    separator: str = "\n",
) -> Pair:
    """Insert a filler and align the two prompts.

    `separator` (by text only) goes on the sides where the filler would touch something that is
    not blank. A base that is tokenised already is not tokenised again.
    """
    if by not in ("text", "ids"):
        raise unknown("way to insert", by, ("text", "ids"))
    if isinstance(base, Prompt):
        base = tokenize(base, tokenizer)
    if by == "text":
        put = insertion(base.prompt, filler, tokenizer, position=position, separator=separator)
        return put.pair(base, tokenize(put.prompt, tokenizer))
    at = character_at(base.prompt, position, seed=filler.seed)
    return _insert_ids(base, filler_ids(filler, tokenizer), tokenizer, at)


def character_at(prompt: Prompt, position: str | int, *, seed: int = 0) -> int:
    """The character a position means in this prompt."""
    if isinstance(position, int):
        if not 0 <= position <= len(prompt.text):
            raise InputError(
                f"there is no character {position} to insert at: "
                f"the prompt has positions 0 to {len(prompt.text)}",
                code="position-outside-prompt",
                position=position,
                characters=len(prompt.text),
            )
        return position
    if position == "random":
        return _random_position(prompt, seed)
    side, _, name = position.partition(":")
    if position in _AT_REGION:
        side, name = _AT_REGION[position]
    if side not in ("before", "after") or not name:
        raise unknown("position", position, [*POSITIONS, "before:REGION", "after:REGION"])
    if name not in prompt.names:
        has = ", ".join(prompt.names) or "none"
        raise InputError(
            f"cannot insert at {position!r}: the prompt has no region {name!r} (it has: {has})",
            code="unknown-region",
            value=name,
            known=list(prompt.names),
        )
    spans = prompt.spans(name)
    return spans[0].start if side == "before" else spans[-1].end


def _random_position(prompt: Prompt, seed: int) -> int:
    """After some word of what the prompt says: never inside a word, never in template markup."""
    regions = [
        r for name in ("system", "question") if name in prompt.names for r in prompt.spans(name)
    ]
    spans = regions or [Region(0, len(prompt.text), "text")]
    ends = sorted(
        {
            region.start + word.end()
            for region in spans
            for word in regex.finditer(r"\S+", prompt.text[region.start : region.end])
        }
    )
    if not ends:
        raise InputError("the prompt has no word to insert a filler after", code="no-word")
    return Random(f"place:{seed}").choice(ends)


@dataclass(frozen=True)
class Insertion:
    """A prompt with a filler in its text."""

    prompt: Prompt
    inserted: Region
    """The filler with what sets it off."""
    filler: Region

    def pair(self, base: TokenizedPrompt, variant: TokenizedPrompt) -> Pair:
        """Beside the prompt that it was put into, both tokenised."""
        return Pair(base, variant, align(base, variant, self.inserted, self.filler))


def insertion(
    base: Prompt,
    filler: Filler,
    tokenizer: PreTrainedTokenizerBase,
    *,
    position: str | int = "between",
    separator: str = "\n",
) -> Insertion:
    """Insert a filler by text and tokenise nothing: for many at once, later."""
    at, content = character_at(base, position, seed=filler.seed), filler_text(filler, tokenizer)
    text = base.text
    before = separator if content and at > 0 and not text[at - 1].isspace() else ""
    after = separator if content and at < len(text) and not text[at].isspace() else ""
    region = Region(at + len(before), at + len(before) + len(content), "filler")
    return Insertion(
        base.inserted(at, f"{before}{content}{after}", region),
        Region(at, region.end + len(after), "inserted"),
        region,
    )


def _insert_ids(
    base: TokenizedPrompt, filler: list[int], tokenizer: PreTrainedTokenizerBase, at: int
) -> Pair:
    index = _boundary(base, at)
    written = base.offsets[:index, 1]
    at = int(written.max()) if written.size else 0
    # A special token has no text, so its name stands for it.
    known = read_vocabulary(tokenizer).texts
    names = tokenizer.convert_ids_to_tokens(filler)
    texts = [known[id] or name for id, name in zip(filler, names, strict=True)]
    region = Region(at, at + sum(map(len, texts)), "filler")
    ends = at + np.cumsum([0, *map(len, texts)], dtype=np.int64)
    moved = base.offsets[index:] + (region.end - region.start)
    variant = TokenizedPrompt(
        base.prompt.inserted(at, "".join(texts), region),
        np.concatenate([base.ids[:index], np.array(filler, dtype=np.int64), base.ids[index:]]),
        np.concatenate([base.offsets[:index], np.stack([ends[:-1], ends[1:]], axis=1), moved]),
    )
    return Pair(base, variant, align(base, variant, region, region))


def _boundary(base: TokenizedPrompt, at: int) -> int:
    """The token in front of which the filler goes.

    A token across the place is not divided: blank space in front of a word goes with the word,
    anything else stays in front of the filler.
    """
    start, end = base.offsets[:, 0], base.offsets[:, 1]
    behind = np.flatnonzero((end > at) & (start < end))
    if not behind.size:
        in_text = np.flatnonzero(start < end)
        return int(in_text[-1]) + 1 if in_text.size else len(base)
    first = int(behind[0])
    if not base.prompt.text[start[first] : at].strip():
        return first
    later = np.flatnonzero((start >= at) & (start < end))
    return int(later[0]) if later.size else int(behind[-1]) + 1
