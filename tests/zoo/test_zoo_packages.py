"""Every bundled folder is in exactly one of the two wheels."""

import tomllib
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from attnscope import zoo
from attnscope.cli import app
from attnscope.errors import ModelError
from attnscope.recipes import BUNDLED, RECIPES

ROOT = Path(__file__).parents[2]
IN_THE_WHEEL_OF_ATTNSCOPE = {"math-qwen2"}


def _read(path: str) -> Any:
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["tool"]["hatch"]["build"]


def test_every_folder_is_in_one_wheel() -> None:
    left_out = {Path(path).name for path in _read("pyproject.toml")["exclude"]}
    included = _read("packages/zoo/pyproject.toml")["targets"]["wheel"]["force-include"]
    assert left_out == {Path(path).name for path in included}
    assert left_out | IN_THE_WHEEL_OF_ATTNSCOPE == {*zoo.names(), *zoo.adapters()}
    for source, target in included.items():
        assert (ROOT / "packages/zoo" / source).is_dir()
        assert target == f"attnscope_zoo/{Path(source).name}"


def test_without_the_second_package_reproduce_leaves_no_recipe_out(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """It names the package before anything is measured."""
    assert BUNDLED == ("filler-profile", "filler-vs-sentence", "token-types")
    own = {name: zoo.folder(f"zoo:{name}") for name in IN_THE_WHEEL_OF_ATTNSCOPE}
    monkeypatch.setattr(zoo, "_folders", lambda config: own if config == "config.json" else {})
    assert all(RECIPES[name].bundled for name in BUNDLED)
    done = CliRunner().invoke(app, ["reproduce", "--prompts", "1", "--out", str(tmp_path / "runs")])
    assert isinstance(done.exception, ModelError)
    assert done.exception.code == "unknown-model"
    assert not (tmp_path / "runs").exists()


def test_models_of_the_second_package_are_found(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "attnscope_zoo" / "one-more"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "attnscope_zoo" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    zoo._folders.cache_clear()
    try:
        assert "one-more" in zoo.names()
        assert zoo.folder("zoo:one-more") == folder
        assert zoo.name_of(str(folder)) == "zoo:one-more"
    finally:
        zoo._folders.cache_clear()
