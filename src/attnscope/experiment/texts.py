"""The cells of one condition as a rectangle of tokens, and what its tokens are.

Padded on the right, so that a token's column is its position. Shapes: B prompts, K tokens of the
longest, C columns.

This module must not know models or attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnscope.experiment.plan import Cell, ModelPlan
from attnscope.experiment.readings import Column, Mask
from attnscope.question.queries import parse_queries
from attnscope.question.spec import Experiment
from attnscope.tokens import TokenizedPrompt, pad

__all__ = ["Text"]


class Text:
    """The cells of one condition as a rectangle, and what its tokens are. Padded on the right."""

    def __init__(self, experiment: Experiment, plan: ModelPlan, cells: tuple[Cell, ...]):
        self.cells = cells
        self.batch = pad([cell.tokens for cell in cells], plan.tokenizer, side="right")
        self.real: Mask = self.batch.attention_mask.astype(bool)
        self.tokenizer = plan.tokenizer
        self.keys = {name: self._keys(name) for name in experiment.keys}
        self.columns: list[Column] = []
        shares = []
        if "mass" in experiment.measures:
            for keys, (mask, there) in self.keys.items():
                inside = np.where(there[:, None], mask, np.nan)
                for label, classes in experiment.class_sets.items():
                    table = classes.weights(self.batch.input_ids, plan.tokenizer, self.real)
                    shares.append(table * inside[..., None])
                    self.columns += [Column(keys, label, "mass", c, None) for c in classes.names]
        self.shares = np.concatenate(shares, axis=2, dtype=np.float64) if shares else None
        """[B, K, C] the share of each token in each column of `mass`; nan without the region."""

    def region(self, name: str) -> Mask:
        """[B, K] the tokens of a region; none where the prompt has no such region."""
        inside = np.zeros_like(self.real)
        for row, cell in enumerate(self.cells):
            inside[row, : len(cell.tokens)] = _region(cell.tokens, name)
        return inside

    def _keys(self, name: str) -> tuple[Mask, Mask]:
        """[B, K] which tokens are meant, and [B] whether the prompt has such tokens."""
        mask = self.real.copy()
        if name == "not-first":
            mask[:, 0] = False
        elif name != "all":
            mask = self.region(name)
        return mask, _any(mask)

    def queries(self, name: str) -> Any:
        """What `watch` takes; None where no token of the batch is meant."""
        asked = parse_queries(name)
        if asked.region is None:
            return name
        mask = self.region(asked.region)
        if asked.kind == "after":
            last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
            behind = np.arange(mask.shape[1]) > last[:, None]
            mask = behind & self.real & _any(mask)[:, None]
        return torch.from_numpy(mask) if mask.any() else None

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model takes. Without padding there is no mask to work around."""
        given = dict(self.batch.inputs)
        if self.real.all():
            del given["attention_mask"]
        return given

    def twin(self) -> NDArray[np.int64]:
        """[B, K] the base token that each token was; -1 for none."""
        twin = np.full(self.real.shape, -1, dtype=np.int64)
        for row, cell in enumerate(self.cells):
            assert cell.alignment is not None
            twin[row, cell.alignment.variant] = cell.alignment.base
        return twin

    def filler(self) -> Mask:
        """[B, K] the inserted tokens."""
        inside = np.zeros_like(self.real)
        for row, cell in enumerate(self.cells):
            assert cell.alignment is not None
            inside[row, cell.alignment.filler] = True
        return inside


def _any(mask: Mask) -> Mask:
    """[B] whether a row has any."""
    return np.asarray(mask.any(axis=1))


def _region(tokens: TokenizedPrompt, name: str) -> Mask:
    if name not in tokens.prompt.names:
        return np.zeros(len(tokens), dtype=bool)
    return tokens.mask(name)
