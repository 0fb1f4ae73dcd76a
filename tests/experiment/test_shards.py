"""What cannot be measured does not end a run: parts, failures, stopping, loading that hangs."""

import errno
import json
import os
import signal
import sys
import threading

import pytest
import torch

import attnscope
from attnscope.cli import main
from attnscope.errors import ConservationError, InputError, ModelError
from attnscope.experiment import local
from attnscope.experiment.execute import run, run_plan
from attnscope.experiment.plan import make_plan
from attnscope.spec.experiment_yaml import experiment_to_yaml
from made_models import save_model
from run_bytes import bytes_of
from support_errors import raises


def prompts_of(batch):
    return {cell.prompt for cell in batch}


@pytest.fixture
def failing(monkeypatch):
    """Let some batches fail: `failing(lambda batch: an error or None)`; gives what was tried."""
    measure = local.measure_batch

    def make(why):
        tried = []

        def measured(experiment, plan, model, batch):
            tried.append(prompts_of(batch))
            error = why(batch)
            if error is not None:
                raise error
            return measure(experiment, plan, model, batch)

        monkeypatch.setattr(local, "measure_batch", measured)
        return tried

    return make


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory"
        ),
    ],
)
def test_out_of_memory_halves_the_batch(small, tmp_path, failing, error):
    asked = small(batch_tokens=2048)  # one batch
    run(asked, tmp_path / "whole")
    tried = failing(lambda batch: error if len(prompts_of(batch)) > 2 else None)
    outcome = run(asked, tmp_path / "run")
    assert [len(prompts) for prompts in tried] == [6, 3, 1, 2, 3, 1, 2]
    assert outcome.complete
    assert not outcome.failed
    halved, whole = (attnscope.open_run(tmp_path / name) for name in ("run", "whole"))
    assert [batch.parts for batch in halved.batches] == [4]  # recorded
    assert [batch.parts for batch in whole.batches] == [1]
    assert halved.cells.equals(whole.cells)
    assert halved.tokens.collect().equals(whole.tokens.collect())
    one, other = halved.values.collect(), whole.values.collect()
    assert one.drop("value", "uniform").equals(other.drop("value", "uniform"))
    assert (one["value"] - other["value"]).abs().max() < 1e-6
    assert run(asked, tmp_path / "run").measured == 0


def test_a_cell_that_fails_is_recorded_and_the_others_finish(small, tmp_path, failing, monkeypatch):
    asked = small()
    run(asked, tmp_path / "whole")
    whole = attnscope.open_run(tmp_path / "whole")
    with monkeypatch.context():
        failing(lambda batch: ConservationError("no sum") if 3 in prompts_of(batch) else None)
        outcome = run(asked, tmp_path / "run")
    opened = attnscope.open_run(tmp_path / "run")
    assert not outcome.complete
    assert not opened.complete
    assert (outcome.cells, outcome.measured) == (12, 10)
    assert sorted({(one.prompt, one.error) for one in opened.failed}) == [(3, "no sum")]
    assert {one.cell: one.error for one in opened.failed} == outcome.failed
    gone = {one.cell for one in opened.failed}
    assert set(opened.cells["cell"]) == set(whole.cells["cell"]) - gone
    assert 3 not in opened.values.collect()["prompt"]


def test_what_failed_is_tried_again(small, tmp_path, monkeypatch):
    run(small(), tmp_path / "whole")
    measure = local.measure_batch

    def one_fails(experiment, plan, model, batch):
        if 3 in prompts_of(batch):
            raise ZeroDivisionError("nothing of mine")
        return measure(experiment, plan, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(local, "measure_batch", one_fails)
        outcome = run(small(), tmp_path / "run")
    assert all("ZeroDivisionError: nothing of mine (test_shards.py, line" in why
               for why in outcome.failed.values())  # fmt: skip
    assert run(small(), tmp_path / "run").complete
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "whole")


def test_a_model_that_always_fails_is_given_up(small, tmp_path, failing):
    tried = failing(lambda batch: ConservationError("never"))
    with raises(ModelError, "nothing-measured"):
        run(small(batch_tokens=128), tmp_path / "run")
    assert len(tried) == 3
    failed = attnscope.open_run(tmp_path / "run").failed
    assert len(failed) == 12
    assert any(one.error != "never" and one.error.endswith("never") for one in failed)


def test_want_of_memory_does_not_give_a_model_up(small, tmp_path, failing):
    tried = failing(lambda batch: MemoryError() if 0 not in prompts_of(batch) else None)
    outcome = run(small(batch_tokens=128), tmp_path / "run")
    assert len(tried) == 6
    assert outcome.measured == 2


