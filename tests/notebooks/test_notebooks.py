"""The notebooks in docs/ run from top to bottom, and show what they promise."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def test_there_is_one_for_each_recipe_of_the_bundled_models() -> None:
    from attnscope.recipes import BUNDLED

    assert {path.stem for path in NOTEBOOKS} == set(BUNDLED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    # Six prompts are the fewest that have p-values.
    settings = next(cell for cell in book.cells if cell.source.startswith("MODELS ="))
    settings.source += "\nPROMPTS = 6"
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
    shown = [
        output.data
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    charts = [data for data in shown if "application/vnd.vegalite.v6+json" in data]
    assert len(charts) == sum(
        cell.source.startswith("draw(") and ".data" not in cell.source for cell in book.cells
    )
    assert all("image/png" in data for data in charts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_was_executed_and_says_that_the_models_are_tiny(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert "tiny" in book.cells[0].source
