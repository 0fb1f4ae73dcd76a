"""A prompt: text with named spans.

A region is a span of characters with a name. Regions may nest (`target` inside `maps`), touch,
overlap, and share a name (two `assistant` turns). `tokenized.py` maps them to tokens, and
`chat.py` moves them through a chat template.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from attnscope.errors import InputError, unknown


@dataclass(frozen=True, order=True)
class Region:
    """Characters `start` to `end` (exclusive) of a prompt, under a name."""

    start: int
    end: int
    name: str

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError(
                "a region needs a name, such as 'system' or 'question'", code="missing-name"
            )
        if not 0 <= self.start <= self.end:
            raise InputError(
                f"region {self.name!r} from {self.start} to {self.end}: "
                "the start must be at least 0, and the end must not be before the start",
                code="bad-region",
                region=self.name,
                start=self.start,
                end=self.end,
            )

    def moved(self, by: int) -> Region:
        """The same span, `by` characters later."""
        return Region(self.start + by, self.end + by, self.name)


@dataclass(frozen=True)
class Prompt:
    """Text with named regions; the input of every measurement."""

    text: str
    regions: tuple[Region, ...] = ()
    """In order of their start; an outer region before the ones inside it."""
    complete: bool = False
    """The text already contains its special tokens, because a chat template wrote them; a tokenizer
    must not add a second begin-of-sequence token."""

    def __post_init__(self) -> None:
        if not self.text:
            raise InputError(
                "the prompt is empty: give it at least one character of text", code="empty-prompt"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the prompt contains a lone surrogate (half of a character) at {error.start}; "
                "remove it",
                code="lone-surrogate",
                position=error.start,
            ) from error
        for region in self.regions:
            if region.end > len(self.text):
                raise InputError(
                    f"region {region.name!r} ends at character {region.end}, "
                    f"but the prompt has {len(self.text)} characters",
                    code="region-outside-prompt",
                    region=region.name,
                    end=region.end,
                    length=len(self.text),
                )
        ordered = sorted(self.regions, key=lambda r: (r.start, -r.end))
        object.__setattr__(self, "regions", tuple(ordered))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the regions, each once, in order of their start."""
        return tuple(dict.fromkeys(region.name for region in self.regions))

    def spans(self, name: str) -> tuple[Region, ...]:
        """Every region called `name`; if there is none, an error that lists the names."""
        spans = tuple(region for region in self.regions if region.name == name)
        if not spans:
            raise unknown("region", name, self.names or ["(this prompt has no regions)"])
        return spans

    def read(self, name: str) -> str:
        """The text of the first region called `name`."""
        region = self.spans(name)[0]
        return self.text[region.start : region.end]

    def cut(self, start: int, end: int) -> Prompt:
        """Characters `start` to `end` as a new prompt, with its regions clipped to them."""
        clipped = [
            Region(max(r.start, start) - start, min(r.end, end) - start, r.name)
            for r in self.regions
            if r.start < end and r.end > start
        ]
        return Prompt(self.text[start:end], tuple(clipped), self.complete)

    def inserted(self, at: int, text: str, region: Region | None = None) -> Prompt:
        """The prompt with `text` inserted at character `at`.

        Regions that end at or before `at` stay, those that start at or after it move, and those
        around it grow. `region`, in the coordinates of the new text, names the insertion.
        """
        if not 0 <= at <= len(self.text):
            raise InputError(
                f"cannot insert at character {at}: the position must be from 0 to {len(self.text)}",
                code="position-outside-prompt",
                position=at,
                length=len(self.text),
            )
        moved = []
        for r in self.regions:
            if r.start >= at:
                moved.append(r.moved(len(text)))
            else:
                moved.append(replace(r, end=r.end + len(text)) if r.end > at else r)
        if region is not None:
            moved.append(region)
        return replace(self, text=self.text[:at] + text + self.text[at:], regions=tuple(moved))


def join(parts: Iterable[tuple[str | None, str | Prompt]]) -> Prompt:
    """Build a prompt from `(region name or None, text)` pairs, one after the other.

    A part may be a prompt: its regions are kept, inside the region of this name.
    """
    text = ""
    regions: list[Region] = []
    for name, part in parts:
        inner = part if isinstance(part, Prompt) else None
        added = inner.text if inner else str(part)
        if name is not None:
            regions.append(Region(len(text), len(text) + len(added), name))
        if inner:
            regions += [region.moved(len(text)) for region in inner.regions]
        text += added
    return Prompt(text, tuple(regions))
