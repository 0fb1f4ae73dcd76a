"""An experiment from YAML, with errors that name the line, and back to YAML.

YAML is parsed to nodes first, which know their lines; what pydantic says about a place in the data
is then said about a line of the file.

This module must not know what the keys mean: that is `spec.py`.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from attnscope.errors import InputError
from attnscope.question.conditions import Condition, Insert
from attnscope.question.spec import Experiment, FilePrompts, MathPrompts, SpatialPrompts

__all__ = ["read_experiment", "written"]

Place = tuple[Any, ...]
_SOURCES: dict[str, type[BaseModel]] = {
    "spatial": SpatialPrompts,
    "math": MathPrompts,
    "file": FilePrompts,
}


def read_experiment(path: str | Path) -> Experiment:
    """The experiment that a YAML file asks for. Paths in it are relative to the file."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no experiment file {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text: {error}") from error
    lines: dict[Place, int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = _plain(node, (), lines, path) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise InputError(f"{path}{line}: broken YAML: {error.problem or error}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}: broken YAML: {error}") from error
    if not isinstance(data, dict):
        raise InputError(
            f"{path}: an experiment is a mapping with the keys {', '.join(Experiment.model_fields)}"
        )
    _find_files(data, path.parent)
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        messages = [_explain(found, data, lines, path) for found in error.errors()]
        raise InputError("\n".join(dict.fromkeys(messages))) from error


def written(experiment: Experiment) -> str:
    """The experiment as YAML, every default written out."""
    return yaml.safe_dump(experiment.complete(), sort_keys=False, allow_unicode=True, width=100)


def _plain(node: yaml.Node, place: Place, lines: dict[Place, int], path: Path) -> Any:
    """The node as Python data; `lines` learns where everything stands."""
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        data: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = _scalar(key_node)
            line = key_node.start_mark.line + 1
            if key in data:
                raise InputError(
                    f"{path}, line {line}: {key!r} is there twice, first in line "
                    f"{lines[(*place, key)]}"
                )
            lines[(*place, key)] = line
            data[key] = _plain(value_node, (*place, key), lines, path)
        return data
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*place, n), lines, path) for n, item in enumerate(node.value)]
    return _scalar(node)


def _scalar(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def _find_files(data: dict[Any, Any], folder: Path) -> None:
    """Paths of prompts and class sets, from the folder of the experiment file."""
    prompts = data.get("prompts")
    if isinstance(prompts, dict) and isinstance(prompts.get("path"), str):
        prompts["path"] = str((folder / Path(prompts["path"]).expanduser()).absolute())
    classes = data.get("classes")
    if isinstance(classes, dict):
        data["classes"] = {label: _class_file(one, folder) for label, one in classes.items()}
    elif classes is not None:
        named = classes if isinstance(classes, list) else [classes]
        data["classes"] = [_class_file(one, folder) for one in named]


def _class_file(name: Any, folder: Path) -> Any:
    if isinstance(name, str) and name.endswith((".yaml", ".yml")):
        return str((folder / name).absolute())
    return name


def _explain(found: Any, data: dict[Any, Any], lines: dict[Place, int], path: Path) -> str:
    """One complaint of pydantic, in our words, with its line."""
    place = _place(found["loc"], data)
    known_place = place
    while known_place and known_place not in lines:
        known_place = known_place[:-1]
    at = f"{path}, line {lines.get(known_place, 1)}"
    name = ".".join(map(str, place))
    kind, message = found["type"], str(found["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        fields = list(_model_at(place[:-1], data).model_fields)
        near = get_close_matches(str(place[-1]), fields, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        return f"{at}: unknown key {name!r}{meant} (known: {', '.join(fields)})"
    if kind == "missing":
        return f"{at}: the key {name!r} is missing"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        said = data["prompts"].get("source") if isinstance(data.get("prompts"), dict) else None
        return f"{at}: unknown prompts.source {said!r}; known: {', '.join(_SOURCES)}"
    value = _at(place, data)
    said = "" if isinstance(value, dict | list) or repr(value) in message else f" ({value!r})"
    return f"{at}: {name}{said}: {message}" if name else f"{at}: {message}"


def _place(loc: Place, data: Any) -> Place:
    """Where in the file: pydantic's place, without the branches of its unions."""
    place: Place = ()
    for step in loc:
        inside = _at(place, data)
        if isinstance(inside, dict):
            if step in inside or place != ("prompts",) or step not in _SOURCES:
                place = (*place, step)
        elif isinstance(inside, list) and isinstance(step, int):
            place = (*place, step)
        elif not place:
            place = (step,)
    return place


def _at(place: Place, data: Any) -> Any:
    for step in place:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _model_at(place: Place, data: dict[Any, Any]) -> type[BaseModel]:
    if place[:1] == ("prompts",):
        source = data["prompts"].get("source", "")
        return _SOURCES[source]
    if place[:1] == ("conditions",):
        return Insert if place[2:] == ("insert",) else Condition
    return Experiment
