"""A part of a run for one of several machines: `--shard 2/8` is the second of eight.

Batches are cut, in the order of the plan, into stretches of equal work, so that a shard loads few
models; every batch is in exactly one, and which depends on the plan alone. Parts share a directory,
which has locks; at an address, which has none, each has its own beside the run's. Under torchrun
each process measures one part.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnscope.errors import InputError
from attnscope.experiment.executor import Work
from attnscope.paths import is_remote


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

    def folder_for(self, run_folder: Path) -> Path:
        """Where this part is written, of a run at `run_folder`."""
        return self._beside(run_folder, self.number) if is_remote(run_folder) else run_folder

    def refuse_shared(self, where: Path) -> None:
        """Refuse an address that is not this part's own."""
        if is_remote(where) and not where.name.endswith(f"-{self.number}-of-{self.of}"):
            raise InputError(
                f"shards of a run cannot share {where}: an object store has no locks. Write this "
                f"shard to {self.folder_for(where)}; join the shards with: "
                f"{self.merge_command(where)}",
                code="shared-object-store",
                path=str(where),
                own=str(self.folder_for(where)),
            )

    def refuse_too_many(self, cells: int) -> None:
        """Refuse more parts than the run has cells."""
        if self.of > cells:
            raise InputError(
                f"the run has {cells:,} cells, so it cannot be measured in {self.of:,} parts; "
                f"give --shard I/N with N of at most {cells:,}",
                code="too-many-shards",
                shards=self.of,
                cells=cells,
            )

    def merge_command(self, run_folder: Path) -> str:
        """The command, of a shell that knows braces, that makes one run of the parts beside it."""
        parts = self._beside(run_folder, f"{{1..{self.of}}}")
        return f"attnscope merge {parts} --out {run_folder}"

    def _beside(self, run_folder: Path, number: int | str) -> Path:
        if not run_folder.name:
            raise InputError(
                f"{run_folder} is a whole object store; give a path inside it: {run_folder}/RUN",
                code="no-run-name",
                path=str(run_folder),
            )
        return run_folder.with_name(f"{run_folder.name}-{number}-of-{self.of}")


def parse_shard(text: str) -> Shard:
    """From `I/N`."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, of = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= of:
        raise InputError(
            f"--shard {text!r} is not a shard; write I/N, the I-th of N shards, I from 1 to N: "
            "--shard 1/4 to --shard 4/4",
            code="bad-shard",
            value=text,
        )
    return Shard(number, of)


def shard_of_process(environment: Mapping[str, str]) -> Shard | None:
    """The part that this process measures under torchrun; None if it was started otherwise."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    processes = int(environment["WORLD_SIZE"])
    return Shard(int(environment["RANK"]) + 1, processes) if processes > 1 else None


def gpu_of_process(environment: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a process under torchrun: one GPU for each process of a machine."""
    local = int(environment["LOCAL_RANK"])
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(local)
    devices = [device for device in visible.split(",") if device]
    if not devices:  # GPUs are hidden on purpose
        return visible
    if local >= len(devices):
        raise InputError(
            f"torchrun started more processes than there are GPUs in CUDA_VISIBLE_DEVICES="
            f"{visible!r}; give --nproc-per-node {len(devices)}",
            code="too-few-gpus",
            visible=visible,
            local_rank=local,
        )
    return devices[local]