def test_a_model_that_does_not_load_leaves_the_others(small, folder, tmp_path, monkeypatch):
    load = attnscope.loading.load_text_model
    other = save_model(tmp_path / "other", seed=5)

    def sometimes(name, **options):
        if name == other:
            raise ModelError("its disk is gone")
        return load(name, **options)

    monkeypatch.setattr("attnscope.loading.load_text_model", sometimes)
    asked = small(models={"other": other, "tiny": folder})
    outcome = run(asked, tmp_path / "run")
    assert outcome.measured == 12
    assert set(outcome.failed.values()) == {"model 'other': its disk is gone"}
    opened = attnscope.open_run(tmp_path / "run")
    assert set(opened.cells["model"]) == {"tiny"} == set(opened.environment["models"])


def test_a_load_that_hangs_is_left_behind(small, tmp_path, monkeypatch):
    let_go = threading.Event()
    monkeypatch.setattr("attnscope.loading.load_text_model", lambda *_, **__: let_go.wait())

    def impatient(plan, pending, *, threads):
        return local.local(plan, pending, threads=threads, load_within=0.01)

    with raises(ModelError, "nothing-measured"):
        run(small(), tmp_path / "run", executor=impatient)
    let_go.set()


def test_a_loader_that_ends_the_program_says_so(small):
    plan = make_plan(small())
    measure = local.Measurer(plan, threads=1)
    with pytest.raises(ModelError) as error:
        measure._within(lambda: sys.exit(3), plan.models[0])
    assert error.value.code == "loader-exited"
    assert error.value.values["status"] == 3


@pytest.mark.parametrize("cores", [1, 1000])
def test_tables_are_written_beside_the_model_where_a_core_is_free(
    small, tmp_path, monkeypatch, cores
):
    """The same bytes either way, and an error in writing is raised either way."""
    asked, threads = small(batch_tokens=128), []
    run(asked, tmp_path / "as it comes")
    monkeypatch.setattr("attnscope.experiment.execute._cores", lambda: cores)
    run(
        asked,
        tmp_path / "run",
        progress=lambda *_: threads.append(threading.current_thread().name.split("_")[0]),
    )
    assert set(threads[1:]) == {"attnscope-writer" if cores > 1 else "MainThread"}
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "as it comes")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("attnscope.run.writer.Directory.write_batch", full)
    with raises(InputError, "disk-full"):
        run(asked, tmp_path / "full")


def test_asked_to_stop_a_run_finishes_its_batch(small, tmp_path):
    run(small(), tmp_path / "whole")
    plan = make_plan(small())
    outcome = run_plan(plan, tmp_path / "run", stop=lambda: True)
    assert outcome.stopped
    assert not outcome.complete
    assert len(attnscope.open_run(tmp_path / "run").batches) == 1
    assert outcome.measured == len(attnscope.open_run(tmp_path / "run").cells) > 0
    assert run(small(), tmp_path / "run").complete
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "whole")


@pytest.fixture
def typed(small, tmp_path, monkeypatch, capsys):
    """`attnscope run` on a small experiment: exit code, output, complaints."""
    file = tmp_path / "small.yaml"
    file.write_text(experiment_to_yaml(small()))

    def type_it(*words):
        monkeypatch.setattr(sys, "argv", ["attnscope", "run", str(file), *words])
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return type_it


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_finishes_the_batch_and_says_how_to_go_on(typed, tmp_path, failing, kind):
    before = signal.getsignal(kind)
    failing(lambda batch: os.kill(os.getpid(), kind))
    code, _, err = typed()
    assert code == 130
    assert "runs/small" in err
    assert len(attnscope.open_run(tmp_path / "runs" / "small").batches) == 1
    assert signal.getsignal(kind) is before


def test_ctrl_c_twice_stops_at_once(typed, tmp_path, failing):
    failing(lambda batch: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)] and None)
    code, _, err = typed()
    assert code == 130
    assert "runs/small" in err
    assert not attnscope.open_run(tmp_path / "runs" / "small").batches


def test_failures_are_printed_and_the_exit_code_is_1(typed, tmp_path, failing):
    failing(lambda batch: ConservationError("no sum") if 3 in prompts_of(batch) else None)
    code, out, err = typed()
    assert code == 1
    assert out == "small: 10 cells in runs/small\n"
    assert "error: small: 2 of 12 cells failed:\n  2 × no sum\n" in err
    code, out, _ = typed("--json")
    assert code == 1
    assert list(json.loads(out)[0]["failed"].values()) == ["no sum", "no sum"]


@pytest.mark.filterwarnings("ignore:.*no file locks:attnscope.errors.AttnscopeWarning")
def test_an_object_store_takes_a_run(typed, tmp_path):
    code, out, _ = typed("--out", "memory://bucket/typed")
    assert code == 0
    assert out == "small: 12 cells in memory://bucket/typed\n"
    assert attnscope.open_run("memory://bucket/typed").complete
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]


@pytest.mark.parametrize("out", ["nosuch://bucket/run", "s3://bucket/run"])
def test_an_address_that_cannot_be_used(typed, out, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    code, _, err = typed("--out", out)
    assert code == 2
    assert f"{out!r} cannot be used: " in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]
