"""Gathers the sums of heads that tensor parallelism splits over processes."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import AttnscopeError, ModelError
from attnscope.interception.sites import Sites
from attnscope.interception.split_heads import Failure, SplitHeads, total_heads
from attnscope.kernels import AttentionSums
from attnscope.scope.sums import SumsBlock
from attnscope.scope.text_sums import TextSums

Fields = dict[str, Tensor | None]


class GatherHeads:
    """Gathers the sums of a watch, so that they have all heads in the model's own numbering.

    Every process does so at the same moments: when a pass or `generate` ends.
    """

    def __init__(self, split: SplitHeads, sites: Sites, *, to_first: bool):
        self.split = split
        self.sites = sites
        self.to_first = to_first
        """Whether the first process alone gets the heads."""
        self.due = False
        """Whether calls were captured since the last gather."""

    def prepare(self, text: TextSums) -> None:
        """Make a text refuse to be read before its heads are gathered."""
        elsewhere = self.to_first and self.split.index > 0
        text._not_here = "gathered-on-rank0" if elsewhere else "not-gathered"

    def gather(self, texts: Mapping[str, TextSums]) -> None:
        """Give every text the sums of all heads; an error on every process if one has failed."""
        self.due = False
        try:
            blocks = {
                (part, layer): text._own_sums(layer)
                for part, text in texts.items()
                for layer in sorted(text._extents)
            }
        except Exception as error:
            with suppress(AttnscopeError):  # the error of this process comes first
                self.split.exchange("watch", Failure(str(error)))
            raise
        sums = {key: None if block is None else _fields(block) for key, block in blocks.items()}
        everything = self.split.exchange("watch", sums, to_first=self.to_first)
        for index, other in enumerate(everything):
            if {k: v is None for k, v in other.items()} != {k: v is None for k, v in sums.items()}:
                raise ModelError(
                    f"process {index} measured other layers than process {self.split.index}; run "
                    "the same passes in every process",
                    code="ranks-differ",
                    arguments=["layers"],
                    ranks=[self.split.index, index],
                )
        for (part, layer), block in blocks.items() if everything else ():
            if block is not None:
                parts = [other[part, layer] for other in everything]
                block = self._with_all_heads(texts[part], layer, block, parts)
            texts[part]._joined[layer] = block

    def _with_all_heads(
        self, text: TextSums, layer: int, block: SumsBlock, parts: list[Fields]
    ) -> SumsBlock:
        """The block of a layer, from the fields of all processes."""
        heads = [0 if part["mass"] is None else part["mass"].shape[1] for part in parts]
        total = total_heads(self.sites.base_models[text._stack], heads[self.split.index])
        if all(each == total for each in heads):  # attention is not split, only its projections
            return block
        if sum(heads) != total:
            raise ModelError(
                f"layer {layer} has {total} heads by its configuration, and the processes have "
                f"{heads}, so heads cannot be numbered; load the model in one process",
                code="unknown-split",
                layer=layer,
                heads=heads,
                total=total,
            )
        return replace(block, sums=_joined(parts, block.computed().received.device))


def _fields(block: SumsBlock) -> Fields:
    """The fields of the sums of one layer, on the CPU."""
    sums = block.computed()
    values = {each.name: getattr(sums, each.name) for each in fields(AttentionSums)}
    return {
        name: None if value is None else value.detach().cpu().clone()
        for name, value in values.items()
    }


def _joined(parts: list[Fields], device: torch.device) -> AttentionSums:
    """Sums of all heads: head 0 is that of the first process. Every field has heads as axis 1."""
    joined: dict[str, Any] = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        known = [value for value in values if value is not None]
        joined[name] = torch.cat(known, 1).to(device) if len(known) == len(values) else None
    return AttentionSums(**joined)
