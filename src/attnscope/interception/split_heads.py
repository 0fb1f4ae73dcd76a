"""Tensor parallelism: the processes that share the heads of a model, and what they exchange.

Each process computes its own heads, in rank order. Results are exchanged over a gloo group of
attnscope's own, so that a process that is missing cannot be mixed up with the model's collectives.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn

from attnscope.errors import AttnscopeError, ModelError

WAIT = timedelta(seconds=45)
"""How long a process waits for the others."""

# By the process group of the model: the gloo group of the same processes.
_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@dataclass(eq=False, slots=True)
class Failure:
    """What a process exchanges if it has no result."""

    reason: str


@dataclass(eq=False, slots=True)
class SplitHeads:
    """The processes that share the heads of a model."""

    of_model: Any
    """The process group of the model's tensor parallelism."""
    size: int
    index: int
    """The index of this process, in the order of the heads."""
    exchanged: int = field(default=0)
    """Exchanges so far; a process that skipped one is found by it."""

    def first_head(self, here: int, total: int, layer: int) -> int:
        """The first of this process's heads among all; an error if heads are split unevenly."""
        if here == total:  # attention is not split, only its projections
            return 0
        if here * self.size != total:
            raise ModelError(
                f"layer {layer} has {total} heads, which {self.size} processes do not share "
                f"equally (this one has {here}), so single heads cannot be chosen; leave heads "
                "out, or load the model in a number of processes that divides its heads",
                code="uneven-heads",
                layer=layer,
                heads=total,
                here=here,
                ranks=self.size,
            )
        return self.index * here

    def exchange(self, what: str, value: Any, *, to_first: bool = False) -> list[Any]:
        """The values of all processes, in the order of their heads; with `to_first`, processes
        after the first get an empty list. An error on every process if one is missing, failed, or
        exchanges something else."""
        self.exchanged += 1
        mine = (what, self.exchanged), value if isinstance(value, Failure) else None
        with self._reporting(what):
            heads: list[Any] = [None] * self.size
            distributed.all_gather_object(heads, mine, group=self._group())
        for index, (label, failure) in enumerate(heads):
            if failure is not None and index != self.index:
                raise _failed(what, f"process {index} failed: {failure.reason}")
            if label != mine[0]:
                raise _failed(what, f"process {index} is at {label[0]!r} number {label[1]}")
        if any(failure is not None for _, failure in heads):
            return []  # only this process failed; it raises its own error
        with self._reporting(what):
            values: list[Any] = [None] * self.size
            if not to_first:
                distributed.all_gather_object(values, value, group=self._group())
                return values
            distributed.gather_object(
                value,
                values if self.index == 0 else None,
                group=self._group(),
                group_dst=0,
            )
            return values if self.index == 0 else []

    def agree(self, what: str, options: dict[str, Any]) -> None:
        """Check that all processes open the same block with the same options."""
        for index, other in enumerate(self.exchange(what, options)):
            different = [name for name in options if not _equal(options[name], other.get(name))]
            if different or len(other) != len(options):
                raise ModelError(
                    f"processes {self.index} and {index} share the heads of this model, but opened "
                    f"{what} with different arguments: {', '.join(different)}; open the same block "
                    "in every process",
                    code="ranks-differ",
                    arguments=different,
                    ranks=[self.index, index],
                )

    def _group(self) -> Any:
        if self.of_model not in _groups:
            _groups[self.of_model] = distributed.new_group(
                distributed.get_process_group_ranks(self.of_model),
                timeout=WAIT,
                backend="gloo",
                use_local_synchronization=True,
            )
        return _groups[self.of_model]

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Report the errors of torch as one of attnscope."""
        try:
            yield
        except AttnscopeError:
            raise
        except RuntimeError as error:  # also those of torch.distributed
            raise _failed(what, _reason(error)) from error


def _reason(error: RuntimeError) -> str:
    """What an error of torch.distributed says, without places in its source and addresses."""
    text = str(error)
    if "timeout" in text.lower() or "timed out" in text.lower():
        return f"another process did not answer within {WAIT.seconds} s"
    if "Connection" in text:
        return "another process has ended"
    return text.partition("\n")[0]


def _failed(what: str, reason: str) -> ModelError:
    return ModelError(
        f"{what}: the processes that share the heads of this model could not exchange them "
        f"({reason}); every process must open the same block and run the same passes; start all "
        "processes again",
        code="gather-failed",
        what=what,
        reason=reason,
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def split_heads(model: nn.Module, attention: Iterable[nn.Module]) -> SplitHeads | None:
    """The processes that share the heads of these attention modules; None if each has all heads."""
    ranks, groups = getattr(model, "_tp_size", None) or 1, _groups_over(model, attention)
    if not groups and ranks > 1:  # attention may not be split, or its weights do not say so
        groups = _groups_over(model, [model])
    if len(groups) == 1:
        ((group, (size, index)),) = groups.items()
        if size >= ranks and isinstance(_total_heads(model), int):
            return SplitHeads(group, size, index)
    if not groups and ranks == 1:
        return None
    raise refused(model, max([ranks, *(size for size, _ in groups.values())]))


def _groups_over(model: nn.Module, modules: Iterable[nn.Module]) -> dict[Any, tuple[int, int]]:
    """Process group → (size, index here), for each group over which weights are split."""
    groups: dict[Any, tuple[int, int]] = {}
    for module in modules:
        for weight in module.parameters():
            groups |= _groups_of(model, weight)
    return groups


def _groups_of(model: nn.Module, weight: Any) -> dict[Any, tuple[int, int]]:
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        return {}
    names: Any = mesh.mesh_dim_names or ("",) * mesh.ndim
    groups: dict[Any, tuple[int, int]] = {}
    for dim, (name, placement) in enumerate(zip(names, weight.placements, strict=True)):
        gathered = "dp" in name or (not name and _fully_sharded(model))  # before it is used
        if not placement.is_replicate() and not gathered and mesh.size(dim) > 1:
            groups[mesh.get_group(dim)] = mesh.size(dim), mesh.get_local_rank(dim)
    return groups


def total_heads(base: nn.Module, here: int) -> int:
    """The number of heads of a layer of a split model, by its configuration."""
    total = _total_heads(base)
    return here if total is None else total


def _total_heads(model: Any) -> int | None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    total = getattr(config, "num_attention_heads", None)
    return total if isinstance(total, int) else None


def refused(model: nn.Module, ranks: int, what: str = "") -> ModelError:
    """The error for a use of a split model that needs all heads in one process."""
    subject = what or "attnscope"
    return ModelError(
        f"tensor parallelism splits the heads of {type(model).__name__} over {ranks} processes, "
        f"and {subject} needs all heads in one process; load the model in one process, or with "
        "device_map='auto'",
        code="tensor-parallel",
        ranks=ranks,
    )


def _fully_sharded(model: nn.Module) -> bool:
    """Whether FSDP gathers the weights before use, so that each process has all heads."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    return any(cls.__name__ == "FSDPModule" for cls in classes)
