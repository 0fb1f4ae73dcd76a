"""Every block of docs/how-to.md runs, from top to bottom in one folder."""

import re
import shlex
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from typer.testing import CliRunner

from attnscope.cli import app
from made_gguf import save_gguf
from made_models import save_model

PAGE = Path(__file__).parents[1] / "docs" / "how-to.md"


def test_the_blocks_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("note.txt").write_text("Tom has 12 apples. 汤姆 😀", encoding="utf-8")
    save_gguf(save_model(tmp_path / "tiny"), tmp_path / "model.gguf")
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    assert len(blocks) == text.count("```") / 2 > 12
    made: dict[str, Any] = {}
    outputs: list[str] = []
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, str(PAGE), "exec"), made)
        elif kind == "yaml":
            Path(f"{yaml.safe_load(block)['name']}.yaml").write_text(block, encoding="utf-8")
        else:
            for line in block.splitlines():
                assert line.startswith("attnscope ")
                arguments = shlex.split(line)[1:]
                done = CliRunner().invoke(
                    app, arguments, input="Tom has 12 apples.", env={"COLUMNS": "160"}
                )
                assert done.exit_code == 0, (line, done.output, done.exception)
                outputs.append(done.output)
    assert len(made["table"]) == made["frame"].height
    assert set(made["frame"]["layer"]) == set(made["scope"].layers)
    region = made["region"].filter(measure="mass")
    assert region["item"].unique().to_list() == ["all"]
    assert region["value"].is_between(0, 1).all()
    for name in ("head-map.png", "head-map.csv", "head-strip.png"):
        assert (tmp_path / "runs" / "wording" / "figures" / name).stat().st_size > 300
    assert (tmp_path / "runs" / "answers" / "figures" / "by-query.md").is_file()
    values = made["answers"].by_query.collect()
    assert values.filter(pl.col("keys") == "generated")["value"].is_not_null().any()
    printed = capsys.readouterr().out
    assert "<Run wording in" in printed
    assert "<Scope of 6 layers" in printed
    compared = [out for out in outputs if "entropy" in out and "mass" not in out]
    assert len(compared) >= 2  # filters keep what was asked for
