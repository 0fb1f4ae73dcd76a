"""The page of errors that the documentation site makes has a section for every code."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def site() -> Any:
    pytest.importorskip("mkdocs")
    found = importlib.util.spec_from_file_location("site_pages", ROOT / "tools/docs/site.py")
    assert found is not None
    assert found.loader is not None
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_page_of_errors_has_every_code_that_tests_expect() -> None:
    sections = set(re.findall(r"^## (.+)$", site().errors(), flags=re.M))
    expected = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        expected |= set(re.findall(r'raises\(\w*Error, "([a-z0-9-]+)"', text))
    assert len(expected) > 200
    assert expected <= sections
