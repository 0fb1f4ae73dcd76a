"""YAML as plain data: bounded, with the line of everything, and no surprises.

A file is at most 4 MB long, 40 levels deep and 100,000 values large, aliases written out, so that
no file can take the machine with it. Keys are single words, none is there twice, and text is text.
YAML is parsed to nodes first, because these know their lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import InputError
from attnscope.paths import read_file

if TYPE_CHECKING:
    import yaml

LARGEST = 4 * 2**20
"""Bytes of a file."""
DEEPEST = 40
"""Levels, a list in a list being two."""
MOST = 100_000
"""Values, an alias counting for all that it stands for."""

_STANDARD = "tag:yaml.org,2002:"
_NUMBERS = (f"{_STANDARD}int", f"{_STANDARD}float")

KeyPath = tuple[Any, ...]
"""Keys and numbers that lead to a value."""


def read_yaml(path: Path) -> tuple[Any, dict[KeyPath, int]]:
    """What a file says, and the line of each value."""
    try:
        text = read_file(path, LARGEST, links=True).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text: {error}", code="not-utf8", path=str(path)
        ) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error}", code="unreadable-file", path=str(path)
        ) from error
    return parse_yaml(text, path)


def parse_yaml(text: str, where: object) -> tuple[Any, dict[KeyPath, int]]:
    """What a text says, and the line of each value; errors begin with `where`."""
    import yaml  # only where something is parsed

    try:
        _bounded(text, where)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        reading = _Reading(where)
        return (None if node is None else reading.plain(node, ())), reading.lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise InputError(
            f"{where}{line}: broken YAML: {error.problem or error}",
            code="broken-yaml",
            line=None if mark is None else mark.line + 1,
        ) from error
    except yaml.YAMLError as error:
        raise InputError(f"{where}: broken YAML: {error}", code="broken-yaml") from error


def _bounded(text: str, where: object) -> None:
    """Refuse what is too deep or too large while it is still only a stream of events."""
    import yaml

    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEEPEST or number > 2 * MOST:
            raise _too_much(where, event.start_mark.line + 1, deep=depth > DEEPEST)


def _too_much(where: object, line: int, *, deep: bool) -> InputError:
    if deep:
        return InputError(
            f"{where}, line {line}: nested more than {DEEPEST} levels deep",
            code="yaml-too-deep",
            line=line,
            limit=DEEPEST,
        )
    return InputError(
        f"{where}, line {line}: more than {MOST:,} values, with aliases expanded",
        code="yaml-too-large",
        line=line,
        limit=MOST,
    )


class _Reading:
    """Nodes to data, counted."""

    def __init__(self, where: object):
        self.where = where
        self.lines: dict[KeyPath, int] = {}
        self.count = 0

    def plain(self, node: yaml.Node, key_path: KeyPath) -> Any:
        """The node as Python data; `lines` learns where everything stands."""
        import yaml

        line = node.start_mark.line + 1
        self.lines.setdefault(key_path, line)
        self.count += 1
        if len(key_path) > DEEPEST or self.count > MOST:
            raise _too_much(self.where, line, deep=len(key_path) > DEEPEST)
        if isinstance(node, yaml.CollectionNode):
            kind = "map" if isinstance(node, yaml.MappingNode) else "seq"
            self._refuse_tag(node, f"{_STANDARD}{kind}")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key_path)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, (*key_path, n)) for n, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, key_path: KeyPath) -> dict[Any, Any]:
        import yaml

        data: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise InputError(
                    f"{self.where}, line {line}: a key must be a single word, not a list",
                    code="yaml-key",
                    line=line,
                )
            key = self._scalar(key_node)
            if key in data:
                first = self.lines[(*key_path, key)]
                raise InputError(
                    f"{self.where}, line {line}: the key {key!r} is given twice, first in line "
                    f"{first}",
                    code="key-given-twice",
                    value=key,
                    line=line,
                    first=first,
                )
            self.lines[(*key_path, key)] = line
            data[key] = self.plain(value_node, (*key_path, key))
        return data

    def _scalar(self, node: yaml.Node) -> Any:
        import yaml

        loader = yaml.SafeLoader("")
        plain = (True, False) if getattr(node, "style", None) is None else (False, True)
        meant = loader.resolve(yaml.ScalarNode, node.value, plain)  # type: ignore[no-untyped-call]
        self._refuse_tag(node, meant)
        if meant == f"{_STANDARD}bool" and node.value.lower() not in ("true", "false"):
            return node.value  # as in YAML 1.2: a list of words may contain no, yes, on and off
        if meant in _NUMBERS and ":" in node.value:
            raise self._impossible(node, "a number to base 60; a text needs quotes")
        try:
            value = loader.construct_object(node, deep=True)
            if isinstance(value, str):
                value.encode()
            return value
        except (ValueError, OverflowError) as error:  # no such date, a number of 5,000 digits …
            raise self._impossible(node, str(error)) from error
        finally:
            loader.dispose()

    def _refuse_tag(self, node: yaml.Node, meant: str) -> None:
        """Values are what they are without a tag such as `!!bool`, of which few can be read."""
        if node.tag != meant:
            tag = node.tag.replace(_STANDARD, "!!")
            raise self._impossible(node, f"the tag {tag} is not read; write the value without it")

    def _impossible(self, node: yaml.Node, why: str) -> InputError:
        line = node.start_mark.line + 1
        return InputError(
            f"{self.where}, line {line}: not a possible value: {why}",
            code="yaml-value",
            line=line,
            value=node.value,
        )
