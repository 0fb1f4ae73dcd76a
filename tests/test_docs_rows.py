"""The blocks of docs/rows.md run in order, with the promised results."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[1] / "docs" / "rows.md"


def test_the_blocks_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
    assert len(blocks) == text.count("```python") > 10
    made: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), made)
    rows, tokens = made["rows"], made["inputs"]["input_ids"].shape[1]
    torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:3]))
    assert rows.shape[2] == tokens
    assert made["binned"].shape[2] == -(-tokens // 8)
    torch.testing.assert_close(made["before"].nanmean(-1), made["score"])
    torch.testing.assert_close(
        made["first"] + made["recent"] + made["rest"], torch.ones_like(made["rest"])
    )
    lookback = made["lookback"]
    assert lookback.shape[2] == made["output"].shape[1] - tokens  # one for each new token
    torch.testing.assert_close(lookback[:, :, 0], torch.ones_like(lookback[:, :, 0]))
    assert (tmp_path / "attention.html").stat().st_size < 300_000
    assert capsys.readouterr().out.startswith("<Scope of 6 layers")
    assert made["types"].select("layer", "head").n_unique() == 72  # 6 layers of 12 heads
