"""Lists private words in names and prose: `python tools/private_words.py [FILE …]`.

One concept has one noun, and the noun is the one in the documentation of PyTorch, of
transformers, or in the papers (docs/glossary.md). This check finds words that only the makers of
attnscope used. `make check` runs it; an exception needs a reason in `ALLOWED`.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PEOPLE = "nobody somebody whoever anybody everybody"
METAPHORS = "told tell tells said seam seams twin twins gaze crowd lane lanes"
# As a part of any identifier, and anywhere in prose.
EVERYWHERE = _words(f"{PEOPLE} {METAPHORS} doubtful watchman")
# As a part of an identifier of the package.
IN_NAMES = EVERYWHERE | _words(
    "alike owed owe unread hair strangers telling facts begun reply replies kinds seen"
)
# As a whole identifier of the package: each of these named several different things.
AS_NAMES = _words("found asked made there wanted given own apart whole place room")
# In prose of the package and the documentation.
IN_PROSE = re.compile(
    r"\b(rooms?|ladder|the wall|looks|repl(?:y|ies)|must not know|even attention|twentieths?"
    r"|key/value caches?|fed in pieces|where no one says|fact of the prompts|single queries"
    r"|begun|those who|who(?:m)? (?:is|are|wants|asks|reads))\b",
    re.IGNORECASE,
)
REQUIRED = re.compile(r"cannot[ _]tell", re.IGNORECASE)
"""A word of the verdicts."""
STRICT = ("src/", "docs/", "README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/")
"""Elsewhere (tests, benchmarks, training, tools) only the words of EVERYWHERE are refused."""

ALLOWED: dict[tuple[str, str], str] = {
    ("tools/private_words.py", "*"): "the list itself",
    ("tests/support/made_tokenizers.py", "said"): "text that the test tokenizers are trained on",
    ("tools/compare_runs.py", "*"): "old names of columns, to compare with",
    ("CHANGELOG.md", "gaze"): "the old name of a route",
    ("src/attnscope/recipes/injection.py", "*"): "text of prompts; numbers depend on it",
    ("src/attnscope/prompts/conversations.py", "tell"): "text of prompts; numbers depend on it",
    ("src/attnscope/prompts/conversations.py", "anybody"): "text of prompts; numbers depend on it",
}
"""(start of a path, word) → the reason. At most 20."""


class Hit(NamedTuple):
    """A private word and its place."""

    path: str
    line: int
    word: str
    text: str


def words_of(identifier: str) -> list[str]:
    """The words of a snake_case or CamelCase identifier, in lower case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower().split("_")


def in_identifier(identifier: str, strict: bool) -> str | None:
    """The private word of an identifier, if it has one."""
    refused = IN_NAMES if strict else EVERYWHERE
    for word in words_of(REQUIRED.sub("", identifier)):
        if word in refused:
            return word
    return identifier if strict and identifier.strip("_") in AS_NAMES else None


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a module defines: classes, functions, arguments, variables, attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def in_prose(text: str, strict: bool) -> Iterator[tuple[int, str]]:
    """(Offset of the line, word) of every private word of a text."""
    for number, line in enumerate(REQUIRED.sub("", text).splitlines()):
        for word in re.findall(r"[A-Za-z]+", line):
            if word.lower() in EVERYWHERE:
                yield number, word.lower()
        if strict:
            for match in IN_PROSE.finditer(line):
                yield number, match[0].lower()


def prose_of_python(source: str) -> Iterator[tuple[int, str]]:
    """(Line, text) of every comment and string of a module."""
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            yield token.start[0], token.string


def hits_of(path: Path) -> Iterator[Hit]:
    """The private words of one file."""
    name = path.relative_to(ROOT).as_posix()
    strict = name.startswith(STRICT)
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    stem = in_identifier(path.stem, strict)
    if stem:
        yield Hit(name, 0, stem, "name of the file")
    if path.suffix == ".py":
        for line, identifier in defined_names(ast.parse(source)):
            word = in_identifier(identifier, strict)
            if word:
                yield Hit(name, line, word, lines[line - 1].strip())
        proses = list(prose_of_python(source))
    else:
        proses = [(1, source)]
    for first, text in proses:
        for offset, word in in_prose(text, strict):
            yield Hit(name, first + offset, word, lines[first + offset - 1].strip())


def is_allowed(hit: Hit) -> bool:
    """Whether an exception covers a hit."""
    return any(hit.path.startswith(path) and word in ("*", hit.word) for path, word in ALLOWED)


def files() -> list[Path]:
    """Every text file that people read or write."""
    folders = ("src", "docs", "tests", "benchmarks", "training", "examples", "tools", "validation")
    kinds = {".py", ".md", ".yaml", ".js", ".css", ".html"}
    inside = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in kinds]
    return sorted([*inside, *ROOT.glob("*.md")])


def main() -> int:
    """Print the hits; 1 if there are any."""
    parser = argparse.ArgumentParser(description="List private words in names and prose.")
    parser.add_argument("files", nargs="*", type=Path, help="files to read; default: all")
    parser.add_argument("--count", action="store_true", help="print numbers by file only")
    options = parser.parse_args()
    assert len(ALLOWED) <= 20, "too many exceptions"
    chosen = [p.resolve() for p in options.files] or files()
    hits = [hit for path in chosen for hit in hits_of(path) if not is_allowed(hit)]
    if options.count:
        for name, count in collections.Counter(hit.path for hit in hits).most_common():
            print(f"{count:5} {name}")
    else:
        for hit in hits:
            print(f"{hit.path}:{hit.line}: {hit.word}: {hit.text[:90]}")
    print(f"{len(hits)} private words")
    return bool(hits)


if __name__ == "__main__":
    sys.exit(main())
