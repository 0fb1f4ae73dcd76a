"""A run: its numbers, how it continues, and what it refuses."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import attnscope
from attnscope.errors import AttnscopeWarning, InputError, ModelError
from attnscope.experiment import local
from attnscope.experiment.batching import TOGETHER
from attnscope.experiment.class_counts import class_counts
from attnscope.experiment.execute import run
from attnscope.experiment.plan import make_plan
from attnscope.run.schemas import CELLS, POSITIONS, TOKENS, VALUES
from attnscope.run.writer import open_directory
from attnscope.spec.experiment_yaml import read_experiment
from attnscope.stats.run_stats import compare_run
from dense_rows import check
from made_models import save_model
from run_bytes import bytes_of
from support_errors import raises


def test_rows_are_those_of_eager_attention(small, folder, tmp_path):
    experiment = small(
        prompts={"source": "math", "count": 2, "level": 1},
        queries=["all", "last", "after:question", "region:question"],
        keys=["all", "not-first", "question", "filler"],
        classes=["default", "maps"],
        measures=[
            "mass",
            "entropy",
            "first_token",
            "lambda",
            "uniform_slope",
            "spikes",
            "uniformity",
            *("profile", "effective_tokens", "reshaping"),
            *("previous_token", "induction", "renyi2", "by_distance", "nearby"),
            "top_share",
        ],
    )
    run(experiment, tmp_path / "run")
    opened_run = attnscope.open_run(tmp_path / "run")
    rows = check(opened_run, {"tiny": folder})
    heads = 2 * 4  # layers × heads
    cells, variants, queries, keys = 4, 2, 4, 4
    assert rows["mass"] == cells * queries * keys * (12 + 4) * heads
    assert rows["lambda"] == variants * queries * keys * heads
    assert rows["uniformity"] == variants * queries * heads
    assert opened_run.values.collect().schema == VALUES
    assert opened_run.tokens.collect().schema == TOKENS
    assert opened_run.positions.collect().schema == POSITIONS
    assert opened_run.cells.schema == CELLS


def test_other_measures_are_those_of_a_scope(small, folder, tmp_path):
    """Flow and the rest against `watch` on single prompts, which is tested by itself."""
    measures = ["flow", "self_mass", "distance", "learned_sink_mass"]
    experiment = small(measures=measures, conditions={"base": {}}, heads=[1, 3], layers=[1])
    run(experiment, tmp_path / "run")
    values = attnscope.open_run(tmp_path / "run").values.collect()
    model, _ = attnscope.load(folder)
    names = experiment.classes["default"].names
    for cell in make_plan(experiment).models[0].cells():
        ids = experiment.classes["default"].ids(
            cell.tokens.ids[None], make_plan(experiment).models[0].tokenizer
        )
        with attnscope.watch(model, layers=[1], classes=ids) as scope:
            model(input_ids=__import__("torch").from_numpy(cell.tokens.ids[None]))
        mine = values.filter(pl.col("prompt") == cell.prompt)
        for measure in measures[1:]:
            got = mine.filter(pl.col("measure") == measure).sort("head")
            assert got["head"].to_list() == [1, 3]
            want = getattr(scope, measure)(1)[0, [1, 3]].detach().numpy()
            np.testing.assert_allclose(got["value"].to_numpy(), want, atol=2e-4)
        table = scope.flow(1)[0].detach().numpy()
        flows = mine.filter(pl.col("measure") == "flow")
        assert len(flows) == 2 * len(names) ** 2
        present = set(ids[0].tolist())
        for row in flows.iter_rows(named=True):
            c, d = names.index(row["item"]), names.index(row["target"])
            if c not in present:
                assert row["value"] is None
            elif d >= table.shape[2]:
                assert row["value"] == 0
            else:
                assert row["value"] == pytest.approx(table[row["head"], c, d], abs=1e-5)


def test_tokens_are_stored_with_their_aligned_positions(small, tmp_path):
    run(small(), tmp_path / "run")
    opened_run = attnscope.open_run(tmp_path / "run")
    tokens = opened_run.tokens.collect()
    base = tokens.filter(condition="base")
    assert (base["aligned_position"] == base["position"]).all()
    assert set(base["role"]) == {"text"}
    filler = tokens.filter(condition="filler")
    aligned = filler.filter(pl.col("aligned_position").is_not_null()).join(
        base, left_on=["prompt", "aligned_position"], right_on=["prompt", "position"]
    )
    assert (aligned["id"] == aligned["id_right"]).all()
    assert (filler["aligned_position"].is_null() == (filler["role"] != "text")).all()
    inserted = filler.filter(role="filler").group_by("prompt").agg(pl.col("text").str.join(""))
    assert set(inserted["text"]) == {"/" * 9}
    assert "<|im_start|>" in set(base["text"])  # a special token by its name
    spoken = base.filter(pl.col("regions").list.contains("question"), prompt=0)
    assert "".join(spoken["text"]).strip().endswith("?")
    assert set(spoken["class"]) >= {"word", "digit"}


def test_same_experiment_same_bytes(small, tmp_path):
    for name in ("one", "two"):
        run(small(), tmp_path / name)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    assert len(make_plan(small()).models[0].batches) > 1


def test_what_is_missing_or_damaged_is_measured_again_to_the_byte(small, tmp_path):
    out = tmp_path / "run"
    whole = run(small(batch_tokens=128), out)
    assert (whole.cells, whole.measured) == (12, 12)
    before = bytes_of(out)
    batches = attnscope.open_run(out).batches
    assert len(batches) >= 4
    batches[0].file(out, "tokens").unlink()
    batches[1].file(out, "values").write_bytes(b"")
    flipped = bytearray(before[f"cells/{batches[2].id}.positions.parquet"])
    flipped[len(flipped) // 2] ^= 1
    batches[2].file(out, "positions").write_bytes(flipped)
    (out / "cells" / f"{batches[0].id}.json.attnscope.part").write_bytes(b"half")
    untouched = {batch.file(out, "values"): None for batch in batches[3:]}
    untouched = {path: path.stat().st_mtime_ns for path in untouched}
    again = run(small(batch_tokens=128), out)
    assert again.measured == sum(len(batch.cells) for batch in batches[:3])
    assert bytes_of(out) == before
    for path, at in untouched.items():
        assert path.stat().st_mtime_ns == at  # written once


def test_a_run_being_mended_is_not_complete(small, tmp_path, monkeypatch):
    run(small(), tmp_path / "run")
    attnscope.open_run(tmp_path / "run").batches[0].file(tmp_path / "run", "values").unlink()

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("attnscope.experiment.local.measure_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(small(), tmp_path / "run")
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_without_its_environment_everything_is_measured_again(small, tmp_path):
    """Without it the environment of the cells is unknown."""
    run(small(), tmp_path / "run")
    before = bytes_of(tmp_path / "run")
    (tmp_path / "run" / "environment.json").unlink()
    assert run(small(), tmp_path / "run").measured == 12
    assert bytes_of(tmp_path / "run") == before


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"models": {}}', "\x80"])
def test_a_damaged_environment_is_refused(small, tmp_path, content):
    run(small(), tmp_path / "run")
    (tmp_path / "run" / "environment.json").write_text(content, encoding="latin-1")
    with raises(InputError, "damaged-environment"):
        run(small(), tmp_path / "run")


def test_what_a_user_left_there_stays(small, tmp_path):
    run(small(), tmp_path / "run")
    for name in ("mine.part", "cells/mine.part", "notes.txt"):
        (tmp_path / "run" / name).write_text("mine")
    run(small(), tmp_path / "run")
    assert (tmp_path / "run" / "mine.part").read_text() == "mine"
    assert (tmp_path / "run" / "cells" / "mine.part").read_text() == "mine"


def test_a_second_process_changes_nothing_before_it_has_the_lock(small, tmp_path):
    """It used to look first and lock later, and then write its own experiment over the other's."""
    with open_directory(tmp_path / "run", small()):
        before = bytes_of(tmp_path / "run")
        with raises(InputError, "run-locked"):
            run(small(combine="max"), tmp_path / "run")
        with raises(InputError, "run-locked"):
            run(small(seed=7), tmp_path / "run")
        assert bytes_of(tmp_path / "run") == before


