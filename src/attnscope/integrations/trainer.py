"""`TrainerCallback`: measures attention on fixed prompts while a transformers `Trainer` trains."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from attnscope.errors import AttnscopeError, AttnscopeWarning, InputError, ModelError
from attnscope.integrations.training_run import TrainingRun
from attnscope.tokens.find_text import check_tokenizer

LOGGED = "attention"
"""How the names of the logged numbers begin."""


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Measure attention on the same prompts again and again while a model trains.

    Give it to a `Trainer` of transformers, or of a library that builds on it, such as TRL. It
    measures before the first step, after every `every` steps, and after the last one. Training is
    not changed: the weights are bit for bit those of a training without it. Between two probes it
    costs nothing; a probe costs one forward pass over the prompts and its reduction.

    The numbers go to two places. `out` is a run directory with a model label for every measured
    step ("step 0", "step 100"), which `compare`, figures (`over-steps`) and `open_run` read. The
    mean and the largest value of each measure go to `state.log_history`; with `trainer`, also to
    its trackers.

    In distributed training, the first process measures and the others wait for it. A model whose
    weights are divided among processes (FSDP, DeepSpeed stage 3, tensor parallel) is refused.

    Args:
        every: Measure after so many steps.
        prompts: A list of texts, or the `prompts` of an experiment (docs/experiments.md).
        measures: Names of measures (`attnscope run --help` lists them).
        out: The run directory; default: `attention` in the Trainer's output folder.
        tokenizer: Default: the `processing_class` of the Trainer.
        trainer: The Trainer, if its trackers (Weights & Biases, TensorBoard) shall get the numbers
            too: `trainer.add_callback(attnscope.TrainerCallback(…, trainer=trainer))`.
        **keys: Further keys of an experiment, such as `layers=[0, 4, 8]` or `chat=False`.

    Raises:
        InputError: When the training begins: a key has a wrong value, there is no tokenizer, or
            the folder holds the run of another training.
        ModelError: When the training begins: the model cannot be measured. A later probe that
            fails gives a warning, and training goes on.

    Examples:
        >>> import attnscope, transformers
        >>> model, tokenizer = attnscope.load("zoo:chat-llama")
        >>> rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 8
        >>> callback = attnscope.TrainerCallback(every=2, prompts=["Tom has 12 apples.", "Hi."])
        >>> trainer = transformers.Trainer(
        ...     model,
        ...     transformers.TrainingArguments(
        ...         "out", max_steps=4, disable_tqdm=True, dataloader_pin_memory=False
        ...     ),
        ...     train_dataset=rows,
        ...     processing_class=tokenizer,
        ...     callbacks=[callback],
        ... )
        >>> trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        TrainOutput(global_step=4, ...)
        >>> list(attnscope.open_run("out/attention").experiment.models)
        ['step 0', 'step 2', 'step 4']
    """

    def __init__(
        self,
        *,
        every: int = 100,
        prompts: Any,
        measures: Sequence[str] = ("entropy", "first_token", "max_logit"),
        out: str | Path | None = None,
        tokenizer: Any = None,
        trainer: Any = None,
        **keys: Any,
    ):
        if type(every) is not int or every < 1:
            raise InputError(
                f"every must be a number of steps, 1 or more, not {every!r}",
                code="bad-interval",
                value=every,
            )
        self.every = every
        self._keys = {"prompts": prompts, "measures": list(measures), **keys}
        self._out, self._tokenizer, self._trainer = out, tokenizer, trainer
        self._run: TrainingRun | None = None
        self._last: int | None = None  # the last measured step

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Check everything, and measure the model as it is."""
        _refuse_divided(model)
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / "attention" if self._out is None else Path(self._out)
        chosen = self._tokenizer or kwargs.get("processing_class")
        if chosen is None:
            raise InputError(
                "the Trainer has no processing_class; give it one, or tokenizer=… to "
                "TrainerCallback",
                code="needs-tokenizer",
            )
        self._run, self._last = (
            TrainingRun(folder, model, check_tokenizer(chosen), self._keys),
            None,
        )
        self._run.start(state.global_step)
        self._probe(state, model)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Measure, if it is time."""
        if state.global_step % self.every == 0:
            self._try_probe(state, model)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Measure the trained model, unless the last step was measured."""
        self._try_probe(state, model)
        self._run = None

    def _try_probe(self, state: Any, model: Any) -> None:
        if self._run is None or self._last == state.global_step:
            return
        try:
            self._probe(state, model)
        except (AttnscopeError, OSError) as error:  # days of training are worth more than a probe
            warnings.warn(
                f"attention was not measured at step {state.global_step}, and training goes on: "
                f"{error}",
                AttnscopeWarning,
                stacklevel=2,
            )

    def _probe(self, state: Any, model: Any) -> None:
        assert self._run is not None
        with _in_evaluation_mode(model):
            values = self._run.probe(model, state.global_step)
        self._last = state.global_step
        logs = summary(values)
        if self._trainer is not None:
            self._trainer.log(logs)
        else:
            state.log_history.append(logs | {"epoch": state.epoch, "step": state.global_step})


def summary(values: pl.DataFrame) -> dict[str, float]:
    """The mean and the largest value of each measure, over prompts, layers and heads."""
    by = ["measure", "item"]
    first = values.filter(
        pl.col("target").is_null(),
        *(pl.col(name) == values[name][0] for name in ("condition", "queries")),
        pl.col("keys") == pl.col("keys").first().over(by),
        pl.col("classes").eq_missing(pl.col("classes").first().over(by)),
    )
    by_measure = first.group_by(by, maintain_order=True).agg(
        mean=pl.col("value").mean(), max=pl.col("value").max()
    )
    return {
        "/".join(filter(None, (LOGGED, row["measure"], row["item"], name))): row[name]
        for row in by_measure.iter_rows(named=True)
        for name in ("mean", "max")
        if row[name] is not None
    }


@contextmanager
def _in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _refuse_divided(model: nn.Module) -> None:
    """Refuse a model of which each process has a part: one process alone cannot run it."""
    divided = any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())
    wrapped = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())
    if divided or wrapped:
        raise ModelError(
            "the weights are divided among processes (FSDP, DeepSpeed stage 3 or tensor parallel), "
            "and TrainerCallback measures in the first process alone; train with DDP, or "
            "measure saved checkpoints with attnscope run",
            code="divided-weights",
        )
