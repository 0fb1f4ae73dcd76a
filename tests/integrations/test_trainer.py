"""`TrainerCallback`: the training is not changed, and the run has what `watch` measures."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from polars.testing import assert_frame_equal
from torch import Tensor, distributed, nn
from torch.multiprocessing import spawn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers import TrainerCallback as HubCallback

import attnscope
from attnscope.errors import AttnscopeWarning, InputError, ModelError
from attnscope.figures import draw
from attnscope.integrations import training_run
from attnscope.stats.run_stats import compare_run
from made_models import save_tokenizer
from support_errors import raises

PROMPTS = ["Tom has 12 apples.", "If x = 3 and y > 2, then", "bread and milk", "What is 30 + 48?"]
PROMPTS += ["the old house near the river", "# Title", "12 - 5 = 7", "bread and salt and rice"]
PROMPTS = [f"<s>{text}" for text in PROMPTS]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(made, None)
    return made


def build(tokenizer: Any, dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def rows(tokenizer: Any) -> list[dict[str, Tensor]]:
    draw_ids = torch.Generator().manual_seed(0)
    ids = torch.randint(5, len(tokenizer), (32, 12), generator=draw_ids)
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(
    folder: Path, out: Path, callbacks: list[Any], *, model: Any = None, **more: Any
) -> tuple[Trainer, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = build(tokenizer) if model is None else model
    resume = more.pop("resume", None)
    arguments: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    settings = TrainingArguments(str(out), **{**arguments, **more})
    trainer = Trainer(
        model,
        settings,
        train_dataset=rows(tokenizer),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, tokenizer


def weights(trainer: Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
        {"bf16": True},
    ],
    ids=["plain", "accumulation-checkpointing", "autocast"],
)
def test_training_is_not_changed(folder: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    plain, _ = trained(folder, tmp_path / "plain", [], **more)
    sampled: dict[str, Any] = {"measures": ["entropy"], "queries": ["all", "sample:4"]}
    callback = attnscope.TrainerCallback(every=1, prompts=PROMPTS, **sampled)
    probed, _ = trained(folder, tmp_path / "probed", [callback], **more)
    for one, other in zip(weights(plain), weights(probed), strict=True):
        assert torch.equal(one, other)
    losses = [e["loss"] for e in plain.state.log_history if "loss" in e]
    assert losses == [e["loss"] for e in probed.state.log_history if "loss" in e]
    assert len(attnscope.open_run(tmp_path / "probed" / "attention").experiment.models) == 5


def test_the_run_has_what_watch_measures(folder: Path, tmp_path: Path) -> None:
    measures = ["entropy", "first_token", "max_logit"]
    callback = attnscope.TrainerCallback(every=3, prompts=PROMPTS, layers=[0, 2])
    trainer, tokenizer = trained(folder, tmp_path, [callback])
    run = attnscope.open_run(tmp_path / "attention")
    assert run.complete
    assert list(run.experiment.models) == ["step 0", "step 3", "step 4"]
    trainer.model.eval()
    frame = run.values.filter(model="step 4").collect()
    assert set(frame["layer"]) == {0, 2}
    for number, prompt in enumerate(PROMPTS):
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad(), attnscope.watch(trainer.model, max_logit=True) as scope:
            trainer.model(input_ids=inputs.input_ids)
        for measure in measures:
            stored = frame.filter(prompt=number, layer=2, measure=measure).sort("head")
            expected = scope.measure(measure, 2)[0].double()
            torch.testing.assert_close(
                torch.from_numpy(stored["value"].to_numpy().copy()), expected, rtol=1e-4, atol=1e-5
            )
    compared = compare_run(run, pair=("step 0", "step 4"))
    assert compared["paired"].all()
    assert set(compared["n"]) == {len(PROMPTS)}
    figure = draw(run, "over-steps")
    assert figure.data["training_step"].unique().to_list() == [0, 3, 4]
    value = frame.filter(measure="entropy", layer=0)["value"].mean()
    drawn = figure.data.filter(measure="entropy", layer=0, training_step=4)["value"]
    assert drawn.to_list() == pytest.approx([value], rel=1e-4)


class Tracker(HubCallback):
    """Stands for Weights & Biases or TensorBoard: they get numbers in `on_log`."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append({"step": state.global_step, **logs})


