"""A run in parts: in one directory, or in several that are joined. Always the same bytes."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnscope
from attnscope.errors import InputError
from attnscope.experiment.execute import run
from attnscope.experiment.shard import Shard, gpu_of_process, parse_shard, shard_of_process
from attnscope.run.merge import merge
from attnscope.run.writer import open_directory
from made_models import save_model
from run_bytes import bytes_of
from support_errors import raises


class Costing:
    def __init__(self, cost):
        self.cost = cost


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.integers(1, 12))
def test_every_batch_is_in_one_shard_and_in_order(costs, of):
    work = [Costing(cost) for cost in costs]
    parts = [Shard(number, of).mine(work) for number in range(1, of + 1)]
    assert [one for part in parts for one in part] == work
    most = max(sum(one.cost for one in part) for part in parts)
    assert most <= sum(costs) / of + max(costs)


@pytest.mark.parametrize(
    "text", ["5/4", "0/4", "-1/4", "1/0", "1", "a/b", "1/2/3", "", "1.0/2", "٣/4"]
)
def test_no_part_of_a_run(text):
    with raises(InputError, "bad-shard", value=text):
        parse_shard(text)


@pytest.fixture(scope="module")
def asked(folder, tmp_path_factory):
    """Two models, several batches of each."""
    from attnscope.spec.experiment import make_experiment

    return make_experiment(
        name="small",
        models={"tiny": folder, "other": save_model(tmp_path_factory.mktemp("m") / "o", seed=9)},
        prompts={"source": "math", "count": 6, "level": 1},
        conditions={"base": {}, "filler": {"insert": {"count": 9}}},
        measures=["mass", "lambda"],
        batch_tokens=256,
    )


@pytest.fixture(scope="module")
def whole(asked, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    run(asked, out)
    return out


@pytest.fixture(scope="module")
def parts(asked, tmp_path_factory):
    """Three shards, each in a directory of its own."""
    out = tmp_path_factory.mktemp("parts")
    for number in (1, 2, 3):
        outcome = run(asked, out / str(number), shard=Shard(number, 3))
        assert not outcome.complete
    return [out / str(number) for number in (1, 2, 3)]


def test_shards_share_a_directory(asked, whole, tmp_path):
    """At once, each in a thread, as processes would be: the last one finishes the run."""
    with ThreadPoolExecutor(3) as threads:
        started = [
            threads.submit(run, asked, tmp_path / "run", shard=Shard(n, 3)) for n in (2, 1, 3)
        ]
        outcomes = [one.result(timeout=200) for one in started]  # raises what a thread raised
    assert sum(outcome.measured for outcome in outcomes) == 24
    assert any(outcome.complete for outcome in outcomes)
    assert bytes_of(tmp_path / "run") == bytes_of(whole)


@pytest.mark.slow
def test_torchrun_gives_one_run(asked, whole, tmp_path):
    """Two processes of torchrun measure a part each, and the run has the bytes of one process."""
    shutil.copy(whole / "experiment.yaml", tmp_path)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "attnscope", "run", "experiment.yaml", "--out", "run", "--outside"]
    threads = str(json.loads((whole / "environment.json").read_text())["threads"])
    done = subprocess.run(
        [*start, *command],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert bytes_of(tmp_path / "run") == bytes_of(whole)


def test_a_process_of_torchrun_measures_its_part():
    process = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
    assert shard_of_process(process) == Shard(3, 4)
    assert shard_of_process(process | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert shard_of_process({"RANK": "2", "WORLD_SIZE": "4"}) is None  # of another launcher
    gpus = {None: "1", "4,6": "6", "": ""}
    for visible, mine in gpus.items():
        given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert gpu_of_process(process | given) == mine
    with raises(InputError, "too-few-gpus", visible="3", local_rank=1):
        gpu_of_process(process | {"CUDA_VISIBLE_DEVICES": "3"})


def test_a_shard_alone_is_not_the_run(asked, parts, tmp_path):
    opened_part = attnscope.open_run(parts[0])
    assert not opened_part.complete
    assert 0 < len(opened_part.cells) < 24
    assert run(asked, parts[0], shard=Shard(1, 3)).measured == 0  # again: nothing to do


def test_a_run_without_shards_does_not_write_beside_shards(asked, tmp_path):
    with open_directory(tmp_path / "run", asked, shared=True), raises(InputError, "run-locked"):
        run(asked, tmp_path / "run")
    with open_directory(tmp_path / "run", asked), raises(InputError, "run-locked"):
        run(asked, tmp_path / "run", shard=Shard(1, 2))


def test_parts_are_joined_to_the_same_bytes(parts, whole, tmp_path):
    joined = merge(parts, tmp_path / "run")
    assert joined.batches == joined.of
    assert bytes_of(tmp_path / "run") == bytes_of(whole)


def test_joined_by_and_by(asked, parts, whole, tmp_path):
    some = merge(parts[:2], tmp_path / "run")
    assert some.batches < some.of
    assert not attnscope.open_run(tmp_path / "run").complete
    merge([parts[2]], tmp_path / "run")
    assert bytes_of(tmp_path / "run") == bytes_of(whole)


def test_what_is_missing_is_measured_afterwards(asked, parts, whole, tmp_path):
    merge(parts[1:], tmp_path / "run")
    assert run(asked, tmp_path / "run").measured > 0
    assert bytes_of(tmp_path / "run") == bytes_of(whole)


def test_a_damaged_part_is_left_out_and_reported(parts, tmp_path):
    shutil.copytree(parts[0], tmp_path / "bad")
    lost = attnscope.open_run(tmp_path / "bad").batches[0]
    file = lost.file(tmp_path / "bad", "values")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    joined = merge([tmp_path / "bad", *parts[1:]], tmp_path / "run")
    assert joined.batches == joined.of - 1
    assert lost.id in joined.damaged[0]
    assert not attnscope.open_run(tmp_path / "run").complete


def test_what_does_not_belong_together(asked, parts, tmp_path, monkeypatch):
    run(asked.with_keys(seed=4), tmp_path / "other", shard=Shard(1, 3))
    with raises(InputError, "not-one-run", different=["seed"]):
        merge([*parts, tmp_path / "other"], tmp_path / "run")
    monkeypatch.setattr("attnscope.experiment.measuring_environment.__version__", "99")
    run(asked, tmp_path / "newer", shard=Shard(1, 3))
    with raises(InputError, "other-environment"):
        merge([parts[1], tmp_path / "newer"], tmp_path / "run")
    with raises(InputError, "folder-missing"):
        merge([tmp_path / "nothing"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_more_parts_than_cells_are_refused(asked, tmp_path):
    cells = 2 * 6 * 2
    with pytest.raises(InputError) as error:
        run(asked, tmp_path / "run", shard=Shard(1, 999_999))
    assert error.value.code == "too-many-shards"
    assert error.value.values == {"shards": 999_999, "cells": cells}
    assert not (tmp_path / "run").exists()
    assert run(asked, tmp_path / "run", shard=Shard(1, cells)).cells < cells


def test_a_system_without_locks_is_warned_about(tmp_path, monkeypatch):
    from attnscope.errors import AttnscopeWarning
    from attnscope.run.locks import locked

    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.warns(AttnscopeWarning), locked(tmp_path, shared=False):
        pass
