"""Step 1 of a batch: the cells of one condition as a rectangle of tokens, and what its tokens are.

Padded on the right, so that a token's column is its position. Generated tokens that were fed back
belong to the text, in the region `generated`. The last token of a completion is never fed back, so
it is neither a query nor a key. Shapes: B prompts, K tokens of the longest, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnscope.experiment.cells import Cell, Completion
from attnscope.experiment.plan import ModelPlan
from attnscope.measures.layer import Completions, Target
from attnscope.spec.experiment import Experiment
from attnscope.spec.generate import GENERATED
from attnscope.spec.queries import parse_queries
from attnscope.tokens import Region, TokenizedPrompt, pad, prompt_from_ids
from attnscope.tokens.sentences import sentences_of_tokens
from attnscope.tokens.tokenized import Mask, PaddedBatch
from attnscope.vision.model_inputs import picture_inputs

_NOTHING = np.zeros((0, 2), dtype=np.int64)


class ConditionBatch:
    """The cells of one condition as a rectangle, and what its tokens are."""

    def __init__(self, experiment: Experiment, plan: ModelPlan, cells: tuple[Cell, ...]):
        self.experiment = experiment
        self.plan = plan
        self.cells = cells
        self.padded = pad([cell.tokens for cell in cells], plan.tokenizer, side="right")
        self.real = self.padded.real

    def with_completions(self, completions: Sequence[Sequence[int]]) -> ConditionBatch:
        """The same prompts, each with the tokens that were generated after it."""
        tokenizer = self.plan.tokenizer
        cells = []
        for cell, new in zip(self.cells, completions, strict=True):
            longer = _extended(cell.tokens, "", _NOTHING[:, 0], _NOTHING)
            if len(new) > 1:
                fed = prompt_from_ids(new[:-1], tokenizer)
                longer = _extended(cell.tokens, fed.prompt.text, fed.ids, fed.offsets)
            text = tokenizer.decode(new, skip_special_tokens=True)
            cells.append(replace(cell, tokens=longer, completion=Completion(tuple(new), text)))
        return ConditionBatch(self.experiment, self.plan, tuple(cells))

    def with_longest_completions(self) -> ConditionBatch:
        """The same prompts with the longest possible completions, to select queries by position
        before their tokens exist."""
        assert self.experiment.generate is not None
        length = self.experiment.generate.max_new_tokens - 1
        positions = np.arange(length, dtype=np.int64)
        offsets = np.stack([positions, positions + 1], axis=1)
        cells = [
            replace(c, tokens=_extended(c.tokens, "?" * length, 0 * positions, offsets))
            for c in self.cells
        ]
        return ConditionBatch(self.experiment, self.plan, tuple(cells))

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[B, K] the ids of the tokens, -1 for padding."""
        return np.where(self.real, self.padded.input_ids, -1)

    @cached_property
    def completions(self) -> Completions:
        """The completions of the cells; a cell without one has the start -1."""
        after = np.pad(self.tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        start = np.full(len(self.cells), -1)
        for row, cell in enumerate(self.cells):
            if cell.completion is not None:
                after[row, len(cell.tokens) - 1] = cell.completion.ids[-1]  # not a key
                start[row] = len(cell.tokens) - len(cell.completion.ids) + 1
        return Completions(start=start, next_token=after, max_new_tokens=self.max_new_tokens)

    def shares(self, keys: str, label: str) -> NDArray[np.float64]:
        """[B, K, C] the share of each token in each class of a set, 0 where it is not among the
        keys; nan where a prompt has no such keys."""
        mask = self.keys(keys)
        inside = np.where(_any(mask)[:, None], mask, np.nan)
        classes, ids = self.experiment.classes[label], self.padded.input_ids
        table = classes.weights(ids, self.plan.tokenizer, self.real)
        shares: NDArray[np.float64] = (table * inside[..., None]).astype(np.float64)
        return shares

    def groups(self) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
        """Queries that are of the same class in every class set: [B, K] the group of each token,
        -1 for none, and for each set [groups, C] which class a group is of."""
        sets = self.experiment.classes
        ids = [
            classes.ids(self.padded.input_ids, self.plan.tokenizer, self.real)
            for classes in sets.values()
        ]
        has_class = (np.stack(ids) >= 0).any(axis=0)
        class_rows, which = np.unique(np.stack(ids)[:, has_class], axis=1, return_inverse=True)
        group = np.full(self.real.shape, -1, dtype=np.int64)
        group[has_class] = which.ravel()
        if not has_class.any():  # an empty group
            class_rows = np.full((len(ids), 1), -1)
        tables = {
            label: (kind[:, None] == np.arange(len(classes))).astype(np.float64)
            for (label, classes), kind in zip(sets.items(), class_rows, strict=True)
        }
        return group, tables

    def region(self, name: str) -> Mask:
        """[B, K] the tokens of a region; none where the prompt has no such region."""
        return self.padded.mask(name, some=True)

    def keys(self, name: str) -> Mask:
        """[B, K] which tokens are meant."""
        if name not in ("all", "not-first"):
            return self.region(name)
        mask = self.real.copy()
        mask[:, 0] &= name == "all"
        return mask

    def queries(self, name: str) -> Any:
        """What `watch` takes; None where no token of the batch is meant."""
        choice = parse_queries(name)
        region = GENERATED if choice.kind == GENERATED else choice.region
        if region is None:
            return name
        mask = self.region(region)
        if choice.kind == "predicts":  # what a token is predicted from is the one before it
            before = np.pad(mask[:, 1:], ((0, 0), (0, 1)))
            if region == GENERATED:  # the last of an answer was predicted too, and is not there
                before |= mask | self._last_of_prompts()
            mask = before
        if choice.kind == "after":
            last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
            behind = np.arange(mask.shape[1]) > last[:, None]
            mask = behind & self.real & _any(mask)[:, None]
        return torch.from_numpy(mask) if mask.any() else None

    def _last_of_prompts(self) -> Mask:
        """[B, K] the token that the first of a completion is predicted from."""
        ends = self.real.sum(1) - self.region(GENERATED).sum(1) - 1
        return np.asarray(np.arange(self.real.shape[1]) == ends[:, None])

    @property
    def max_new_tokens(self) -> int:
        """The largest number of generated tokens; 0 if none are generated."""
        return 0 if self.experiment.generate is None else self.experiment.generate.max_new_tokens

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model takes. Without padding there is no mask to work around."""
        inputs = self.inputs_of(self.padded)
        if self.real.all():
            del inputs["attention_mask"]
        return inputs

    def inputs_of(self, padded: PaddedBatch) -> dict[str, Any]:
        """What the model takes for these cells in a rectangle: with their pictures, if any."""
        pictures, inputs = self.plan.pictures, dict(padded.inputs)
        if pictures is None:
            return inputs
        images = [pictures.images(cell.prompt, cell.condition) for cell in self.cells]
        if not any(images):
            return inputs
        return inputs | picture_inputs(self.plan.processor, padded.input_ids, images)

    @property
    def targets(self) -> list[Target | None]:
        """[B] what the question of each cell is about."""
        return [self.plan.targets.get((cell.prompt, cell.condition)) for cell in self.cells]

    def sentences(self) -> NDArray[np.int64]:
        """[B, K] the sentence of each token, from 0; -1 for none."""
        return self._sentences

    @cached_property
    def _sentences(self) -> NDArray[np.int64]:
        numbers = np.full(self.real.shape, -1, dtype=np.int64)
        for row, cell in enumerate(self.cells):
            of_cell = sentences_of_tokens(cell.tokens.prompt.text, cell.tokens.offsets)
            numbers[row, : len(of_cell)] = of_cell
        return numbers

    @cached_property
    def aligned_position(self) -> NDArray[np.int64]:
        """[B, K] the base token that each token was; -1 for none."""
        aligned_position = np.full(self.real.shape, -1, dtype=np.int64)
        for row, cell in enumerate(self.cells):
            assert cell.alignment is not None
            aligned_position[row, cell.alignment.variant] = cell.alignment.base
        return aligned_position

    @cached_property
    def inserted(self) -> Mask:
        """[B, K] the inserted tokens."""
        inside = np.zeros_like(self.real)
        for row, cell in enumerate(self.cells):
            assert cell.alignment is not None
            inside[row, cell.alignment.filler] = True
        return inside


def _any(mask: Mask) -> Mask:
    """[B] whether a row has any."""
    return np.asarray(mask.any(axis=1))


def _extended(
    tokens: TokenizedPrompt, text: str, ids: NDArray[np.int64], offsets: NDArray[np.int64]
) -> TokenizedPrompt:
    """The tokens with generated ones behind them, in their own region."""
    start = len(tokens.prompt.text)
    region = Region(start, start + len(text), GENERATED)
    prompt = replace(
        tokens.prompt,
        text=tokens.prompt.text + text,
        regions=(*tokens.prompt.regions, region),
    )
    return TokenizedPrompt(
        prompt,
        np.concatenate([tokens.ids, ids]),
        np.concatenate([tokens.offsets, start + offsets]),
    )
