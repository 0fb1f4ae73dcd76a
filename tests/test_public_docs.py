"""Every public name has a complete docstring, and its example works as printed."""

import doctest
from pathlib import Path
from typing import Any

import pytest

import attnscope
from made_runs import made_run, write_run


@pytest.mark.parametrize("name", attnscope.__all__)
def test_examples_work(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "open_run":
        write_run(made_run(prompts=2, layers=(0,), heads=1), tmp_path / "runs" / "example")
    public: Any = getattr(attnscope, name)
    example = doctest.DocTestParser().get_doctest(public.__doc__, {}, name, None, 0)
    assert example.examples
    printed: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(example, out=printed.append)
    assert results.failed == 0, "".join(printed)


@pytest.mark.parametrize("name", attnscope.__all__)
def test_docstrings_are_complete(name: str) -> None:
    public: Any = getattr(attnscope, name)
    sections = ["Args:", "Examples:"]
    if not isinstance(public, type):
        sections += ["Returns:", "Raises:"]
    assert [section for section in sections if section not in public.__doc__] == []


def test_dir_lists_the_public_names_alone() -> None:
    assert sorted(dir(attnscope)) == sorted(["__version__", *attnscope.__all__])


def test_the_package_of_statistics_is_not_callable() -> None:
    import attnscope.stats

    assert not callable(attnscope.stats)
