"""Cells, and the batches in which they go through a model.

A cell is one model × prompt × condition. A plan of a survey has millions of them and is made in a
minute, so a batch has its size and identity at once and makes its cells on demand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from attnscope.experiment.variants import Row
from attnscope.tokens import Alignment, TokenizedPrompt


@dataclass(frozen=True)
class Completion:
    """What a model generated after a prompt."""

    ids: tuple[int, ...]
    """Every token, with the one that ended it."""
    text: str


@dataclass(frozen=True, eq=False, slots=True)
class Cell:
    """One model × prompt × condition."""

    id: str
    prompt: int
    condition: str
    tokens: TokenizedPrompt
    alignment: Alignment | None
    """With the base's cell; None in the base itself."""
    completion: Completion | None = None
    """Set when the model has generated it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Prompts that run together, under every condition in turn."""

    id: str
    identity: bytes
    """Everything its numbers depend on, the other prompts included. Its ID is a hash of this, and
    the IDs of its cells are hashes of this and their positions."""
    numbers: tuple[int, ...]
    """Of its prompts."""
    rows: tuple[Row, ...]
    """Their tokens."""
    first: int = 0
    """The place of its first prompt, in a part of a batch."""

    @cached_property
    def cells(self) -> dict[str, tuple[Cell, ...]]:
        """By condition; row n is the same prompt in each."""
        together = hashlib.sha256(self.identity)
        cells: dict[str, list[Cell]] = {}
        for position, (number, row) in enumerate(zip(self.numbers, self.rows, strict=True)):
            for condition, (tokens, alignment) in row.items():
                digest = together.copy()
                digest.update(f"{self.first + position}:{number}:{condition}".encode())
                cell = Cell(id_of(digest), number, condition, tokens, alignment)
                cells.setdefault(condition, []).append(cell)
        return {condition: tuple(members) for condition, members in cells.items()}

    def __iter__(self) -> Iterator[Cell]:
        return (cell for cells in self.cells.values() for cell in cells)

    def __len__(self) -> int:
        return sum(map(len, self.rows))

    def lengths(self) -> list[list[int]]:
        """Tokens of its cells, condition by condition."""
        return [[len(row[name][0]) for row in self.rows] for name in self.rows[0]]

    def by_prompt(self) -> list[Cell]:
        """In the order of prompts, then conditions."""
        rows = sorted(zip(*self.cells.values(), strict=True), key=lambda row: row[0].prompt)
        return [cell for row in rows for cell in row]

    def halves(self) -> tuple[Batch, Batch]:
        """Its first prompts and the others; the cells are what they were."""
        middle = len(self.numbers) // 2
        head = replace(self, numbers=self.numbers[:middle], rows=self.rows[:middle])
        tail = replace(self, numbers=self.numbers[middle:], rows=self.rows[middle:])
        return head, replace(tail, first=self.first + middle)

    @cached_property
    def tokens(self) -> int:
        """Of all its cells, without padding."""
        return sum(map(sum, self.lengths()))


def batch_of(identity: bytes, numbers: list[int], rows: list[Row]) -> Batch:
    """A batch with this identity: its ID is a hash of it."""
    return Batch(
        id=id_of(hashlib.sha256(identity)),
        identity=identity,
        numbers=tuple(numbers),
        rows=tuple(rows),
    )


def id_of(digest: hashlib._Hash) -> str:
    """As cells and batches are called."""
    return digest.hexdigest()[:24]
