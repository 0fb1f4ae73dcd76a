"""A finished run with more prompts: `--extend` keeps its cells, and says how often one looked."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from typer.testing import CliRunner

import attnscope
from attnscope.cli import app
from attnscope.errors import InputError
from attnscope.experiment.execute import run_plan
from attnscope.experiment.extend import plan_run
from attnscope.run.store import Run
from attnscope.spec.claims import load_claims
from attnscope.spec.experiment import Experiment
from attnscope.stats.run_stats import judge_run
from run_bytes import bytes_of
from support_errors import raises

TEXTS = [f"Text number {n} has {'some words and ' * n}an end." for n in range(12)]


def records(texts: list[str], file: Path) -> None:
    lines = [json.dumps({"question": text, "kind": len(text) % 3}) + "\n" for text in texts]
    file.write_text("".join(lines))


@pytest.fixture
def asked(folder: str, tmp_path: Path) -> Any:
    """Makes the experiment with so many of the texts."""

    def make(count: int, **keys: Any) -> Experiment:
        records(TEXTS[:count], tmp_path / "texts.jsonl")
        prompts = {"source": "file", "path": str(tmp_path / "texts.jsonl")}
        settings = {"measures": ["mass", "entropy"], "batch_tokens": 200, "chat": False}
        return attnscope.spec.experiment.make_experiment(
            name="texts", models={"tiny": folder}, **{"prompts": prompts, **settings, **keys}
        )

    return make


def carry_out(experiment: Experiment, folder: Path, **options: Any) -> Run:
    extend = options.pop("extend", False)
    plan, old = plan_run(experiment, folder, extend=extend)
    run_plan(plan, folder, extends=old, **options)
    return attnscope.open_run(folder)


def cells_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cells").iterdir()}


def test_old_cells_stay_as_they_are(asked: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = carry_out(asked(5), out)
    before, values = cells_of(out), first.values.collect()
    second = carry_out(asked(9), out, extend=True)
    after = cells_of(out)
    assert {name: after[name] for name in before} == before
    assert len(after) > len(before)
    assert second.complete
    assert second.experiment.interim == (5,)
    assert second.values.filter(pl.col("prompt") < 5).collect().equals(values)
    assert second.cells["prompt"].n_unique() == second.prompts.height == 9
    # The same command continues, with or without --extend; and nothing is measured again.
    for extend in (False, True):
        again = plan_run(asked(9), out, extend=extend)
        assert again[1] is None
        assert run_plan(again[0], out).measured == 0
    third = carry_out(asked(12), out, extend=True)
    assert third.experiment.interim == (5, 9)
    assert {name: cells_of(out)[name] for name in after} == after
    # The stored experiment measured in one go has the same bytes.
    stored = attnscope.spec.experiment_yaml.read_experiment(out / "experiment.yaml")
    carry_out(stored, tmp_path / "whole")
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


def test_an_interrupted_extension_continues(asked: Any, tmp_path: Path) -> None:
    carry_out(asked(5), tmp_path / "run")
    stopped = carry_out(asked(12), tmp_path / "run", extend=True, stop=lambda: True)
    assert not stopped.complete
    with raises(InputError, "run-not-finished", folder=str(tmp_path / "run")):
        records([*TEXTS, "One more."], tmp_path / "texts.jsonl")
        plan_run(
            stopped.experiment.with_keys(interim=(), prompts=asked_prompts(tmp_path)),
            tmp_path / "run",
            extend=True,
        )
    finished = carry_out(asked(12), tmp_path / "run")
    carry_out(asked(5), tmp_path / "other")
    carry_out(asked(12), tmp_path / "other", extend=True)
    assert finished.complete
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "other")


def asked_prompts(folder: Path) -> dict[str, Any]:
    return {"source": "file", "path": str(folder / "texts.jsonl")}


def test_a_stop_at_any_file_is_repaired(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extension that stops before one of its files is written can be given again."""
    from attnscope.run.writer import Directory

    carry_out(asked(5), tmp_path / "whole")
    carry_out(asked(7), tmp_path / "whole", extend=True)
    write = Directory.write
    for name in (
        "prompts.jsonl",
        "experiment.yaml",
        "metadata.jsonl",
        "plan.json",
        "environment.json",
    ):
        out = tmp_path / name
        carry_out(asked(5), out)

        def stop(self: Directory, file: str, content: bytes, name: str = name) -> None:
            if file == name and not (self.folder / file).read_bytes() == content:
                raise KeyboardInterrupt
            write(self, file, content)

        longer = asked(7)
        with monkeypatch.context() as patch:
            patch.setattr(Directory, "write", stop)
            with pytest.raises(KeyboardInterrupt):
                carry_out(longer, out, extend=True)
        carry_out(asked(7), out, extend=True)
        assert bytes_of(out) == bytes_of(tmp_path / "whole"), name