def test_numbers_reach_the_history_and_the_trackers(folder: Path, tmp_path: Path) -> None:
    callback = attnscope.TrainerCallback(every=2, prompts=PROMPTS, measures=["mass", "entropy"])
    trainer, _ = trained(folder, tmp_path / "one", [callback])
    logged = [e for e in trainer.state.log_history if "attention/entropy/mean" in e]
    assert [entry["step"] for entry in logged] == [0, 2, 4]
    values = attnscope.open_run(tmp_path / "one" / "attention").values.collect()
    last = values.filter(model="step 4", measure="entropy")["value"]
    assert logged[-1]["attention/entropy/mean"] == pytest.approx(last.mean())
    assert logged[-1]["attention/entropy/max"] == last.max()
    word = values.filter(model="step 4", measure="mass", item="word")["value"]
    assert logged[-1]["attention/mass/word/mean"] == pytest.approx(word.mean())

    tracker, tokenizer = Tracker(), AutoTokenizer.from_pretrained(folder)
    settings = TrainingArguments(
        str(tmp_path / "two"), max_steps=2, report_to="none", disable_tqdm=True, use_cpu=True
    )
    settings.dataloader_pin_memory = False
    other = Trainer(
        build(tokenizer),
        settings,
        train_dataset=rows(tokenizer),
        processing_class=tokenizer,
        callbacks=[tracker],
    )
    other.add_callback(attnscope.TrainerCallback(every=2, prompts=PROMPTS, trainer=other))
    other.train()
    tracked = [e for e in tracker.logs if "attention/max_logit/max" in e]
    assert [entry["step"] for entry in tracked] == [0, 2]
    history = [e for e in other.state.log_history if "attention/max_logit/max" in e]
    assert [entry["step"] for entry in history] == [0, 2]


@pytest.mark.slow
def test_a_resumed_training_continues_its_run(folder: Path, tmp_path: Path) -> None:
    def callback() -> Any:
        return attnscope.TrainerCallback(every=1, prompts=PROMPTS)

    saving = {"save_strategy": "steps", "save_steps": 2}
    trained(folder, tmp_path, [callback()], **saving)
    run = attnscope.open_run(tmp_path / "attention")
    before, files = run.values.collect(), {p.name for p in run.path.glob("cells/*")}
    checkpoint = str(tmp_path / "checkpoint-2")
    trained(folder, tmp_path, [callback()], resume=checkpoint, **saving)
    again = attnscope.open_run(tmp_path / "attention")
    assert again.complete
    assert {p.name for p in run.path.glob("cells/*")} == files
    assert_frame_equal(again.values.collect(), before)

    with raises(InputError, "other-training"):  # from the start, into the same folder
        trained(folder, tmp_path, [callback()])
    other = attnscope.TrainerCallback(every=1, prompts=PROMPTS[:5])
    with raises(InputError, "other-training", keys=["prompts"]):
        trained(folder, tmp_path, [other], resume=checkpoint)
    assert_frame_equal(attnscope.open_run(tmp_path / "attention").values.collect(), before)


