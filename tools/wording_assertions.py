"""Lists test functions that assert the wording of a message: `python tools/wording_assertions.py`.

Such a test breaks when a sentence is improved, although no promise is broken. Tests assert error
codes and values instead; at most `MOST` examples of good wording stay.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
MOST = 40


def is_prose(node: ast.AST) -> bool:
    """Whether an expression is a literal of at least three words."""
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and len([word for word in node.value.split() if word.isalpha()]) >= 3
    )


def is_phrase(node: ast.AST) -> bool:
    """Whether a pattern has two words or more; numbers, names and paths are values."""
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and len(re.findall(r"\b[a-z]{2,}\b", re.sub(r"\\\w", " ", node.value))) >= 2
    )


def asserts_wording(function: ast.AST) -> bool:
    """Whether a test matches a message, or compares printed text with a sentence."""
    for node in ast.walk(function):
        if isinstance(node, ast.keyword) and node.arg == "match" and is_phrase(node.value):
            return True
        if isinstance(node, ast.Assert):
            for compare in ast.walk(node.test):
                if isinstance(compare, ast.Compare) and any(
                    is_prose(side) for side in (compare.left, *compare.comparators)
                ):
                    return True
    return False


def main() -> int:
    """Print the functions; 1 if there are too many."""
    named = [
        f"{path.relative_to(TESTS.parent).as_posix()}::{node.name}"
        for path in sorted(TESTS.rglob("test_*.py"))
        if path.parent.name != "prompts"  # texts of prompts are data
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and asserts_wording(node)
    ]
    print(*named, sep="\n")
    print(f"{len(named)} tests assert wording; fewer than {MOST} may")
    return len(named) >= MOST


if __name__ == "__main__":
    sys.exit(main())
