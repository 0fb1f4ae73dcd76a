"""Measuring on a Ray cluster: one worker per GPU or per so many threads, the largest batches first.

A worker keeps a model while there are batches for it, and writes what it measures to the run
directory, which every node must see. What a lost worker was measuring is given to another. Nothing
but batches, errors and entries of models travels.
"""

import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnscope.errors import InputError, ModelError, missing_package
from attnscope.experiment.batch_store import BatchStore
from attnscope.experiment.cells import Batch
from attnscope.experiment.executor import Done, Executor, Work
from attnscope.experiment.local import LOAD_WITHIN, Measurer
from attnscope.experiment.measuring_environment import describe
from attnscope.experiment.plan import Plan
from attnscope.paths import is_remote
from attnscope.run.environment import accept_differences, differences
from attnscope.run.writer import Directory

LOCAL = "local"
"""In place of an address: a cluster of this machine, for as long as the run."""
ANSWER_WITHIN = 5.0
"""Seconds in which an address must answer."""
AHEAD = 2
"""Batches that a worker is given at once: the next is there when one is finished."""
TRIES = 3
"""How often a batch is given to a worker, where workers are lost over it, and how many workers may
be lost in a row before one has measured anything."""


def on_ray(
    address: str,
    folder: Path,
    *,
    workers: int | None = None,
    load_within: float = LOAD_WITHIN,
    mixed: bool = False,
) -> Executor:
    """An executor on the cluster at `address`, whose workers write to `folder`. `mixed` lets in
    those on other kinds of nodes, or with other versions; what they write says so."""
    if address != LOCAL:
        _check_address(address)

    def measured(
        plan: Plan, pending: Sequence[Work], *, threads: int
    ) -> Generator[Done, None, None]:
        if plan.experiment.engine != "transformers":
            raise InputError(
                f"engine: {plan.experiment.engine} does not run on Ray; leave out --ray",
                code="engine-on-ray",
                engine=plan.experiment.engine,
            )
        with _cluster(address, None if workers is None else workers * threads) as ray:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            number, needs = shares(nodes, plan.device, workers, threads)
            alone = replace(plan, models=tuple(replace(m, batches=()) for m in plan.models))
            where = folder if is_remote(folder) else folder.absolute()
            shared = ray.put((alone, where, threads, load_within))
            kind = ray.remote(**needs)(_Worker)
            pool = _WorkerPool(ray, lambda: kind.remote(shared), folder, _Queue(pending), mixed)
            yield from pool.work(min(number, len(pending)))

    return measured