@pytest.mark.slow
def test_what_was_not_written_whole_is_left_out(folder: Path, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    trained(folder, tmp_path, [attnscope.TrainerCallback(every=1, prompts=PROMPTS)], **saving)
    run = attnscope.open_run(tmp_path / "attention")
    damaged = next(batch for batch in run.batches if "step 1" in batch.cells[0])
    damaged.file(run.path, "values").unlink()
    callback = attnscope.TrainerCallback(every=1, prompts=PROMPTS)
    checkpoint = str(tmp_path / "checkpoint-3")
    trained(folder, tmp_path, [callback], resume=checkpoint, **saving)
    again = attnscope.open_run(tmp_path / "attention")
    assert list(again.experiment.models) == ["step 0", "step 2", "step 3", "step 4"]
    again.verify()


class Broken(HubCallback):
    """From the first step on, nothing can be measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        def failing(*args: Any) -> Any:
            raise MemoryError("too large")

        self.monkeypatch.setattr(training_run, "measure_batch", failing)


def test_a_late_failure_warns_and_an_early_one_stops(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = attnscope.TrainerCallback(every=2, prompts=PROMPTS)
    with pytest.warns(AttnscopeWarning) as caught:
        trained(folder, tmp_path / "late", [callback, Broken(monkeypatch)])
    assert len([w for w in caught if "out of memory" in str(w.message)]) == 3  # 2, 4, the end
    run = attnscope.open_run(tmp_path / "late" / "attention")
    assert run.complete
    assert list(run.experiment.models) == ["step 0"]
    with raises(ModelError, "probe-failed"):
        trained(folder, tmp_path / "early", [attnscope.TrainerCallback(prompts=PROMPTS)])


class Modes(HubCallback):
    """Freezes a layer in evaluation mode, and notes the modes at every step."""

    def __init__(self) -> None:
        self.seen: list[list[bool]] = []

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.seen.append([module.training for module in model.modules()])


def test_modules_keep_their_mode(folder: Path, tmp_path: Path) -> None:
    plain, probed = Modes(), Modes()
    trained(folder, tmp_path / "plain", [plain])
    callback = attnscope.TrainerCallback(every=1, prompts=PROMPTS)
    trained(folder, tmp_path / "probed", [callback, probed])
    assert plain.seen == probed.seen
    assert any(plain.seen[0])


def test_an_adapter_is_measured_while_it_trains(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = build(AutoTokenizer.from_pretrained(folder), dropout=0.0)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "k_proj"], r=4))
    callback = attnscope.TrainerCallback(every=4, prompts=PROMPTS, measures=["entropy"])
    trained(folder, tmp_path, [callback], model=wrapped, learning_rate=0.1)
    values = attnscope.open_run(tmp_path / "attention").values.collect()
    first, last = (values.filter(model=f"step {n}")["value"] for n in (0, 4))
    assert (first - last).abs().max() > 1e-4  # type: ignore[operator]


@pytest.mark.slow
def test_bad_arguments_are_refused(folder: Path, tmp_path: Path) -> None:
    with raises(InputError, "bad-interval", value=0):
        attnscope.TrainerCallback(every=0, prompts=PROMPTS)
    for key, code in (("dtype", "fixed-key"), ("models", "fixed-key")):
        with raises(InputError, code, value=key):
            trained(folder, tmp_path, [attnscope.TrainerCallback(prompts=PROMPTS, **{key: "x"})])
    with pytest.raises(InputError):
        trained(folder, tmp_path, [attnscope.TrainerCallback(prompts=PROMPTS, layers=[7])])
    trainer = Trainer(build(AutoTokenizer.from_pretrained(folder)))
    callback = attnscope.TrainerCallback(prompts=PROMPTS)
    with raises(InputError, "needs-tokenizer"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, trainer.model)
    assert not (tmp_path / "attention").exists()


def test_divided_weights_are_refused(folder: Path) -> None:
    model = build(AutoTokenizer.from_pretrained(folder))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach())
    model.lm_head.weight.ds_id = 0  # as DeepSpeed marks a divided one
    trainer = Trainer(model)
    callback = attnscope.TrainerCallback(prompts=PROMPTS)
    with raises(ModelError, "divided-weights"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model)


def _one_of_two(rank: int, folder: str, out: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    meeting = f"file://{out}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    warnings.simplefilter("ignore")
    callback = attnscope.TrainerCallback(every=2, prompts=PROMPTS, out=Path(out) / "attention")
    trainer, _ = trained(Path(folder), Path(out) / "trainer", [callback], ddp_backend="gloo")
    torch.save(weights(trainer), Path(out) / f"weights-{rank}.pt")
    measured = [e for e in trainer.state.log_history if "attention/entropy/mean" in e]
    assert len(measured) == (3 if rank == 0 else 0)
    distributed.destroy_process_group()


@pytest.mark.slow
def test_of_two_processes_the_first_measures(folder: Path, tmp_path: Path) -> None:
    spawn(_one_of_two, (str(folder), str(tmp_path)), nprocs=2)
    one, other = (torch.load(tmp_path / f"weights-{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    run = attnscope.open_run(tmp_path / "attention")
    assert run.complete
    assert list(run.experiment.models) == ["step 0", "step 2", "step 4"]
