"""Reading a run: frames, SQL, and nothing heavy."""

import subprocess
import sys

import polars as pl
import pytest

import attnscope
from attnscope.errors import InputError
from attnscope.experiment.execute import run
from attnscope.question.spec import MathPrompts
from attnscope.run.schemas import POSITIONS, VALUES


@pytest.fixture(scope="module")
def done(tmp_path_factory, folder):
    from attnscope.question.spec import made

    out = tmp_path_factory.mktemp("runs") / "a [b] * c"  # a path that looks like a pattern
    conditions = {"base": {}, "filler": {"insert": {"count": 9}}}
    experiment = made(
        name="small",
        models={"tiny": folder},
        prompts={"source": "math", "count": 3, "level": 1},
        conditions=conditions,
        measures=["mass", "lambda"],
    )
    run(experiment, out)
    return out


def test_what_a_run_gives(done):
    opened = attnscope.open_run(done)
    assert opened.complete
    assert opened.experiment.prompts == MathPrompts(count=3, level=1)
    assert opened.values.collect().schema == VALUES
    assert opened.positions.collect().schema == POSITIONS  # none were asked for
    assert opened.positions.collect().is_empty()
    assert opened.cells.select("prompt", "condition").rows() == [
        (prompt, condition) for prompt in range(3) for condition in ("base", "filler")
    ]
    lengths = opened.tokens.group_by("prompt", "condition").len().collect()
    both = opened.cells.join(lengths, on=["prompt", "condition"])
    assert (both["tokens"] == both["len"]).all()


def test_sql(done):
    opened = attnscope.open_run(done)
    found = opened.sql(
        "SELECT c.condition, sum(v.value) AS mass FROM values AS v JOIN cells AS c "
        "ON v.prompt = c.prompt AND v.condition = c.condition "
        "WHERE v.measure = 'mass' AND v.layer = 0 AND v.head = 0 AND v.prompt = 0 "
        "GROUP BY c.condition ORDER BY c.condition"
    )
    assert found["condition"].to_list() == ["base", "filler"]
    assert found["mass"].to_list() == pytest.approx([1, 1], abs=1e-5)


@pytest.mark.parametrize("query", ["SELECT x FROM values", "SELECT * FROM value", "SELEC", ""])
def test_sql_that_does_not_work_says_what_there_is(done, query):
    with pytest.raises(InputError, match=r"values: model, prompt, condition"):
        attnscope.open_run(done).sql(query)


def test_a_run_that_is_not_finished(done, tmp_path):
    import shutil

    whole = attnscope.open_run(done)
    part = tmp_path / "part"
    shutil.copytree(done, part)
    (part / "manifest.json").unlink()
    lost = whole.ids[2]
    (part / "cells" / f"{lost}.parquet").unlink()
    opened = attnscope.open_run(part)
    assert not opened.complete
    there = whole.cells.filter(pl.col("cell") != lost)
    assert opened.cells.sort("cell").equals(there.sort("cell"))
    prompts = opened.values.filter(measure="mass").select("prompt", "condition").unique().collect()
    assert len(prompts) == 5
    for path in (part / "cells").iterdir():
        path.unlink()
    assert attnscope.open_run(part).cells.is_empty()
    assert attnscope.open_run(part).values.collect().schema == VALUES


def test_a_damaged_run_says_so(done, tmp_path):
    import shutil

    shutil.copytree(done, tmp_path / "run")
    lost = attnscope.open_run(done).ids[0]
    (tmp_path / "run" / "cells" / f"{lost}.parquet").unlink()
    with pytest.raises(InputError, match=rf"damaged.*1 of them are gone.*{lost}"):
        attnscope.open_run(tmp_path / "run")
    (tmp_path / "run" / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"manifest.json is damaged"):
        attnscope.open_run(tmp_path / "run")


def test_what_is_not_a_run(done, tmp_path):
    with pytest.raises(InputError, match="no directory"):
        attnscope.open_run(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"no experiment\.yaml$"):
        attnscope.open_run(tmp_path)
    with pytest.raises(InputError, match=r"runs inside it: a \[b\] \* c"):
        attnscope.open_run(done.parent)


def test_reading_needs_no_model_library(done):
    probe = (
        "import sys, attnscope; r = attnscope.open_run(sys.argv[1]); r.values.collect(); r.cells;"
        "print(sorted({'torch', 'transformers'} & {*sys.modules}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", probe, str(done)], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
