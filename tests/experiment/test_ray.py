"""How work is handed out on a cluster. `make faults` runs it on a real one and kills workers."""

from collections import Counter

import pytest

from attnscope import open_run
from attnscope.errors import AttnscopeWarning, InputError, ModelError
from attnscope.experiment import ray as on_cluster
from attnscope.experiment.execute import run, run_plan
from attnscope.experiment.plan import make_plan
from attnscope.experiment.ray import _Queue, on_ray
from support_errors import raises

pytest.importorskip("ray")


@pytest.mark.parametrize("address", ["nonsense", "host:0", "host:99999", ":6379", "host:port", ""])
def test_no_address(small, tmp_path, address):
    with raises(InputError, "bad-address", address=address):
        run(small(), tmp_path / "run", executor=on_ray(address, tmp_path / "run"))


@pytest.mark.parametrize("refused", [ConnectionRefusedError, TimeoutError, UnicodeError])
def test_an_address_that_does_not_answer(small, tmp_path, monkeypatch, refused):
    def create_connection(address, timeout):
        assert address == ("127.0.0.1", 6379)
        assert timeout == on_cluster.ANSWER_WITHIN
        raise refused

    monkeypatch.setattr(on_cluster.socket, "create_connection", create_connection)
    with raises(InputError, "no-ray-cluster", address="127.0.0.1:6379"):
        run(small(), tmp_path / "run", executor=on_ray("127.0.0.1:6379", tmp_path / "run"))


class Ray:
    """A cluster in this process: answers at once, or loses the worker."""

    class exceptions:  # noqa: N801
        class RayActorError(Exception):
            pass

    def wait(self, waiting, num_returns):
        return waiting[:num_returns], waiting[num_returns:]

    def get(self, answer):
        return answer[0]()


class Actor:
    def __init__(self, **methods):
        for name, method in methods.items():
            setattr(self, name, Remote(method))


class Remote:
    def __init__(self, method):
        self.method = method

    def options(self, name):
        assert "cells" in name
        return self

    def remote(self, *given):
        return (lambda: self.method(*given)), object()


def crew(plan, tmp_path, mixed=False, **methods):
    return on_cluster._WorkerPool(
        Ray(), lambda: Actor(**methods), tmp_path, _Queue(work_of(plan)), mixed
    )


@pytest.mark.parametrize(
    ("device", "workers", "number", "needs"),
    [
        ("cpu", None, 4, {"num_cpus": 6}),  # a worker is on one node, whatever is left on another
        ("cpu", 3, 3, {"num_cpus": 6}),
        ("cuda", None, 12, {"num_cpus": 1, "num_gpus": 1.0}),
        ("cuda:0", 24, 24, {"num_cpus": 1, "num_gpus": 0.5}),
        ("auto", None, 2, {"num_cpus": 1, "num_gpus": 4}),
        ("auto", 6, 6, {"num_cpus": 1, "num_gpus": 2}),
    ],
)
def test_what_a_worker_asks_for(device, workers, number, needs):
    nodes = [{"CPU": 16, "GPU": 8}, {"CPU": 16, "GPU": 4}, {"memory": 1}]
    assert on_cluster.shares(nodes, device, workers, 6) == (number, needs)


def test_a_spread_model_needs_whole_gpus():
    with raises(InputError, "too-many-workers", workers=9, gpus=8):
        on_cluster.shares([{"CPU": 1, "GPU": 8}], "auto", 9, 1)
    assert on_cluster.shares([{"CPU": 4}], "auto", None, 2) == (2, {"num_cpus": 2})


def work_of(plan):
    return [on_cluster.Work(model, batch) for model in plan.models for batch in model.batches]


OTHER = {"packages": {"torch": "1.0"}, "device_name": "another GPU"}


def test_a_worker_with_other_versions_is_refused(small, tmp_path):
    plan = make_plan(small())
    with raises(InputError, "other-environment", different=OTHER):
        list(crew(plan, tmp_path, elsewhere=lambda: OTHER).work(2))


def test_a_worker_with_other_versions_is_accepted_with_one_warning(small, tmp_path):
    plan = make_plan(small(batch_tokens=128))
    hired = crew(plan, tmp_path, True, elsewhere=lambda: OTHER, measured=lambda *_: ({}, None))
    with pytest.warns(AttnscopeWarning, match="device_name.*another GPU") as warned:
        done = list(hired.work(2))
    assert len(warned) == 1
    assert len(done) == len(work_of(plan))


