"""A part of a run for one of several machines: `--shard 2/8` is the second of eight.

Batches are cut, in the order of the plan, into stretches of equal work, so that a shard loads few
models; every batch is in exactly one, and which depends on the plan alone.

This module must not know files, or how anything is measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from attnscope.errors import InputError
from attnscope.experiment.executor import Work


@dataclass(frozen=True)
class Shard:
    """The `number`-th of `of` parts, from 1."""

    number: int
    of: int

    def mine(self, work: Sequence[Work]) -> list[Work]:
        """The batches of this shard."""
        total, before, mine = sum(one.cost for one in work), 0, []
        for one in work:
            middle = 2 * before + one.cost  # twice, to stay whole
            if self.of * middle // (2 * total) == self.number - 1:
                mine.append(one)
            before += one.cost
        return mine


def parse_shard(text: str) -> Shard:
    """From `I/N`."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= of:
        raise InputError(
            f"--shard {text!r} is no part of a run; it is I/N, the I-th of N parts, I from 1 to N: "
            "--shard 1/4 to --shard 4/4"
        )
    return Shard(number, of)
