"""Every command in the blocks of README.md and of the documentation exists as it is written."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from attnscope.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands_of(text: str, program: str) -> list[list[str]]:
    """The words of the lines of code blocks that call a program, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    called = (shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} "))
    return [words[1:] for words in called]


def test_every_command_parses() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    number = 0
    for page in PAGES:
        for name, *arguments in commands_of(page.read_text(encoding="utf-8"), "attnscope"):
            assert name in group.commands, f"{page}: {name}"
            try:
                group.commands[name].make_context(name, list(arguments))
            except Exception as error:
                pytest.fail(f"{page}: attnscope {name} {' '.join(arguments)}: {error}")
            number += 1
    assert number > 60


def test_every_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = [
        words[0]
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for words in commands_of(page.read_text(encoding="utf-8"), "make")
    ]
    assert {"demo", "test"} <= set(named) <= targets