def test_the_number_of_threads_is_kept_to_and_given_back(small, tmp_path):
    import torch

    run(small(), tmp_path / "run")
    before = bytes_of(tmp_path / "run")
    attnscope.open_run(tmp_path / "run").batches[0].file(tmp_path / "run", "values").unlink()
    recorded = torch.get_num_threads()
    torch.set_num_threads(recorded + 1)
    try:
        run(small(), tmp_path / "run")
        assert torch.get_num_threads() == recorded + 1
    finally:
        torch.set_num_threads(recorded)
    assert bytes_of(tmp_path / "run") == before


@pytest.mark.parametrize("target", ["nowhere", "run"])
def test_a_link_that_leads_nowhere(small, tmp_path, target):
    (tmp_path / "run").symlink_to(tmp_path / target)
    with raises(InputError, "not-a-directory"):
        run(small(), tmp_path / "run")


def test_a_name_that_is_too_long(small, tmp_path):
    with raises(InputError, "bad-path"):
        run(small(), tmp_path / ("x" * 300))


def test_a_directory_that_goes_away_in_the_middle(small, tmp_path, monkeypatch):
    measure, batches = local.measure_batch, 0

    def moved(*args):
        nonlocal batches
        batches += 1
        if batches == 2:
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        return measure(*args)

    with monkeypatch.context() as patch:
        patch.setattr(local, "measure_batch", moved)
        with raises(InputError, "folder-missing"):
            run(small(), tmp_path / "run")
    run(small(), tmp_path / "elsewhere")
    assert attnscope.open_run(tmp_path / "elsewhere").complete


