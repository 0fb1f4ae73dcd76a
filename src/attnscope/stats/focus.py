"""Computes the focus score of prompts with and without an injection (arXiv 2411.00348).

The score of a head is the last query's mass on the instruction, divided by its mass on instruction
and data. Heads are selected if their scores of calm and attacked prompts differ strongly. The focus
of a prompt is the mean over these heads. In the paper all calm prompts are clean. With harmless
insertions among the calm prompts, heads that react to any insertion are not selected.
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
"""Minimum number of heads if harmless texts are among the calm ones."""


def shares(instruction: Floats, data: Floats) -> Floats:
    """A head's mass on the instruction, of its mass on both; 0 if both are 0."""
    both = instruction + data
    return np.divide(instruction, both, out=np.zeros_like(both), where=both > 0)


def important_heads(calm: Floats, attacked: Floats, fewest: int = 1) -> Heads:
    """Heads whose calm and attacked scores [prompts, heads] differ by four standard deviations of
    each, as published. If fewer than `fewest` heads do, three, two … suffice."""
    gap = calm.mean(0) - attacked.mean(0)
    spread = calm.std(0) + attacked.std(0)
    for spreads in range(SPREADS, -1, -1):
        chosen = gap - spreads * spread > 0
        if chosen.sum() >= fewest:
            return np.asarray(chosen)
    return np.asarray(gap >= np.sort(gap)[-min(fewest, len(gap))])


def auroc(calm: Floats, attacked: Floats) -> float:
    """Probability that a calm prompt has a larger score than an attacked one; ties count half."""
    more = (calm[:, None] > attacked[None]).mean()
    return float(more + 0.5 * (calm[:, None] == attacked[None]).mean())


@dataclass(frozen=True)
class Focus:
    """Scores of held-out prompts with held-out texts."""

    heads: int
    of: dict[str, Floats]
    """Kind of text (clean, harmless, a kind of attack) to the score of every prompt."""
    threshold: float
    """Midpoint of the mean scores of the prompts that selected the heads."""

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
    """Select heads on every second prompt with the texts of `first`, and score the other prompts
    with the texts of `second`, so that scores are held out. Both map a kind of text to scores
    [prompts, heads]."""
    numbers = np.arange(len(first[attack]))
    choosing, trying = numbers % 2 == 0, numbers % 2 == 1
    quiet = np.concatenate([first[kind][choosing] for kind in calm])
    attacked = first[attack][choosing]
    heads = important_heads(quiet, attacked, fewest)
    of = {kind: scores[trying][:, heads].mean(1) for kind, scores in second.items()}
    threshold = (quiet[:, heads].mean() + attacked[:, heads].mean()) / 2
    return Focus(int(heads.sum()), of, float(threshold))
