"""docs/architecture.md: its first block gives the numbers of `watch`, and it names every module."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

import attnscope
from families import VOCABULARY, build

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


@torch.no_grad()
def test_the_first_block_gives_the_numbers_of_watch() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
    defined: dict[str, Any] = {}
    exec(compile(block, "architecture.md", "exec"), defined)
    model, original = build("qwen2"), AttentionInterface.get_interface
    inputs = {"input_ids": torch.randint(5, VOCABULARY, (2, 40))}
    logits = defined["watch_plainly"](model, inputs).logits
    assert AttentionInterface.get_interface is original
    with attnscope.watch(model) as scope:
        assert torch.equal(model(**inputs).logits, logits)
    assert len(defined["received"]) == len(scope.layers)
    for layer, received in zip(scope.layers, defined["received"], strict=True):
        torch.testing.assert_close(received, scope.received(layer), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("package", ["interception", "scope", "kernels"])
def test_the_page_names_every_module(package: str) -> None:
    modules = {path.name for path in (ROOT / "src" / "attnscope" / package).glob("*.py")}
    assert modules - {"__init__.py"} <= set(re.findall(r"(\w+\.py)", PAGE))


def test_the_page_names_no_module_that_is_gone() -> None:
    modules = {path.name for path in ROOT.rglob("*.py") if ".old" not in path.parts}
    assert set(re.findall(r"(\w+\.py)", PAGE)) <= modules


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_decisions_are_numbered_and_short(page: Path) -> None:
    numbers = [int(each.name[:3]) for each in DECISIONS]
    assert numbers == list(range(1, len(numbers) + 1))
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert "**Decision.**" in text
    assert len(text.splitlines()) <= 40