def test_another_executor_needs_no_other_writer(small, tmp_path):
    """Batches may come in any order, from any worker: the bytes are the same."""

    def backwards(plan, pending, *, threads):
        yield from reversed(list(local.local(plan, pending, threads=threads)))

    run(small(), tmp_path / "one")
    run(small(), tmp_path / "two", executor=backwards)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_a_run_explains_itself_anywhere(small, tmp_path):
    """The prompts' file and the class rules go with it: nothing in it points outside."""
    file, classes = tmp_path / "problems.jsonl", tmp_path / "mine.yaml"
    file.write_text(
        '{"question": "What is 1 + 1?", "topic": "sums", "n": 1}\n'
        '{"question": "And 2 + 2?", "topic": "more", "n": [2]}\n'
    )
    classes.write_text("classes: [digit, {name: other, every: token}]\n")
    experiment = small(prompts={"source": "file", "path": str(file)}, classes=[str(classes)])
    run(experiment, tmp_path / "run")
    for path in (file, classes):
        path.unlink()
    (tmp_path / "far").mkdir()
    away = (tmp_path / "run").rename(tmp_path / "far" / "away")
    assert str(tmp_path / "problems") not in (away / "experiment.yaml").read_text()
    opened_run = attnscope.open_run(away)
    assert opened_run.prompts.columns == ["prompt", "topic", "n"]
    assert opened_run.prompts["topic"].to_list() == ["sums", "more"]
    assert opened_run.prompts["n"].to_list() == ["1", "[2]"]
    again = read_experiment(away / "experiment.yaml")
    assert run(again, away).measured == 0
    run(again, tmp_path / "twice")
    assert bytes_of(tmp_path / "twice") == bytes_of(away)
    (away / "prompts.jsonl").write_text('{"question": "Another?"}\n')
    with raises(InputError, "file-changed"):
        run(again, away)


def test_boundary_tokens_on_both_sides_are_counted(small, tmp_path):
    run(small(), tmp_path / "run")
    cells = attnscope.open_run(tmp_path / "run").cells
    plan = make_plan(small()).models[0]
    boundaries = {
        cell.id: len(cell.alignment.base_boundary) for cell in plan.cells() if cell.alignment
    }
    stored = dict(
        cells.filter(condition="filler").select("cell", "base_boundary_tokens").iter_rows()
    )
    assert stored == boundaries
    assert set(cells.filter(condition="base")["base_boundary_tokens"]) == {0}


def test_nothing_to_do_loads_no_model(small, tmp_path, monkeypatch):
    run(small(), tmp_path / "run")

    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("attnscope.loading.load_text_model", refuse)
    assert run(small(), tmp_path / "run").measured == 0


def test_another_experiment_is_refused(small, tmp_path):
    run(small(), tmp_path / "run")
    before = bytes_of(tmp_path / "run")
    with raises(InputError, "other-experiment", keys=["layers", "seed"]):
        run(small(layers=[0], seed=3), tmp_path / "run")
    assert bytes_of(tmp_path / "run") == before


