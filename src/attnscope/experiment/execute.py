"""`run`: measure what an experiment asks for, into a directory that can be continued.

An executor measures, batch by batch, as the plan laid them out; what it did not write itself is
written here, in a thread beside it where a core is free for that. A run that was stopped ends with
the same bytes as one that was not, because a batch is there whole or is measured again. So do its
shards together.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeWarning, InputError, ModelError
from attnscope.experiment.batch_store import OF_LEVEL, BatchStore
from attnscope.experiment.batching import kind_of
from attnscope.experiment.executor import Done, Executor, Work
from attnscope.experiment.local import local
from attnscope.experiment.measuring_environment import describe
from attnscope.experiment.plan import Plan, make_plan
from attnscope.experiment.shard import Shard
from attnscope.measures.registry import MEASURES
from attnscope.paths import is_remote, to_path
from attnscope.run.environment import accept_differences, differences
from attnscope.run.writer import Directory, open_directory
from attnscope.spec.claims import Claim, load_claims
from attnscope.spec.experiment import Experiment

# Batches that may wait for the disk; more would only fill the memory.
WAITING = 2

Progress = Callable[[int, int, int], None]
"""Called as cells are finished: how many, and how many tokens were worked through and in all."""


@dataclass(frozen=True)
class Outcome:
    """What a run, or a shard of one, did."""

    folder: Path
    cells: int
    """In all, of the shard if it is one."""
    measured: int
    """This time; the others were there, failed, or were not reached."""
    failed: dict[str, str]
    """Cells that could not be measured, with their errors."""
    complete: bool
    """Whether every cell of the whole run is there."""
    stopped: bool
    """Whether it was asked to stop before the end."""


def run(experiment: Experiment, folder: str | Path, **options: Any) -> Outcome:
    """Run an experiment, or a shard of it, into a directory, or continue it there; `options` as for
    `run_plan`. Claims of one's own, beside the built-in ones, are frozen there at the first start.

    Cells that fail are in the outcome; where nothing at all could be measured, that is an error.
    """
    return run_plan(make_plan(experiment), folder, **options)


def run_plan(
    plan: Plan,
    folder: str | Path,
    *,
    executor: Executor = local,
    progress: Progress | None = None,
    claims: Iterable[Claim] | None = None,
    shard: Shard | None = None,
    mixed: bool = False,
    extends: Experiment | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run what was planned. When `stop` says so, the batch at hand is finished and written, and
    that is all. `mixed` lets another machine, or other versions, continue the run. `extends` is
    the experiment of the directory, if the plan adds prompts to it (`extend.py`)."""
    where = to_path(folder)
    if shard is not None:
        shard.refuse_shared(where)
        shard.refuse_too_many(plan.size)
    shared = shard is not None and not is_remote(where)
    content, old = plan.settled.hub_file, extends
    with open_directory(where, plan.stored, shared=shared, prompts=content, old=old) as directory:
        work = [Work(model, batch) for model in plan.models for batch in model.batches]
        ids = [one.batch.id for one in work]
        _refuse_other_batches(directory, set(ids))
        directory.write_lines("metadata.jsonl", plan.metadata)
        if plan.pictures is not None:
            for name, file in sorted(plan.pictures.files.items()):
                directory.keep_picture(name, file.content)
            directory.keep_image_tokens(plan.image_tokens)
        directory.write_plan(ids)
        environment, different = _environment(plan, directory, claims, mixed)
        mine = work if shard is None else shard.mine(work)
        done = _done(plan, directory, mine, environment)
        pending = [one for one in mine if one.batch.id not in done]
        count = _Count(mine, done, progress)
        if pending:
            directory.drop_damaged()
            directory.remove_manifest()
            store = BatchStore(plan.experiment, directory, different)
            _carry_out(plan, pending, store, environment, executor, count, stop)
        complete = count.left == 0 and not count.failed and _finish(plan, directory, work, mine)
        cells = sum(len(one.batch) for one in mine)
        if count.failed and not done and not count.measured:
            raise ModelError(
                f"nothing could be measured: {next(iter(count.failed.values()))}",
                code="nothing-measured",
                failed=len(count.failed),
            )
        return Outcome(
            directory.folder, cells, count.measured, count.failed, complete, count.left > 0
        )


def _done(
    plan: Plan, directory: Directory, work: Sequence[Work], environment: dict[str, Any]
) -> set[str]:
    """The batches that are there, whole and undamaged."""
    levels = {MEASURES[name].level for name in plan.experiment.measures}
    more = [table for level, table in OF_LEVEL.items() if level in levels]
    return directory.done(
        {
            one.batch.id: ("values", "tokens", *more)
            for one in work
            if one.model.label in environment["models"]  # otherwise its environment is unknown
        }
    )


def _finish(plan: Plan, directory: Directory, work: list[Work], mine: list[Work]) -> bool:
    """Vouch for the whole, if it is there: the last shard does so for the others."""
    ids = {one.batch.id for one in mine}
    others = [one for one in work if one.batch.id not in ids]
    if not all(directory.has_index(one.batch.id) for one in work):
        return False
    with directory.locked_alone():
        environment = directory.environment()
    if len(_done(plan, directory, others, environment)) < len(others):
        return False
    directory.finish(plan.stored, [one.batch.id for one in work])
    return True


def _refuse_other_batches(directory: Directory, planned: set[str]) -> None:
    other = directory.batches() - planned
    if other:
        raise InputError(
            f"{directory.folder} holds {len(other)} batches that this experiment does not have. A "
            "model, a prompt file, a class file or the device has changed since they were "
            "measured. Give another directory with --out",
            code="other-batches",
            folder=str(directory.folder),
            batches=len(other),
        )


