"""The focus score of prompts with and without an injection (arXiv 2411.00348), and how well it
tells them apart.

A head's score of a prompt is the last row's mass on the instruction, over that on instruction and
data together. Heads are chosen where calm and attacked prompts are far apart; a prompt's focus is
the mean over them. Published, all that is calm is clean; with harmless insertions among the calm
ones, heads that notice any insertion are passed over. This module must not know models or runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.stats.arrays import Floats

Heads = NDArray[np.bool_]
SPREADS = 4
"""The published number of standard deviations between clean and attacked."""
SEVERAL = 10
"""Heads that are wanted where harmless texts are among the calm ones."""


def shares(instruction: Floats, data: Floats) -> Floats:
    """A head's mass on the instruction, of its mass on both; 0 where it looks at neither."""
    both = instruction + data
    return np.divide(instruction, both, out=np.zeros_like(both), where=both > 0)


def important_heads(calm: Floats, attacked: Floats, fewest: int = 1) -> Heads:
    """Heads whose calm and attacked scores [prompts, heads] are apart by four standard deviations
    of each, as published; by three, two … where that leaves fewer than so many heads; all heads
    where there are no more."""
    gap = calm.mean(0) - attacked.mean(0)
    spread = calm.std(0) + attacked.std(0)
    for spreads in range(SPREADS, -1, -1):
        chosen = gap - spreads * spread > 0
        if chosen.sum() >= fewest:
            return np.asarray(chosen)
    return np.asarray(gap >= np.sort(gap)[-min(fewest, len(gap))])


def auroc(calm: Floats, attacked: Floats) -> float:
    """How often a calm prompt has the larger score than an attacked one; ties are halves."""
    more = (calm[:, None] > attacked[None]).mean()
    return float(more + 0.5 * (calm[:, None] == attacked[None]).mean())


@dataclass(frozen=True)
class Focus:
    """Scores of prompts that the heads were not chosen on, under texts they were not chosen on."""

    heads: int
    of: dict[str, Floats]
    """Kind of text (clean, harmless, a kind of attack) to the score of every prompt."""
    threshold: float
    """Halfway between the mean scores of those that the heads were chosen on."""

    def flagged(self, texts: list[str]) -> Callable[[Floats], float]:
        """The share of scores below the threshold, over prompts with these numbers."""

        def statistic(some: Floats) -> float:
            scores = np.stack([self.of[text][some.astype(int)] for text in texts])
            return float((scores < self.threshold).mean())

        return statistic

    def auroc_against(self, calm: str, texts: list[str]) -> Callable[[Floats], float]:
        """The AUROC of these kinds against a calm one, over prompts with these numbers."""

        def statistic(some: Floats) -> float:
            rows = some.astype(int)
            attacked = np.concatenate([self.of[text][rows] for text in texts])
            return auroc(self.of[calm][rows], attacked)

        return statistic


def focus(
    first: Mapping[str, Floats],
    second: Mapping[str, Floats],
    *,
    calm: Sequence[str],
    attack: str,
    fewest: int = 1,
) -> Focus:
    """Heads are chosen on every second prompt by the texts of `first` (an attack against calm
    ones), and tried on the other prompts with the texts of `second`: nothing that is tried was
    there to choose by. Both map a kind of text to scores [prompts, heads]."""
    numbers = np.arange(len(first[attack]))
    choosing, trying = numbers % 2 == 0, numbers % 2 == 1
    quiet = np.concatenate([first[kind][choosing] for kind in calm])
    attacked = first[attack][choosing]
    heads = important_heads(quiet, attacked, fewest)
    of = {kind: scores[trying][:, heads].mean(1) for kind, scores in second.items()}
    threshold = (quiet[:, heads].mean() + attacked[:, heads].mean()) / 2
    return Focus(int(heads.sum()), of, float(threshold))
