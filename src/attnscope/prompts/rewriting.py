"""A prompt that says something else in places: other words, another system prompt, another chat
template or none.

What both prompts say is followed from one to the other, through their templates, by invisible
regions. Tokens are aligned where these positions and their ids agree; a token that is new, removed
or split differently has no aligned position.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown
from attnscope.tokens.chat import turn_spans
from attnscope.tokens.modalities import IMAGE_MARK
from attnscope.tokens.regions import Prompt, Region

_TRACE = "\0"
"""Begins the names of regions that only follow characters."""


@dataclass(frozen=True)
class Edit:
    """Characters `start` to `end` become `new`."""

    start: int
    end: int
    new: str


def replace_text(prompt: Prompt, old: str, new: str) -> list[Edit]:
    """Every place where the prompt says `old` says `new`."""
    edits, at = [], prompt.text.find(old)
    while at >= 0:
        edits.append(Edit(at, at + len(old), new))
        at = prompt.text.find(old, at + len(old))
    if not edits:
        raise InputError(
            f"the text to replace, {old!r:.80}, is not in the prompt",
            code="text-not-found",
            value=old,
        )
    return edits


def replace_region(prompt: Prompt, name: str, new: str) -> list[Edit]:
    """A region says something else."""
    if name not in prompt.names:
        raise unknown("region", name, prompt.names or ["(the prompt has none)"])
    return [Edit(region.start, region.end, new) for region in prompt.spans(name)]


def change_system(prompt: Prompt, new: str | None) -> list[Edit]:
    """Another system prompt, or (None) without it and the blank space behind it."""
    if "system" not in prompt.names:
        if new is None:
            raise InputError("the prompt has no system prompt to remove", code="no-system-prompt")
        return [Edit(0, 0, f"{new}\n\n")]
    region = prompt.spans("system")[0]
    if new is not None:
        return [Edit(region.start, region.end, new)]
    behind = prompt.text[region.end :]
    return [Edit(region.start, region.end + len(behind) - len(behind.lstrip()), "")]


def edited(prompt: Prompt, edits: Sequence[Edit]) -> Prompt:
    """The prompt after the edits. A region whose text is replaced has the new one; a region that
    is left without a character is gone."""
    edits = sorted(edits, key=lambda edit: edit.start)
    for one, other in pairwise(edits):
        if other.start < one.end:
            raise InputError(
                f"two changes overlap at character {other.start}; keep one of them",
                code="overlapping-changes",
                character=other.start,
            )
    text, regions = prompt.text, list(prompt.regions)
    for edit in reversed(edits):  # from the end, so that places before it stay
        text = text[: edit.start] + edit.new + text[edit.end :]
        regions = [moved for r in regions if (moved := _moved(r, edit)) is not None]
        if edit.start == edit.end == 0 and "system" not in prompt.names:
            regions.append(Region(0, len(edit.new.rstrip()), "system"))
    return replace(prompt, text=text, regions=tuple(regions))


def _moved(region: Region, edit: Edit) -> Region | None:
    by, end = len(edit.new) - (edit.end - edit.start), edit.start + len(edit.new)

    def moved(at: int, *, opening: bool) -> int:
        if edit.start < at < edit.end:
            return edit.start if opening else end
        beyond = at >= edit.end and (at > edit.start or (opening and edit.start == edit.end))
        return at + by if beyond else at

    first, last = moved(region.start, opening=True), moved(region.end, opening=False)
    return Region(first, last, region.name) if first < last else None


def rendered_with_places(
    base: Prompt,
    edits: Sequence[Edit],
    as_base: Callable[[Prompt], Prompt],
    as_variant: Callable[[Prompt], Prompt],
    *,
    same_markup: bool,
) -> tuple[Prompt, NDArray[np.int64]]:
    """The rendered variant, and where it has each character of the rendered base; -1 for nowhere.

    `as_base` and `as_variant` render a prompt. With `same_markup` what a template wrote around the
    turns is the same text at the beginning and end as far as it is.
    """
    one, two = (
        as_base(_traced(_kept(base, edits))),
        as_variant(_traced(edited(_kept(base, edits), edits))),
    )
    places = np.full(len(one.text), -1, dtype=np.int64)
    for name in one.names:
        if not name.startswith(f"{_TRACE}kept") or name not in two.names:
            continue
        (here,), (target,) = one.spans(name)[:1], two.spans(name)[:1]
        if one.text[here.start : here.end] == two.text[target.start : target.end]:
            places[here.start : here.end] = np.arange(target.start, target.end)
    if same_markup:
        _follow_markup(one, two, places)
    visible = tuple(r for r in two.regions if not r.name.startswith(_TRACE))
    return replace(two, regions=visible), places


def _kept(base: Prompt, edits: Sequence[Edit]) -> Prompt:
    """The base with a region for every piece of a turn that no edit touches."""
    marks = {at for one in re.finditer(IMAGE_MARK, base.text) for at in one.span()}
    edges = {at for edit in edits for at in (edit.start, edit.end)}
    cuts = sorted({0, len(base.text), *edges, *marks})
    gone = [(edit.start, edit.end) for edit in edits]
    pieces = [
        (max(start, one), min(end, two))
        for _, start, end in turn_spans(base)
        for one, two in pairwise(cuts)
        if not any(first <= one and two <= last for first, last in gone)
    ]
    kept = [Region(a, b, f"{_TRACE}kept{n}") for n, (a, b) in enumerate(pieces) if a < b]
    return replace(base, regions=(*base.regions, *kept))


def _traced(prompt: Prompt) -> Prompt:
    """The prompt with a region around everything that a turn says."""
    turns = [Region(a, b, f"{_TRACE}turn{n}") for n, (_, a, b) in enumerate(turn_spans(prompt))]
    return replace(prompt, regions=(*prompt.regions, *turns))


def _follow_markup(one: Prompt, two: Prompt, places: NDArray[np.int64]) -> None:
    """What stands around the turns, from both ends as far as the texts agree."""
    length, other = len(one.text), len(two.text)
    before = _common(one.text, two.text)
    behind = min(_common(one.text[::-1], two.text[::-1]), length - before, other - before)
    outside, target = _outside_turns(one), _outside_turns(two)
    for first, count, shift in ((0, before, 0), (length - behind, behind, other - length)):
        here = np.arange(first, first + count)
        here = here[outside[here] & target[here + shift] & (places[here] < 0)]
        places[here] = here + shift


def _common(one: str, two: str) -> int:
    """How many characters two texts begin with alike."""
    shorter = min(len(one), len(two))
    return next((n for n in range(shorter) if one[n] != two[n]), shorter)


def _outside_turns(prompt: Prompt) -> NDArray[np.bool_]:
    outside = np.ones(len(prompt.text), dtype=bool)
    for region in prompt.regions:
        if region.name.startswith(_TRACE):  # turns, and pictures that a template writes before
            outside[region.start : region.end] = False
    return outside