def shares(
    nodes: Sequence[Mapping[str, float]], device: str, workers: int | None, threads: int
) -> tuple[int, dict[str, float]]:
    """How many workers fit, and what each requests from Ray: a GPU or a share of one;
    for a model that is spread (`auto`) all of a node, or as many whole GPUs as each can have;
    without GPUs so many threads."""
    gpus = [node["GPU"] for node in nodes if node.get("GPU", 0)]
    if device == "auto" and gpus:
        number = workers or len(gpus)
        each = min(min(gpus), sum(gpus) // number)
        if each < 1:
            raise InputError(
                f"--workers {number} is more than the number of GPUs ({sum(gpus):.0f}). With "
                "device: auto each worker needs at least one whole GPU; give fewer workers",
                code="too-many-workers",
                workers=number,
                gpus=int(sum(gpus)),
            )
        return number, {"num_cpus": 1, "num_gpus": each}
    if device.startswith("cuda"):
        number = max(1, int(sum(gpus)) if workers is None else workers)
        return number, {"num_cpus": 1, "num_gpus": min(1.0, sum(gpus) / number)}
    workers_that_fit = sum(node.get("CPU", 0) // threads for node in nodes)
    return max(1, int(workers_that_fit) if workers is None else workers), {"num_cpus": threads}


class _Worker:
    """Lives on the cluster: measures batches and writes them."""

    def __init__(self, shared: tuple[Plan, Path, int, float]):
        import torch
        from transformers.utils import logging

        plan, folder, threads, load_within = shared
        torch.set_num_threads(threads)
        logging.disable_progress_bar()
        self.models = {model.label: model for model in plan.models}
        self.measure = Measurer(plan, threads, load_within)
        directory = Directory(folder)
        different = differences(directory.environment(), describe(plan))
        self.store = BatchStore(plan.experiment, directory, different)

    def elsewhere(self) -> dict[str, Any]:
        """How its environment differs from the one in which the run started."""
        return self.store.elsewhere

    def measured(
        self, label: str, batch: Batch
    ) -> tuple[dict[int, str], dict[str, Any] | None] | OSError:
        """What failed, and the model's entry; or what the disk says."""
        done = self.measure(Work(self.models[label], batch))
        try:
            self.store(done)
        except OSError as error:
            return error
        return done.failed, done.about


class _Queue:
    """Pending batches, the largest first; a worker keeps the model that it has loaded."""

    def __init__(self, pending: Sequence[Work]):
        self.left: dict[str, list[Work]] = {}
        for work in sorted(pending, key=lambda work: work.cost):
            self.left.setdefault(work.model.label, []).append(work)

    def next(self, label: str | None, busy: Counter[str]) -> Work | None:
        """The next batch for a worker with `label` loaded; `busy`: workers of each model."""
        if label not in self.left:
            label = max(
                self.left,
                key=lambda one: sum(w.cost for w in self.left[one]) / (1 + busy[one]),
                default=None,
            )
        if label is None:
            return None
        work = self.left[label].pop()
        if not self.left[label]:
            del self.left[label]
        return work

    def back(self, work: Work) -> None:
        """It was not done."""
        self.left.setdefault(work.model.label, []).append(work)


@dataclass(eq=False)
class _WorkerHandle:
    """A worker as the crew sees it."""

    actor: Any
    started: Any
    """Its answer to who it is."""
    label: str | None = None
    doing: dict[Any, Work] = field(default_factory=dict)
    """By the answer that is waited for."""


class _WorkerPool:
    """Hands out the work and takes in what was done."""

    def __init__(
        self, ray: Any, start_worker: Any, folder: Path, queue: _Queue, mixed: bool = False
    ):
        self.ray, self.start_worker, self.queue = ray, start_worker, queue
        self.folder, self.mixed = folder, mixed
        self.known: list[dict[str, Any]] = [{}]  # kinds of nodes, by what is different there
        self.workers_alive: list[_WorkerHandle] = []
        self.lost: Counter[str] = Counter()  # workers, by the batch they were lost over
        self.failures = 0  # workers lost in a row

    def work(self, number: int) -> Generator[Done, None, None]:
        """Until everything is done."""
        for _ in range(number):
            self._start_worker()
        while any(worker.doing for worker in self.workers_alive) or self.queue.left:
            waiting = [
                one
                for worker in self.workers_alive
                for one in (worker.started, *worker.doing)
                if one
            ]
            ready, _ = self.ray.wait(waiting, num_returns=1)
            worker = next(
                h for h in self.workers_alive if ready[0] == h.started or ready[0] in h.doing
            )
            try:
                answer = self.ray.get(ready[0])
            except self.ray.exceptions.RayActorError as error:
                yield from self._replace(worker, error)
                continue
            if ready[0] == worker.started:
                self._check_environment(answer)
                worker.started = None
            else:
                work = worker.doing.pop(ready[0])
                if isinstance(answer, OSError):
                    raise answer
                self.failures = 0
                failed, about = answer
                yield Done(work, (), failed, about, stored=True)
            self._give(worker)

    def _check_environment(self, different: dict[str, Any]) -> None:
        if different not in self.known:
            recorded = Directory(self.folder).environment()
            accept_differences(
                recorded, different, f"{self.folder}, on another node,", mixed=self.mixed
            )
            self.known.append(different)

    def _start_worker(self) -> None:
        actor = self.start_worker()
        self.workers_alive.append(_WorkerHandle(actor, actor.elsewhere.remote()))

    def _give(self, worker: _WorkerHandle) -> None:
        busy = Counter(other.label for other in self.workers_alive if other.label is not None)
        while len(worker.doing) < AHEAD:
            work = self.queue.next(worker.label, busy)
            if work is None:
                return
            worker.label = work.model.label
            # As the dashboard shows it.
            name = f"{worker.label}: {len(work.batch)} cells, {work.batch.tokens} tokens"
            measured = worker.actor.measured.options(name=name)
            worker.doing[measured.remote(worker.label, work.batch)] = work

    def _replace(self, worker: _WorkerHandle, error: Exception) -> Iterator[Done]:
        """A worker was lost: its work goes to another, unless it is the work that kills."""
        self.workers_alive.remove(worker)
        self.failures += 1
        why = _message(error)
        if self.failures > TRIES:
            raise ModelError(
                f"{self.failures} workers in a row were lost; the last error: {why}",
                code="workers-lost",
                workers=self.failures,
                reason=why,
            )
        for n, work in enumerate(worker.doing.values()):
            self.lost[work.batch.id] += n == 0  # the others were waiting behind it
            if self.lost[work.batch.id] < TRIES:
                self.queue.back(work)
            else:
                failed = {cell.prompt: f"{TRIES} workers were lost: {why}" for cell in work.batch}
                yield Done(work, (), failed, None)
        self._start_worker()


@contextmanager
def _cluster(address: str, cpus: int | None) -> Iterator[Any]:
    """Ray, connected; afterwards not."""
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray
    except ImportError as error:
        raise missing_package("--ray", "ray", "ray") from error
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        options |= {"num_cpus": cpus, "object_store_memory": 256 * 2**20}
        options |= {"include_dashboard": None if _has_dashboard() else False}
    else:
        options["address"] = address
    with _same_signals():
        try:
            ray.init(**options)
        except (Exception, SystemExit) as error:
            raise InputError(
                f"no Ray cluster at {address!r}: {_message(error)}",
                code="no-ray-cluster",
                address=address,
            ) from error
    try:
        yield ray
    finally:
        with _same_signals():
            ray.shutdown()


def _message(error: BaseException) -> str:
    """The end of what Ray says, which is where the cause is, without its colours."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())[-400:]


def _has_dashboard() -> bool:
    from importlib.util import find_spec

    return find_spec("aiohttp_cors") is not None


def _check_address(address: str) -> None:
    """Ray itself would try for minutes."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(
            f"--ray {address!r} is not an address; known: HOST:PORT of a cluster, auto for the "
            f"cluster on this machine, {LOCAL} (the default) for a cluster that is started for "
            "this run",
            code="bad-address",
            address=address,
        )
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_WITHIN).close()
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"no Ray cluster answers at {address!r} ({error}); start one with `ray start --head`, "
            "or leave the address out for one on this machine",
            code="no-ray-cluster",
            address=address,
        ) from error


@contextmanager
def _same_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
