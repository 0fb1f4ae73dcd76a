"""Work that takes long, one piece at a time: a queue with places, which can be left again.

One thread does all that touches a model, so that two people never disturb each other's pass. This
module must not know what the work is.
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

LOOK_UP = 0.5
"""Seconds in which work that is called off at the end may still end by itself."""
REMEMBERED = 256
"""How many pieces of work that are over can still be asked about."""


class BusyError(AttnscopeError):
    """There is no more room in the queue."""


class GoneError(AttnscopeError):
    """What is asked for is not, or no longer, there."""


class StoppedError(AttnscopeError):
    """The work was called off."""


@dataclass(eq=False)
class Job:
    """One piece of work."""

    work: Callable[[Job], Any]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(9))
    state: State = "waiting"
    said: str = ""
    """What it is doing, or why it failed."""
    done: int = 0
    of: int = 0
    """Steps that are behind it, of how many."""
    result: Any = None
    """What came of it; while it runs, what can be looked at already."""
    error: AttnscopeError | None = None
    """Why it failed."""
    _called_off: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)

    def say(self, what: str) -> None:
        """Tell what is being done; ends here if the work was called off."""
        self.said = what
        self.check()

    def check(self) -> None:
        """End here if the work was called off."""
        if self._called_off.is_set():
            raise StoppedError("called off")


class Queue:
    """Jobs in the order they came, at most `room` of them waiting."""

    def __init__(self, room: int = 8):
        self.room = room
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._known: OrderedDict[str, Job] = OrderedDict()
        self._change = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="attnscope-work", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Job], Any]) -> Job:
        """Put work at the end of the queue."""
        with self._change:
            if not self._open:
                raise GoneError("the server is stopping and takes no more work")
            if len(self._waiting) >= self.room:
                raise BusyError(
                    f"busy: {len(self._waiting)} others are waiting already; try again in a moment"
                )
            job = Job(work)
            self._waiting[job.id] = self._known[job.id] = job
            while len(self._known) > REMEMBERED + self.room:
                oldest = next(iter(self._known))
                if self._known[oldest].state in ("waiting", "running"):
                    break
                del self._known[oldest]
            self._change.notify()
        return job

    def result(self, work: Callable[[Job], Any]) -> Any:
        """Put work at the end of the queue, wait for it, and return its result."""
        job = self.submit(work)
        job._over.wait()
        if job.state != "done":
            raise job.error or GoneError("called off")
        return job.result

    def find(self, id: str) -> tuple[Job, int]:
        """A job, and how many are in front of it."""
        with self._change:
            if id not in self._known:
                raise GoneError("there is no such job, or it was over long ago")
            job = self._known[id]
            place = list(self._waiting).index(id) + 1 if id in self._waiting else 0
            return job, place

    def cancel(self, id: str) -> None:
        """Call a job off: at once if it waits, at its next step if it runs."""
        job, _ = self.find(id)
        with self._change:
            job._called_off.set()
            if self._waiting.pop(id, None) is not None:
                job.state = "cancelled"
                job._over.set()

    def close(self) -> None:
        """Take no more work, and call off what there is. What does not look up in time is left:
        its thread goes with the process."""
        with self._change:
            self._open = False
            for job in self._known.values():
                job._called_off.set()
                job._over.set()
            self._waiting.clear()
            self._change.notify()
        self._thread.join(timeout=LOOK_UP)

    def _run(self) -> None:
        while True:
            with self._change:
                while self._open and not self._waiting:
                    self._change.wait()
                if not self._open:
                    return
                _, job = self._waiting.popitem(last=False)
                job.state = "running"
            state: State = "failed"
            try:
                job.result = job.work(job)
                state, said = "done", ""
            except StoppedError:
                state, said = "cancelled", "called off"
            except AttnscopeError as error:
                said, job.error = str(error), error
            except MemoryError:
                said = "out of memory: a shorter text or a smaller model may fit"
            except Exception as error:  # the page lives on, and says what it was
                where = "out of memory" if "memory" in str(error).lower() else type(error).__name__
                said = f"{where}: {' '.join(str(error).split())[:300]}"
            if state != "done":
                job.result = None
            if state == "failed" and job.error is None:
                job.error = AttnscopeError(said)
            job.said, job.state = said, state
            job._over.set()