def _environment(
    plan: Plan, directory: Directory, claims: Iterable[Claim] | None, mixed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Recorded at the first start; and what is different now."""
    claims = list(claims or ())
    here = describe(plan, claims)
    with directory.locked_alone():
        recorded = directory.environment()
        _keep_claims(directory, recorded, claims)
        if recorded and plan.stored.interim and recorded["experiment"] != here["experiment"]:
            recorded |= {key: here[key] for key in ("experiment", "prompts", "seeds")}
            directory.write_json("environment.json", recorded)  # the run was extended
        if recorded:
            different = differences(recorded, here)
            accept_differences(recorded, different, directory.folder, mixed=mixed)
            return recorded, different
        directory.write_json("environment.json", here)
    return here, {}


def _keep_claims(directory: Directory, recorded: dict[str, Any], claims: list[Claim]) -> None:
    """Store the claims with the run when it begins. Later it keeps those: a claim that came after
    something was measured is no claim of the run."""
    written_before = recorded.get("claims", {})
    late = [claim.name for claim in claims if written_before.get(claim.name) != claim.text]
    if not recorded or (claims and not late and not _whole_claims(directory, written_before)):
        directory.keep_claims(claims)
    if recorded and directory.has_claims() and not _whole_claims(directory, written_before):
        file = directory.folder / "claims.yaml"
        raise InputError(
            f"{file} is damaged: its claims are not those of the start of the run. Give all of "
            "them again (--claims FILE), put a copy of the file back, or give another directory "
            "with --out",
            code="damaged-claims",
            file=str(file),
        )
    if not recorded or not late:
        return
    warnings.warn(
        f"{directory.folder} was started without the claims {', '.join(late)}, or with other "
        "versions of them, and keeps its own; to judge them: attnscope compare "
        f"{directory.folder} --claims FILE",
        AttnscopeWarning,
        stacklevel=4,
    )


def _whole_claims(directory: Directory, written_before: dict[str, str]) -> bool:
    """Whether the claims are those that the run was started with."""
    try:
        stored = load_claims(directory.folder / "claims.yaml")
    except InputError:
        return False
    written = directory.as_written("claims.yaml")
    if written is not None:
        return written
    return all(written_before.get(claim.name) == claim.text for claim in stored)


def _carry_out(
    plan: Plan,
    pending: list[Work],
    store: BatchStore,
    environment: dict[str, Any],
    executor: Executor,
    count: _Count,
    stop: Callable[[], bool],
) -> None:
    def finish(done: Done) -> None:
        if not done.stored:
            store(done)
        count.finished(done)

    entries: dict[str, Any] = {}
    threads: int = environment["threads"]
    measuring = executor(plan, pending, threads=threads)
    spare = kind_of(plan.device) != "cpu" or threads < _cores()
    with closing(measuring), _beside() if spare else nullcontext(_at_once) as submit:
        for done in measuring:
            if done.about is not None and entries.get(done.work.model.label) != done.about:
                entries = _recorded(plan, store.directory, done.work.model.label, done.about)
            submit(finish, done)
            if stop():
                break


def _recorded(
    plan: Plan, directory: Directory, label: str, about: dict[str, Any]
) -> dict[str, Any]:
    """The entries of the models, this one among them, in the plan's order."""
    with directory.locked_alone():
        environment = directory.environment()
        entries = environment["models"]
        recorded = entries.setdefault(label, about)
        if recorded != about:
            differing = [key for key in about if recorded.get(key) != about[key]]
            raise InputError(
                f"model {label!r} has changed since the run started: its {', '.join(differing)} "
                "differ; give another directory with --out",
                code="model-changed",
                model=label,
                keys=differing,
            )
        ordered = {one.label: entries[one.label] for one in plan.models if one.label in entries}
        directory.write_json("environment.json", environment | {"models": ordered})
        return ordered


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _at_once(work: Callable[..., None], *arguments: Any) -> None:
    """Write in this thread. Where the model uses all cores, a second thread would take one away,
    and the others would wait for it at the end of every operator."""
    work(*arguments)


@contextmanager
def _beside() -> Iterator[Callable[..., None]]:
    """Do things in order in a thread beside; what goes wrong there is raised here, soon."""
    waiting: deque[Future[None]] = deque()

    def submit(work: Callable[..., None], *arguments: Any) -> None:
        while waiting and (len(waiting) >= WAITING or waiting[0].done()):
            waiting.popleft().result()
        waiting.append(pool.submit(work, *arguments))

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="attnscope-writer") as pool:
        try:
            yield submit
            while waiting:
                waiting.popleft().result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class _Count:
    """How far a run is."""

    def __init__(self, work: list[Work], done: set[str], progress: Progress | None):
        self.cells = sum(len(one.batch) for one in work if one.batch.id in done)
        self.progress = progress
        self.total = sum(one.batch.tokens for one in work if one.batch.id not in done)
        self.left = sum(one.batch.id not in done for one in work)
        """Batches that were not tried yet."""
        self.tokens = self.measured = 0
        self.failed: dict[str, str] = {}
        self._report()

    def finished(self, done: Done) -> None:
        batch = done.work.batch
        failed = {cell.id: why for cell in batch if (why := done.failed.get(cell.prompt))}
        self.failed |= failed
        self.measured += len(batch) - len(failed)
        self.cells += len(batch) - len(failed)
        self.tokens += batch.tokens
        self.left -= 1
        self._report()

    def _report(self) -> None:
        if self.progress is not None and self.total:
            self.progress(self.cells, self.tokens, self.total)