def test_a_directory_with_other_things_is_refused(small, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with raises(InputError, "not-a-run"):
        run(small(), tmp_path)
    with raises(InputError, "not-a-directory"):
        run(small(), tmp_path / "thesis.tex")


def test_cells_of_a_model_that_changed_are_refused(small, tmp_path):
    name = save_model(tmp_path / "model", seed=1)
    experiment = small(models={"tiny": name})
    run(experiment, tmp_path / "run")
    ids = {cell.id for cell in make_plan(experiment).models[0].cells()}
    # The same shape, the same configuration, other weights.
    save_model(tmp_path / "model", seed=2)
    assert not ids & {cell.id for cell in make_plan(experiment).models[0].cells()}
    with raises(InputError, "other-batches"):
        run(experiment, tmp_path / "run")


def test_another_environment_is_refused(small, tmp_path, monkeypatch):
    run(small(), tmp_path / "run")
    monkeypatch.setattr("attnscope.experiment.measuring_environment.__version__", "99")
    with raises(InputError, "other-environment", different={"attnscope": "99"}):
        run(small(), tmp_path / "run")


def test_the_environment_is_recorded(small, folder, tmp_path):
    run(small(), tmp_path / "run")
    environment = attnscope.open_run(tmp_path / "run").environment
    entry = environment["models"]["tiny"]
    assert entry["name"] == folder
    assert (entry["layers"], entry["heads"], entry["kv_heads"]) == (2, 4, 2)
    assert entry["architecture"] == "Qwen2ForCausalLM"
    assert entry["backend"] == "streaming"
    assert entry["bundled"] is False
    assert len(entry["revision"]) == 64
    assert {"torch", "transformers", "polars"} <= set(environment["packages"])
    assert environment["threads"] >= 1


def test_two_processes_do_not_share_a_directory(small, tmp_path):
    with (
        open_directory(tmp_path / "run", small()),
        raises(InputError, "run-locked"),
    ):
        run(small(), tmp_path / "run")


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "disk-full"), (errno.EACCES, "no-permission")],
)
def test_a_disk_that_refuses_loses_nothing(small, tmp_path, monkeypatch, number, code):
    run(small(), tmp_path / "whole")
    writes = 0
    replace = os.replace

    def sometimes(source, target):
        nonlocal writes
        writes += 1
        if writes > 12:
            raise OSError(number, os.strerror(number), str(target))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("attnscope.paths.os.replace", sometimes)
        with raises(InputError, code, errno=number):
            run(small(), tmp_path / "run")
    indices = [json.loads(path.read_text()) for path in (tmp_path / "run").glob("cells/*.json")]
    kept = sum(len(index["cells"]) for index in indices)
    assert kept > 0
    assert not list((tmp_path / "run").rglob("*.part"))
    assert run(small(), tmp_path / "run").measured == 12 - kept
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "whole")


def test_no_directory_can_be_made_inside_a_file(small, tmp_path):
    (tmp_path / "file").write_text("x")
    with raises(InputError, "not-a-directory"):
        run(small(), tmp_path / "file" / "run")


