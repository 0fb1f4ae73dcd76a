"""A queue of long jobs, run one after another by one thread; a job can be cancelled.

One thread runs everything that uses a model, so that two forward passes never overlap.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from attnscope.errors import AttnscopeError

State = Literal["waiting", "running", "done", "failed", "cancelled"]

SHUTDOWN_SECONDS = 0.5
"""How long `close` waits for the running job to end."""
REMEMBERED = 256
"""How many jobs that have ended keep their results."""


class BusyError(AttnscopeError):
    """The queue is full."""

    code = "queue-full"


class GoneError(AttnscopeError):
    """The requested object does not exist, or no longer."""

    code = "gone"


class StoppedError(AttnscopeError):
    """The job was cancelled."""

    code = "cancelled"


@dataclass(eq=False)
class Job:
    """One job of the queue."""

    work: Callable[[Job], Any]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(9))
    state: State = "waiting"
    message: str = ""
    """What the job does now, or why it failed."""
    done: int = 0
    total: int = 0
    """Finished steps and all steps; both 0 if unknown."""
    result: Any = None
    """The result; while the job runs, what is available so far."""
    error: AttnscopeError | None = None
    """Why the job failed."""
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def code(self) -> str | None:
        """The code of the error, if the job failed."""
        return None if self.error is None else self.error.code

    def report(self, message: str) -> None:
        """Set the message; raises StoppedError if the job was cancelled."""
        self.message = message
        self.check()

    def check(self) -> None:
        """Raise StoppedError if the job was cancelled."""
        if self._cancelled.is_set():
            raise StoppedError("the job was cancelled")


class Queue:
    """Jobs in order of arrival; at most `capacity` of them wait."""

    def __init__(self, capacity: int = 8):
        self.capacity = capacity
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._known: OrderedDict[str, Job] = OrderedDict()
        self._change = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="attnscope-work", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Job], Any]) -> Job:
        """Append a job to the queue."""
        with self._change:
            if not self._open:
                raise GoneError("the server is stopping and accepts no jobs", code="stopping")
            if len(self._waiting) >= self.capacity:
                raise BusyError(
                    f"the server is busy: {len(self._waiting)} jobs are waiting; try again later",
                    waiting=len(self._waiting),
                )
            job = Job(work)
            self._waiting[job.id] = self._known[job.id] = job
            while len(self._known) > REMEMBERED + self.capacity:
                oldest = next(iter(self._known))
                if self._known[oldest].state in ("waiting", "running"):
                    break
                del self._known[oldest]
            self._change.notify()
        return job

    def result(self, work: Callable[[Job], Any]) -> Any:
        """Append a job to the queue, wait for it, and return its result."""
        job = self.submit(work)
        job._ended.wait()
        if job.state != "done":
            raise job.error or GoneError("the job was cancelled", code="cancelled")
        return job.result

    def find(self, id: str) -> tuple[Job, int]:
        """A job and its position in the queue, from 1; 0 if it does not wait."""
        with self._change:
            if id not in self._known:
                raise GoneError(
                    f"there is no job {id!r}, or it ended long ago", code="unknown-job", job=id
                )
            job = self._known[id]
            position = list(self._waiting).index(id) + 1 if id in self._waiting else 0
            return job, position

    def cancel(self, id: str) -> None:
        """Cancel a job: at once if it waits, at its next step if it runs."""
        job, _ = self.find(id)
        with self._change:
            job._cancelled.set()
            if self._waiting.pop(id, None) is not None:
                job.state = "cancelled"
                job._ended.set()

    def close(self) -> None:
        """Accept no more jobs and cancel all others.

        A job that does not end in time is left to the end of the process: its thread is a daemon.
        """
        with self._change:
            self._open = False
            for job in self._known.values():
                job._cancelled.set()
                job._ended.set()
            self._waiting.clear()
            self._change.notify()
        self._thread.join(timeout=SHUTDOWN_SECONDS)

    def _run(self) -> None:
        while True:
            with self._change:
                while self._open and not self._waiting:
                    self._change.wait()
                if not self._open:
                    return
                _, job = self._waiting.popitem(last=False)
                job.state = "running"
            _run_job(job)


def _run_job(job: Job) -> None:
    """Run a job and record its result or its error; the thread of the queue goes on."""
    state: State = "failed"
    message = ""
    try:
        job.result = job.work(job)
        state = "done"
    except StoppedError as error:
        state, message = "cancelled", str(error)
    except AttnscopeError as error:
        message, job.error = str(error), error
    except MemoryError:
        message = "out of memory: use a shorter text or a smaller model"
        job.error = AttnscopeError(message, code="out-of-memory")
    except Exception as error:
        full = "memory" in str(error).lower()
        name = "out of memory" if full else type(error).__name__
        message = f"{name}: {' '.join(str(error).split())[:300]}"
        job.error = AttnscopeError(message, code="out-of-memory" if full else "internal-error")
    if state != "done":
        job.result = None
    job.message, job.state = message, state
    job._ended.set()