def test_another_version_of_ours_is_never_mixed(small, tmp_path):
    hired = crew(make_plan(small()), tmp_path, True, elsewhere=lambda: {"attnscope": "99"})
    with raises(InputError, "other-environment", different={"attnscope": "99"}):
        list(hired.work(1))


def test_what_a_worker_writes_says_where(small, tmp_path, monkeypatch):
    asked = small()
    run_plan(make_plan(asked), tmp_path / "run", stop=lambda: True)
    monkeypatch.setattr(
        "attnscope.experiment.measuring_environment._processor", lambda: "another chip"
    )
    plan = make_plan(asked)
    worker = on_cluster._Worker((plan, tmp_path / "run", 1, 60.0))
    assert worker.elsewhere() == {"device_name": "another chip"}
    missing = plan.models[0].batches[-1]
    worker.measured(plan.models[0].label, missing)
    recorded = {batch.id: batch.elsewhere for batch in open_run(tmp_path / "run").batches}
    assert recorded.pop(missing.id) == {"device_name": "another chip"}
    assert not any(recorded.values())


def test_a_run_is_continued_elsewhere_only_if_allowed(small, tmp_path, monkeypatch):
    run_plan(make_plan(small()), tmp_path / "run", stop=lambda: True)
    monkeypatch.setattr(
        "attnscope.experiment.measuring_environment._processor", lambda: "another chip"
    )
    with raises(InputError, "other-environment", different={"device_name": "another chip"}):
        run(small(), tmp_path / "run")
    with pytest.warns(AttnscopeWarning, match="another chip"):
        assert run_plan(make_plan(small()), tmp_path / "run", mixed=True).complete
    assert open_run(tmp_path / "run").elsewhere == [{"device_name": "another chip"}]


def test_workers_that_never_start_end_the_run(small, tmp_path):
    def lost():
        raise Ray.exceptions.RayActorError("no module named attnscope")

    plan = make_plan(small())
    with raises(ModelError, "workers-lost", workers=4, reason="no module named attnscope"):
        list(crew(plan, tmp_path, elsewhere=lost).work(1))


def test_a_batch_that_kills_its_workers_is_recorded(small, tmp_path):
    plan = make_plan(small(batch_tokens=128))
    deadly = plan.models[0].batches[2].id

    def measured(label, batch):
        if batch.id == deadly:
            raise Ray.exceptions.RayActorError("killed by the system")
        return {}, {"name": "x"}

    found = list(crew(plan, tmp_path, elsewhere=dict, measured=measured).work(2))
    assert sorted(done.work.batch.id for done in found) == sorted(
        work.batch.id for work in work_of(plan)
    )
    failed = [done for done in found if done.failed]
    assert [done.work.batch.id for done in failed] == [deadly]
    assert "killed by the system" in next(iter(failed[0].failed.values()))


def test_a_full_disk_there_is_a_full_disk_here(small, tmp_path):
    import errno

    plan = make_plan(small())

    def executor(plan, pending, *, threads):
        full = OSError(errno.ENOSPC, "No space left on device")
        return crew(plan, tmp_path, elsewhere=dict, measured=lambda *_: full).work(1)

    with raises(InputError, "disk-full"):
        run_plan(plan, tmp_path / "run", executor=executor)


def test_the_largest_first_and_a_model_stays_loaded(small, folder, tmp_path):
    asked = small(models={"a": folder, "b": folder}, batch_tokens=128)
    queue = _Queue(work_of(make_plan(asked)))
    taken = [queue.next(None, Counter())]
    while (work := queue.next(taken[-1].model.label, Counter())) is not None:
        taken.append(work)
    labels = [work.model.label for work in taken]
    assert labels == sorted(labels) or labels == sorted(labels, reverse=True)
    of_first = [work.cost for work in taken if work.model.label == labels[0]]
    assert of_first == sorted(of_first, reverse=True)
    fresh = _Queue(work_of(make_plan(asked)))
    one = fresh.next(None, Counter()).model.label
    assert fresh.next(None, Counter({one: 1})).model.label != one
