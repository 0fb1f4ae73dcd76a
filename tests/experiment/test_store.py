"""Reading a run: frames, SQL, and nothing heavy."""

import json
import shutil
import subprocess
import sys

import polars as pl
import pytest

import attnscope
from attnscope.errors import InputError
from attnscope.experiment.execute import run
from attnscope.run.layout import FORMAT
from attnscope.run.schemas import POSITIONS, VALUES
from attnscope.spec.prompt_sources import MathPrompts
from support_errors import raises


@pytest.fixture(scope="module")
def done(tmp_path_factory, folder):
    from attnscope.spec.experiment import make_experiment

    out = tmp_path_factory.mktemp("runs") / "a [b] * c"  # a path that looks like a pattern
    conditions = {"base": {}, "filler": {"insert": {"count": 9}}}
    experiment = make_experiment(
        name="small",
        models={"tiny": folder},
        prompts={"source": "math", "count": 3, "level": 1},
        conditions=conditions,
        measures=["mass", "lambda"],
        batch_tokens=256,
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


@pytest.mark.parametrize(
    "query",
    [
        "SELECT x FROM values",
        "SELECT * FROM value",
        "SELEC",
        "",
        "DROP TABLE values",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT " + "1+" * 50_000 + "1 FROM values",
    ],
)
def test_sql_that_does_not_work_is_refused(done, query):
    with pytest.raises(InputError) as error:
        attnscope.open_run(done).sql(query)
    assert error.value.code in ("sql-not-allowed", "query-failed")


@pytest.fixture
def copy(done, tmp_path):
    shutil.copytree(done, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_that_is_not_finished(done, copy):
    whole = attnscope.open_run(done)
    assert len(whole.batches) > 1
    (copy / "manifest.json").unlink()
    lost = whole.batches[1]
    (copy / "cells" / f"{lost.id}.json").unlink()
    opened = attnscope.open_run(copy)
    assert not opened.complete
    assert "not finished" in repr(opened)
    gone = [row[0] for row in lost.cells]
    assert opened.cells.equals(whole.cells.filter(~pl.col("cell").is_in(gone)))
    prompts = opened.values.filter(measure="mass").select("prompt", "condition").unique().collect()
    assert len(prompts) == len(opened.cells) == 6 - len(gone)
    for path in (copy / "cells").iterdir():
        path.unlink()
    assert attnscope.open_run(copy).cells.is_empty()
    assert attnscope.open_run(copy).values.collect().schema == VALUES


def test_a_run_says_in_a_line_what_it_is(done):
    assert repr(attnscope.open_run(done)) == f"<Run small in {done}: 6 cells>"


def test_prompt_metadata_are_columns(done):
    opened = attnscope.open_run(done)
    assert opened.prompts["prompt"].to_list() == [0, 1, 2]
    assert opened.prompts["level"].to_list() == [1, 1, 1]
    assert opened.sql("SELECT count(*) AS n FROM prompts WHERE level = 1")["n"].item() == 3


def files_of(run):
    """Every file that a run's numbers depend on."""
    return sorted(path for path in run.rglob("*") if path.is_file())


def damages(content: bytes):
    """What can happen to a file."""
    yield "emptied", b""
    yield "cut", content[: len(content) // 2]
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    yield "flipped", bytes(flipped)
    for text in (b"null", b"[]", b"{}", b"\xff\xfe"):
        yield str(text), text


def read_all(run):
    opened = attnscope.open_run(run)
    return opened.values.collect(), opened.tokens.collect(), opened.cells


def test_whatever_is_damaged_is_noticed(done, copy):
    """No wrong number, no traceback: every reader says which file it is."""
    whole = attnscope.open_run(done)
    tried = 0
    for path in files_of(copy):
        content = path.read_bytes()
        for what, damaged in [("gone", None), *damages(content)]:
            path.unlink(missing_ok=True)
            if damaged is not None:
                path.write_bytes(damaged)
            if path.name == "manifest.json" and what == "gone":
                opened = attnscope.open_run(copy)
                assert not opened.complete  # that is all
                assert opened.values.collect().equals(whole.values.collect())
            else:
                with pytest.raises(InputError) as caught:
                    read_all(copy)
                tried += 1
                # What a manifest says wrongly shows in the file that it says it of.
                assert path.name in str(caught.value) or path.name == "manifest.json"
            path.write_bytes(content)
    assert tried > 50
    assert attnscope.open_run(copy).values.collect().equals(whole.values.collect())


def test_a_report_of_a_damaged_run_is_refused(copy):
    """The report had gaps and stated no error."""
    from attnscope.report import build

    file = attnscope.open_run(copy).batches[0].file(copy, "values")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with raises(InputError, "damaged-run"):
        build(attnscope.open_run(copy))


def test_a_damaged_run_says_how_to_mend_it(copy):
    lost = attnscope.open_run(copy).batches[0]
    lost.file(copy, "values").write_bytes(b"")
    with raises(InputError, "damaged-run", folder=str(copy)):
        attnscope.open_run(copy)


def test_a_question_that_was_not_run(copy):
    file = copy / "experiment.yaml"
    file.write_text(file.read_text().replace("combine: mean", "combine: max"))
    assert attnscope.open_run(copy).experiment.combine == "max"  # a reader's choice
    file.write_text(file.read_text().replace("\nseed: 0", "\nseed: 1"))
    with raises(InputError, "experiment-changed"):
        attnscope.open_run(copy)


def test_a_run_of_an_earlier_version_says_how_to_make_it_again(copy):
    for path in (copy / "cells").iterdir():
        path.unlink()
    (copy / "cells" / "0123456789abcdef01234567.parquet").write_bytes(b"PAR1")
    (copy / "manifest.json").write_text('{"experiment": "x", "cells": []}')
    with raises(InputError, "other-run-format", format=1, known=[FORMAT]):
        attnscope.open_run(copy)


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_with_old_column_names_is_refused(copy, finished):
    (copy / "metadata.jsonl").rename(copy / "facts.jsonl")
    manifest = copy / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 3}))
    if not finished:
        manifest.unlink()
    with raises(InputError, "other-run-format", format=3):
        attnscope.open_run(copy)


def test_what_is_not_a_run(done, tmp_path):
    with raises(InputError, "folder-missing"):
        attnscope.open_run(tmp_path / "nothing")
    with raises(InputError, "not-a-run", runs=[]):
        attnscope.open_run(tmp_path)
    with raises(InputError, "not-a-run", runs=["a [b] * c"]):
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
