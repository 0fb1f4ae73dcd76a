"""The tutorials in docs/notebooks run from top to bottom, and end with an answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def answer_of(book: Any) -> str:
    """What the last cell of code prints."""
    return printed([cell for cell in book.cells if cell.cell_type == "code"][-1]).strip()


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["1-first-look", "2-two-prompts", "3-is-it-causal"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    """With a bundled model: the one of the notebook has to be downloaded."""
    book = nbformat.read(path, as_version=4)
    settings = next(cell for cell in book.cells if cell.source.startswith("MODEL ="))
    settings.source += '\nMODEL = "zoo:chat-llama"'
    client = nbclient.NotebookClient(
        book,
        timeout=250,
        startup_timeout=250,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    # Unix sockets in the test's own folder: no port can be taken by another process.
    client.create_kernel_manager()
    client.km.transport = "ipc"
    client.km.ip = str(tmp_path / "kernel")
    client.execute()
    assert re.search(r"\d.*\.$", answer_of(book), flags=re.S)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_was_executed_on_a_real_model_and_answers_its_question(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert code[0].source.startswith('MODEL = "zoo:smollm2"')
    assert "**Question:**" in book.cells[0].source
    assert re.fullmatch(r"[A-Z].*\d.*\.", answer_of(book), flags=re.S)
    shown = nbformat.writes(book)
    assert re.search(r"/(home|root|tmp|work|Users)/", shown) is None
    assert not [o for cell in code for o in cell.outputs if o.get("name") == "stderr"]