def test_what_cannot_be_extended(asked: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with raises(InputError, "no-run-to-extend", folder=str(out)):
        plan_run(asked(5), out, extend=True)
    carry_out(asked(5), out)
    with raises(InputError, "other-experiment", keys=["prompts"], same=5):
        plan_run(asked(9), out)
    with raises(InputError, "other-experiment", keys=["prompts", "measures"]):
        plan_run(asked(9, measures=["mass"]), out, extend=True)
    with raises(InputError, "prompts-changed", same=4, before=5):
        plan_run(asked(4), out, extend=True)
    experiment = asked(9)
    records([*TEXTS[:2], "Another text.", *TEXTS[3:9]], tmp_path / "texts.jsonl")
    with raises(InputError, "prompts-changed", same=2, before=5):
        plan_run(experiment, out, extend=True)
    changed = [json.dumps({"question": text, "kind": 7}) for text in TEXTS[:9]]
    (tmp_path / "texts.jsonl").write_text("\n".join(changed))
    with raises(InputError, "prompts-changed", same=0, before=5):
        plan_run(experiment, out, extend=True)
    with raises(InputError, "bad-interim", value=[5, 5]):
        asked(9, interim=[5, 5])
    with raises(InputError, "bad-interim", prompts=5):
        plan_run(asked(5, interim=[5]), tmp_path / "new")


def test_verdicts_count_the_looks(asked: Any, tmp_path: Path) -> None:
    (tmp_path / "claims.yaml").write_text("claims: {wide: entropy > 0.1}\n")
    claims = load_claims(tmp_path / "claims.yaml")
    out = tmp_path / "run"
    once = carry_out(asked(6), out, claims=claims)
    (verdict,) = judge_run(once)
    assert verdict.written is not None
    assert "look" not in verdict.written
    twice = carry_out(asked(9), out, extend=True)
    (verdict,) = judge_run(twice)
    assert verdict.written is not None
    assert verdict.written.startswith("written before the run")
    assert "look 2" in verdict.written
    assert "6" in verdict.written
    shown = CliRunner().invoke(app, ["compare", str(out)]).stdout
    assert "look 2" in shown


def test_the_command(asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = yaml.safe_load(yaml.safe_dump(asked(5).to_dict()))
    keys["prompts"] = {"source": "file", "path": "texts.jsonl"}
    (tmp_path / "texts.yaml").write_text(yaml.safe_dump(keys))
    invoke = CliRunner().invoke
    assert invoke(app, ["run", "texts.yaml"]).exit_code == 0
    records(TEXTS[:8], tmp_path / "texts.jsonl")
    refused = invoke(app, ["run", "texts.yaml"])
    assert isinstance(refused.exception, InputError)
    assert (refused.exception.code, refused.exception.values["same"]) == ("other-experiment", 5)
    both = invoke(app, ["run", "texts.yaml", "--extend", "--shard", "1/2"])
    assert isinstance(both.exception, InputError)
    assert both.exception.code == "conflicting-options"
    result = invoke(app, ["run", "texts.yaml", "--extend"])
    assert result.exit_code == 0, result.output
    assert attnscope.open_run("runs/texts").cells.height == 8
