"""A run in an object store: the same bytes, read, continued and mended there.

fsspec's store in memory stands for all of them: what is tested is that nothing needs a disk.
"""

import re
from pathlib import Path

import pytest
from upath import UPath
from upath.implementations.memory import MemoryPath

from attnscope import open_run
from attnscope.errors import AttnscopeWarning, InputError
from attnscope.experiment import ray as on_cluster
from attnscope.experiment.execute import run, run_plan
from attnscope.experiment.plan import make_plan
from attnscope.experiment.shard import Shard
from attnscope.paths import to_path
from attnscope.run import store
from attnscope.run.merge import merge
from run_bytes import bytes_of
from support_errors import raises

pytestmark = pytest.mark.filterwarnings("ignore:.*no file locks:attnscope.errors.AttnscopeWarning")


@pytest.fixture
def address(request):
    """An address of the test's own."""
    return f"memory://bucket/{request.node.name}"


@pytest.fixture
def whole(small, tmp_path):
    run(small(), tmp_path / "whole")
    return tmp_path / "whole"


def bytes_at(address):
    return {str(path).removeprefix(f"{address}/"): path.read_bytes()
            for path in UPath(address).rglob("*") if path.is_file()}  # fmt: skip


def test_the_same_bytes_and_nothing_left_to_do(small, whole, address):
    with pytest.warns(AttnscopeWarning, match=re.escape(address)):
        assert run(small(), address).complete
    assert bytes_at(address) == {
        str(path.relative_to(whole)): path.read_bytes() for path in whole.rglob("*.*")
    }
    assert run(small(), address).measured == 0


@pytest.mark.parametrize("held", [store.HELD, 1])
def test_readers_read_there(small, whole, address, monkeypatch, held):
    monkeypatch.setattr(store, "HELD", held)
    run(small(), address)
    there, here = open_run(address), open_run(whole)
    order = ["condition", "prompt", "layer", "head", "item"]
    assert there.values.collect().sort(order).equals(here.values.collect().sort(order))
    assert there.cells.equals(here.cells)
    assert there.sql("SELECT count(*) AS n FROM tokens").equals(
        here.sql("SELECT count(*) AS n FROM tokens")
    )
    # As the command line has it: a Path makes one slash of two.
    assert open_run(Path(address)).cells.equals(here.cells)


def test_damage_there_is_noticed_and_mended(small, address):
    run(small(), address)
    whole = bytes_at(address)
    victim = UPath(address) / next(name for name in whole if name.endswith("values.parquet"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    with raises(InputError, "damaged-run"):
        open_run(address).values  # noqa: B018
    assert run(small(), address).measured > 0
    assert bytes_at(address) == whole


def test_stopped_and_continued(small, whole, address):
    run_plan(make_plan(small()), address, stop=lambda: True)
    assert not open_run(address).complete
    assert run(small(), address).complete
    assert bytes_at(address)["manifest.json"] == (whole / "manifest.json").read_bytes()


def test_a_worker_of_a_cluster_writes_there(small, whole, address):
    plan = make_plan(small())
    run_plan(plan, address, stop=lambda: True)
    worker = on_cluster._Worker((plan, to_path(address), 1, 60.0))
    for batch in plan.models[0].batches:
        assert worker.measured("tiny", batch)[0] == {}
    assert run(small(), address).measured == 0
    assert bytes_at(address)["manifest.json"] == (whole / "manifest.json").read_bytes()


def test_parts_have_addresses_of_their_own(small, whole, address, tmp_path):
    with raises(InputError, "shared-object-store", own=f"{address}-2-of-3"):
        run(small(), address, shard=Shard(2, 3))
    parts = [Shard(n, 3).folder_for(to_path(address)) for n in (1, 2, 3)]
    for n, part in enumerate(parts, 1):
        run(small(), part, shard=Shard(n, 3))
        assert run(small(), part, shard=Shard(n, 3)).measured == 0
    with raises(InputError, "shared-object-store"):
        run(small(), parts[0], shard=Shard(2, 3))
    assert merge(parts, address).batches == merge(parts, address).of
    merge([address], tmp_path / "back")
    assert bytes_of(tmp_path / "back") == bytes_of(whole)
    with raises(InputError, "no-run-name"):
        Shard(1, 2).folder_for(UPath("memory://"))


def test_a_store_that_takes_nothing(small, address, monkeypatch):
    def refuse(path, content):
        raise RuntimeError("SlowDown: please reduce your request rate")

    monkeypatch.setattr(MemoryPath, "write_bytes", refuse)
    with raises(InputError, "write-failed"):
        run(small(), address)


def test_without_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "upath", None)
    with raises(InputError, "missing-package", package="universal_pathlib"):
        to_path("memory://bucket/run")
    assert to_path("C:/runs") == Path("C:/runs")