def test_a_directory_without_permission(small, tmp_path, monkeypatch):
    """Raised by hand: root may write anywhere."""
    mkdir = os.mkdir

    def refused(path, *more, **named):
        if Path(path).is_relative_to(tmp_path / "closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, *more, **named)

    monkeypatch.setattr(os, "mkdir", refused)
    with raises(InputError, "no-permission"):
        run(small(), tmp_path / "closed" / "run")


def test_an_interrupt_leaves_what_is_finished(small, tmp_path, monkeypatch):
    run(small(), tmp_path / "whole")
    measure, batches = local.measure_batch, 0

    def interrupted(*args):
        nonlocal batches
        batches += 1
        if batches == 2:
            raise KeyboardInterrupt
        return measure(*args)

    with monkeypatch.context() as patch:
        patch.setattr(local, "measure_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(small(), tmp_path / "run")
    run(small(), tmp_path / "run")
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "whole")


def test_progress_counts_cells_and_tokens(small, tmp_path):
    reported = []
    run(small(), tmp_path / "run", progress=lambda *seen: reported.append(seen))
    plan = make_plan(small())
    tokens = sum(batch.tokens for batch in plan.models[0].batches)
    assert reported[0] == (0, 0, tokens)
    assert reported[-1] == (12, tokens, tokens)
    assert reported == sorted(reported)


@pytest.mark.parametrize(
    ("keys", "code", "value"),
    [
        ({"layers": [0, 40]}, "unknown-layer", 40),
        ({"heads": [4]}, "unknown-head", 4),
        ({"keys": ["map"]}, "unknown-region", "map"),
        ({"queries": ["after:maps"]}, "unknown-region", "maps"),
        (
            {"conditions": {"base": {}, "x": {"insert": {}, "position": "after:maps"}}},
            "unknown-region",
            "maps",
        ),
    ],
)
def test_what_a_model_or_prompt_does_not_have(small, tmp_path, keys, code, value):
    with raises(InputError, code, value=value):
        run(small(**keys), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_chat_template(small, tmp_path):
    name = save_model(tmp_path / "plain", chat=False)
    with raises(InputError, "no-chat-template"):
        run(small(models=[name], chat=True), tmp_path / "run")
    run(small(models=[name], chat=False), tmp_path / "run")


def test_an_unknown_model(small, tmp_path):
    with pytest.raises(ModelError) as error:
        run(small(models=["./nothing"]), tmp_path / "run")
    assert error.value.code == "no-folder"


def test_prompts_from_a_file(small, tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text('{"problem": "What is 1 + 1?"}\n{"problem": "And 2 + 2?"}\n')
    prompts = {"source": "file", "path": str(file), "fields": {"question": "problem"}}
    outcome = run(small(prompts={**prompts, "system": "Be brief."}), tmp_path / "run")
    assert outcome.cells == 4
    with raises(InputError, "too-few-prompts", prompts=2, count=3):
        make_plan(small(prompts={**prompts, "count": 3}))


def test_regions_that_only_a_variant_has(small, tmp_path):
    experiment = small(queries=["region:filler"], keys=["filler"], measures=["mass", "entropy"])
    run(experiment, tmp_path / "run")
    values = attnscope.open_run(tmp_path / "run").values.collect()
    assert values.filter(condition="base")["value"].is_null().all()
    assert values.filter(condition="filler")["value"].is_not_null().all()


def test_the_default_size_of_a_batch_depends_on_the_device(small, monkeypatch):
    prompts = {"source": "math", "count": 2}
    assert small(prompts=prompts).batch_tokens == 256
    asked = small(prompts=prompts, batch_tokens="auto")
    plan = make_plan(asked)
    assert plan.experiment is asked
    assert plan.settled.batch_tokens == plan.stored.batch_tokens == TOGETHER["cpu"]
    assert plan.stored.with_keys(batch_tokens="auto", chat="auto") == asked
    monkeypatch.setattr("attnscope.experiment.plan.chosen_device", lambda _: "cuda:1")
    assert make_plan(asked).settled.batch_tokens == 8192
    assert make_plan(small(prompts=prompts)).settled.batch_tokens == 256


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "many", None])
def test_a_number_of_tokens_that_is_none(small, wrong):
    with raises(InputError, "bad-count", value=wrong):
        small(batch_tokens=wrong)


def test_batches_keep_to_the_budget(small):
    plan = make_plan(small(prompts={"source": "math", "count": 20}, batch_tokens=600))
    batches = plan.models[0].batches
    assert len(batches) > 3
    seen = []
    for batch in batches:
        for cells in batch.cells.values():
            widest = max(len(cell.tokens) for cell in cells)
            assert len(cells) == 1 or len(cells) * widest <= 600
        seen += [cell.prompt for cell in batch.cells["base"]]
    assert sorted(seen) == list(range(20))
    ids = [cell.id for cell in plan.models[0].cells()]
    assert len(set(ids)) == len(ids) == 40


def test_the_folder_is_not_needed_to_exist(small, tmp_path):
    run(small(), tmp_path / "a" / "b" / "run")
    assert Path(tmp_path / "a" / "b" / "run" / "manifest.json").is_file()


def test_readers_choices_refuse_no_directory(small, tmp_path):
    """How heads are combined and what is shown of a mass changes no number of a run."""
    run(small(), tmp_path / "run")
    before = bytes_of(tmp_path / "run")
    assert run(small(combine="max", normalise="lift"), tmp_path / "run").measured == 0
    after = bytes_of(tmp_path / "run")
    assert [name for name in before if before[name] != after[name]] == ["experiment.yaml"]
    opened_run = attnscope.open_run(tmp_path / "run")
    assert (opened_run.experiment.combine, opened_run.experiment.normalise) == ("max", "lift")


def test_a_region_as_one_number(small, tmp_path):
    keys = ["all", "question"]
    run(small(measures=["mass"], keys=keys, classes=["default", "whole"]), tmp_path / "run")
    values = attnscope.open_run(tmp_path / "run").values.collect()
    by = ["prompt", "condition", "keys", "layer", "head"]
    added = values.filter(classes="default").group_by(by).agg(pl.col("value", "tokens").sum())
    whole = values.filter(classes="whole").select(*by, "value", "tokens")
    assert set(values.filter(classes="whole")["item"]) == {"all"}
    assert_frame_equal(whole.sort(by), added.sort(by), abs_tol=1e-12)


def test_flow_of_a_class_that_asks_nothing_is_unknown(small, tmp_path):
    """The last token is of one class; what the others would look at is not 0."""
    run(small(measures=["flow"], queries=["last"], conditions={"base": {}}), tmp_path / "run")
    values = attnscope.open_run(tmp_path / "run").values.collect()
    for _, of_prompt in values.group_by("prompt"):
        nulls = of_prompt.group_by("item").agg(pl.col("value").is_null().all())
        assert nulls["value"].sum() == len(nulls) - 1


def test_prompts_asked_again_draw_again_and_say_so(small, tmp_path):
    """Whatever is drawn is drawn anew; readers then make the repeats of a prompt one unit."""
    sentence = {"base": {}, "sentence": {"insert": {"kind": "sentence", "count": 9}}}
    experiment = small(repeats=2, conditions=sentence, measures=["mass", "lambda"])
    run(experiment, tmp_path / "run")
    again = attnscope.open_run(tmp_path / "run")
    assert again.prompts["repeat_of"].to_list() == [*range(6), *range(6)]
    values = again.values.filter(pl.col("measure") == "mass").collect()
    first, second = (values.filter((pl.col("prompt") // 6) == which) for which in (0, 1))
    for condition in sentence:
        one, other = (side.filter(condition=condition)["value"] for side in (first, second))
        close = np.isclose(one, other, atol=1e-5, equal_nan=True).all()
        assert close == (condition == "base")
    compared = compare_run(again)
    assert set(compared["n"]) == {12}
    assert set(compared["units"]) == {6}
    with raises(InputError, "repeats-without-randomness", repeats=2):
        small(repeats=2)


def test_random_tokens_are_drawn_again_in_every_repeat(small):
    """A condition of random tokens depends on a seed, so repeats give other numbers."""
    asked = small(repeats=2, conditions={"base": {}, "drawn": {"random": 0}}, measures=["mass"])
    cells = make_plan(asked).models[0].cells()
    drawn = {tuple(cell.tokens.ids) for cell in cells if cell.condition == "drawn"}
    assert len(drawn) == 12


def test_tokens_of_every_class_are_counted_before_a_run(small, folder, tmp_path):
    file = tmp_path / "some.txt"
    file.write_text("one 1 two\nthree\n2 and 3\n")
    asked = small(
        models={"a": folder, "b": folder},
        prompts={"source": "file", "path": str(file)},
        chat=False,
        classes={
            "mine": [{"name": "digit", "pattern": "[0-9]", "strip": True}],
            "all": [{"name": "digit", "pattern": "[0-9]", "judgement": "fraction"}],
        },
    )
    plan = make_plan(asked)
    by_token, by_fraction = class_counts(plan)
    assert (by_token.models, by_token.classes, by_token.name) == (("a", "b"), "mine", "digit")
    assert (by_token.tokens, by_token.prompts, by_token.without) == (3, 3, (1,))
    assert by_fraction.without == (1,)
    assert 0 < by_fraction.tokens <= 3


def test_words_of_several_tokens(small, folder, tmp_path):
    file = tmp_path / "texts.jsonl"
    texts = ["He is by no means unhappy.", "She is nevertheless unhappy, I know.", "All is well."]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = {"name": "doubt", "words": ["by no means", "nevertheless"]}
    keys = {
        "prompts": {"source": "file", "path": str(file), "template": "{text}"},
        "measures": ["mass"],
        "classes": {"default": [words, {"name": "other", "every": "token"}]},
        "chat": False,
    }
    asked = small(**keys, conditions={"base": {}, "cut": {"knockout": {"tokens": "doubt"}}})
    counts = class_counts(make_plan(asked))
    run(asked, tmp_path / "run")
    run(small(**keys, conditions={"base": {}}), tmp_path / "base")
    assert check(attnscope.open_run(tmp_path / "base"), {"tiny": folder})["mass"] == 3 * 8 * 2
    measured = attnscope.open_run(tmp_path / "run")
    tokens = measured.tokens.filter(condition="base", **{"class": "doubt"}).collect()
    by_prompt = tokens.group_by("prompt").agg(pl.col("text").str.join(""), pl.len()).sort("prompt")
    assert [text.strip() for text in by_prompt["text"]] == ["by no means", "nevertheless"]
    assert counts[0].tokens == tokens.height > 4
    assert counts[0].without == (2,)
    mass = measured.values.filter(measure="mass", item="doubt").collect()
    cut = mass.filter(condition="cut", prompt=0)
    assert (cut["value"] == 0).all()
    assert (mass.filter(condition="base", prompt=0)["value"] > 0).all()


def test_a_region_that_only_some_prompts_have(small, tmp_path):
    file = tmp_path / "talks.jsonl"
    user, reply = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    short, long = [user], [user, reply, user]
    asked = {"conditions": {"base": {}}, "measures": ["mass"], "keys": ["turn:2:user"]}
    for talks in ([short, short, long], [long, short, short]):
        file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        prompts = {"source": "conversations", "path": str(file)}
        with pytest.warns(AttnscopeWarning, match=r"\b2 of 3\b"):
            make_plan(small(**asked, prompts=prompts))
    with pytest.raises(InputError) as error:
        make_plan(small(**{**asked, "keys": ["turn:3:user"]}, prompts=prompts))
    assert error.value.code == "unknown-region"
    assert error.value.values["value"] == "turn:3:user"
    assert "turn:2:user" in error.value.values["known"]


def test_prompts_draw_their_own_sample_of_queries(small, tmp_path):
    """The same text twice, in batches of one: another draw, or what a draw misses would be missed
    in every prompt, and no interval over prompts would show it."""
    file = tmp_path / "long.jsonl"
    long = " ".join(f"{n} apples and {n + 3} pears, then" for n in range(100))
    file.write_text((json.dumps({"question": long}) + "\n") * 2)
    experiment = small(
        prompts={"source": "file", "path": str(file)},
        queries=["sample:16"],
        measures=["entropy"],
        conditions={"base": {}},
        beyond_positions=True,
    )
    run(experiment, tmp_path / "run")
    values = attnscope.open_run(tmp_path / "run").values.collect()
    one, other = (values.filter(prompt=which)["value"] for which in (0, 1))
    assert (one - other).abs().max() > 1e-3


def test_a_sample_of_queries_says_how_sure_it_is(small, folder, tmp_path):
    """Estimates come with their standard errors; what is exact has none."""
    file = tmp_path / "long.jsonl"
    long = " ".join(f"{n} apples and {n + 3} pears, then" for n in range(200))
    file.write_text(json.dumps({"question": long}) + "\n")
    experiment = small(
        prompts={"source": "file", "path": str(file)},
        queries=["sample:64", "all"],
        measures=["mass", "entropy", "first_token", "distance"],
        conditions={"base": {}},
        beyond_positions=True,
    )
    run(experiment, tmp_path / "run")
    values = attnscope.open_run(tmp_path / "run").values.collect()
    exact = values.filter(queries="all")
    assert exact["error"].is_null().all()
    sampled = values.filter(queries="sample:64")
    known = sampled.filter(pl.col("measure") != "distance")
    assert known["error"].is_not_null().all()
    both = known.join(
        exact, on=["layer", "head", "measure", "item"], nulls_equal=True, suffix="_exact"
    )
    assert len(both) == len(known)
    away = both.with_columns((pl.col("value") - pl.col("value_exact")).abs().alias("off"))
    assert away.filter(measure="entropy")["off"].max() > 1e-4  # it is an estimate
    within = away.filter(pl.col("off") <= 3 * pl.col("error") + 1e-5)
    assert len(within) / len(away) > 0.97
    assert sampled.filter(measure="distance")["error"].is_null().all()  # not known
