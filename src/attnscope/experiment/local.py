"""Measuring in this process: model by model, batch by batch.

Failures are returned, not raised, so that one prompt or one model does not end a run. Ctrl-C ends
it.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attnscope.errors import InputError, ModelError
from attnscope.experiment.executor import Done, Work
from attnscope.experiment.measuring_environment import describe_model
from attnscope.experiment.plan import ModelPlan, Plan
from attnscope.experiment.results import measure_batch
from attnscope.experiment.split_retry import NO_MEMORY, one_line, split_and_retry
from attnscope.experiment.vllm_model import VllmModel, describe_vllm, load_vllm

LOAD_WITHIN = 3600.0
"""Seconds that a model may take to load: a disk or a connection that hangs must not stop a run."""
GIVE_UP = 3
"""After so many batches in a row of which nothing could be measured, the rest of a model's are not
tried: what fails so is the model. Want of memory does not count, since shorter prompts may fit."""


def local(
    plan: Plan,
    pending: Sequence[Work],
    *,
    threads: int,
    load_within: float = LOAD_WITHIN,
    model: Any = None,
) -> Generator[Done, None, None]:
    """Load each model once and send its batches through it; `model` is the plan's only model, if
    it is loaded already."""
    with _threads(threads):
        measure = Measurer(plan, threads, load_within, model)
        try:
            for of_model in plan.models:
                for work in [work for work in pending if work.model is of_model]:
                    yield measure(work)
        finally:
            measure.close()


class Measurer:
    """Measures batches, with one model at a time in memory."""

    def __init__(
        self, plan: Plan, threads: int, load_within: float = LOAD_WITHIN, model: Any = None
    ):
        self.plan = plan
        self.threads = threads
        self.load_within = load_within
        self.model = self._preloaded = model
        self.about: dict[str, Any] | None = None
        self._loaded: ModelPlan | None = None
        self._broken = ""  # why the model is not tried any more
        self._failures = 0  # batches in a row of which nothing could be measured

    def __call__(self, work: Work) -> Done:
        """A batch, measured as far as it can be."""
        if self._loaded is not work.model:
            self._load(work.model)
        if self._broken:
            failed = {cell.prompt: self._broken for cell in work.batch}
            return Done(work, (), failed, self.about)
        parts, failed = split_and_retry(
            work.batch,
            lambda part: measure_batch(self.plan.experiment, work.model, self.model, part),
        )
        tried = [why for why in failed.values() if not why.startswith(NO_MEMORY)]
        self._failures = self._failures + 1 if tried and not parts else 0
        if self._failures >= GIVE_UP:
            self._broken = f"not tried, after {GIVE_UP} batches failed: {tried[0]}"
        return Done(work, tuple(parts), failed, self.about)

    def _load(self, of_model: ModelPlan) -> None:
        self.close()  # free the memory of the previous model
        self._loaded, self._broken, self._failures = of_model, "", 0
        try:
            self.model, self.about = self._within(
                lambda: _load(self.plan, of_model, self._preloaded), of_model
            )
        except Exception as error:
            self._broken = f"model {of_model.label!r}: {one_line(error)}"

    def close(self) -> None:
        """Let go of the model; an engine ends."""
        if isinstance(self.model, VllmModel):
            self.model.close()
        self.model = self.about = None

    def _within(self, load: Callable[[], Any], of_model: ModelPlan) -> Any:
        """What `load` gives, if it does so in time. Nothing can end a thread that hangs, so it is
        left behind."""
        loaded: list[Any] = []
        errors: list[BaseException] = []

        def beside() -> None:
            try:
                with _threads(self.threads):
                    loaded.append(load())
            except BaseException as error:  # a SystemExit would end the thread without a word
                errors.append(error)

        thread = threading.Thread(target=beside, name="attnscope-loading", daemon=True)
        thread.start()
        thread.join(self.load_within)
        if errors and isinstance(errors[0], SystemExit):
            raise ModelError(
                f"the code that loads {of_model.info.name!r} ended with exit status "
                f"{errors[0].code!r}; load the model by itself to see why",
                code="loader-exited",
                status=errors[0].code,
            ) from errors[0]
        if errors:
            raise errors[0]
        if not loaded:
            raise ModelError(
                f"{of_model.info.name!r} was not loaded within {self.load_within:.0f} seconds; is "
                "its disk or connection there? Allow more with --load-within",
                code="load-timeout",
                seconds=self.load_within,
            )
        return loaded[0]


def _load(plan: Plan, of_model: ModelPlan, model: Any) -> tuple[Any, dict[str, Any]]:
    from attnscope.loading import find, load_text_model
    from attnscope.scope.watch import watch

    experiment = plan.experiment
    if experiment.engine == "vllm":
        model = load_vllm(plan, of_model)
    elif model is None:
        device, dtype = experiment.device, experiment.dtype
        name = of_model.info.pinned
        model, _ = load_text_model(name, device=device, dtype=dtype, bos=experiment.bos)
    if find(of_model.info.pinned).revision != of_model.info.revision:
        raise InputError(
            f"the files of model {of_model.label!r} ({of_model.info.name}) changed while it was "
            "loaded; wait until they are complete and start again",
            code="model-changed",
            model=of_model.label,
        )
    if experiment.engine == "vllm":
        return model, describe_vllm(of_model, model)
    layers = None if of_model.layers is None else list(of_model.layers)
    with watch(model, layers=layers, backend=experiment.backend) as scope:
        backend = scope.backend  # no pass: only to see that the layers exist, and what measures
    return model, describe_model(of_model, model, backend)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """So many threads inside, as many as before afterwards."""
    import torch

    before = torch.get_num_threads()
    if number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
