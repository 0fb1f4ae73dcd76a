"""How work is handed out on a cluster. `make faults` runs it on a real one and kills workers."""

import socket
from collections import Counter

import pytest

from attnscope.errors import InputError, ModelError
from attnscope.experiment import ray as on_cluster
from attnscope.experiment.execute import run, run_plan
from attnscope.experiment.plan import make_plan
from attnscope.experiment.ray import _Queue, on_ray

pytest.importorskip("ray")


@pytest.mark.parametrize("address", ["nonsense", "host:0", "host:99999", ":6379", "host:port", ""])
def test_no_address(small, tmp_path, address):
    with pytest.raises(InputError, match="is no address; known: HOST:PORT"):
        run(small(), tmp_path / "run", executor=on_ray(address, tmp_path / "run"))


def test_an_address_that_does_not_answer(small, tmp_path):
    with socket.socket() as held:  # a port that is free, since we hold it and do not listen
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(InputError, match=r"no Ray cluster answers at .*ray start --head"):
            run(small(), tmp_path / "run", executor=on_ray(address, tmp_path / "run"))


class Ray:
    """A cluster in this process: answers at once, or loses the worker, as told."""

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
            setattr(self, name, type("Remote", (), {"remote": staticmethod(
                lambda *given, method=method: (lambda: method(*given), object())
            )}))  # fmt: skip


def crew(plan, tmp_path, **methods):
    return on_cluster._Crew(Ray(), lambda: Actor(**methods), plan, tmp_path, _Queue(work_of(plan)))


def work_of(plan):
    return [on_cluster.Work(model, batch) for model in plan.models for batch in model.batches]


def test_a_worker_with_other_versions_is_refused(small, tmp_path):
    plan = make_plan(small())
    there = on_cluster.describe(plan) | {"packages": {"torch": "1.0"}}
    with pytest.raises(InputError, match=r"another environment \(packages: .*torch.*1\.0"):
        list(crew(plan, tmp_path, environment=lambda: there).work(2))


def test_workers_that_never_start_end_the_run(small, tmp_path):
    def lost():
        raise Ray.exceptions.RayActorError("no module named attnscope")

    plan = make_plan(small())
    with pytest.raises(ModelError, match=r"4 workers .* lost.*no module named attnscope"):
        list(crew(plan, tmp_path, environment=lost).work(1))


def test_a_batch_that_kills_its_workers_is_recorded(small, tmp_path):
    plan = make_plan(small(batch_tokens=128))
    deadly = plan.models[0].batches[2].id

    def measured(label, batch):
        if batch.id == deadly:
            raise Ray.exceptions.RayActorError("killed by the system")
        return {}, {"name": "x"}

    found = list(
        crew(plan, tmp_path, environment=lambda: on_cluster.describe(plan), measured=measured).work(
            2
        )
    )
    assert sorted(done.work.batch.id for done in found) == sorted(
        work.batch.id for work in work_of(plan)
    )
    failed = [done for done in found if done.failed]
    assert [done.work.batch.id for done in failed] == [deadly]
    assert "3 workers were lost: killed by the system" in next(iter(failed[0].failed.values()))


def test_a_full_disk_there_is_a_full_disk_here(small, tmp_path):
    import errno

    plan = make_plan(small())

    def executor(plan, pending, *, threads):
        full = OSError(errno.ENOSPC, "No space left on device")
        return crew(
            plan, tmp_path, environment=lambda: on_cluster.describe(plan), measured=lambda *_: full
        ).work(1)

    with pytest.raises(InputError, match=r"the disk of .* is full"):
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
