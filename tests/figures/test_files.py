"""What figures and the report write: no formulas, no global state, no path of this machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import pytest

from attnscope.figures import draw
from attnscope.figures.export import as_csv, csv
from attnscope.figures.shapes.shape import chart_of
from attnscope.report import build
from made_runs import made_run


def test_no_csv_has_a_formula() -> None:
    texts = ["=1+1", "+1", "-1", "@a", "\t=1", "plain", "", None]
    made = pl.read_csv(as_csv(pl.DataFrame({"token": texts, "value": range(8)})).encode())
    assert [text[0] for text in made["token"][:5]] == ["'"] * 5
    assert made["token"][5] == "plain"
    assert made["value"].to_list() == list(range(8))
    run = made_run(
        models=("m",), prompts=1, layers=(0,), heads=1, profile_heads=(0,), texts=("=cmd()",)
    )
    assert "'=cmd()" in csv(draw(run, "text"))


def test_charts_of_many_rows_do_not_touch_the_settings_of_altair(monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the settings of altair are global")

    monkeypatch.setattr(alt.data_transformers, "enable", refuse)
    monkeypatch.setattr(alt.data_transformers, "disable_max_rows", refuse)
    base = chart_of(pl.DataFrame({"x": range(6_000)}))
    chart = alt.concat(alt.layer(base.mark_point().encode(x="x:Q"), base.mark_bar()))
    assert [len(rows) for rows in chart.to_dict()["datasets"].values()] == [6_000]


def with_changes(run: Any, **changes: Any) -> Any:
    return replace(run, experiment=run.experiment.with_keys(**changes))


def small() -> Any:
    return made_run(models=("m",), prompts=2, layers=(0,), heads=1, measures=("entropy",))


@pytest.mark.parametrize("chat", [True, False])
def test_the_report_mentions_a_chat_template_only_if_there_is_one(chat: bool) -> None:
    assert ("chat template" in build(with_changes(small(), chat=chat))) == chat


def test_the_report_has_no_path_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"question": "Why?"}\n' * 2)
    prompts = {"source": "file", "path": str(tmp_path / "prompts.jsonl")}
    page = build(with_changes(small(), prompts=prompts))
    assert str(tmp_path) not in page
    assert "path: prompts.jsonl" in page
