"""An experiment from YAML, with errors that name the line, and back to YAML.

What pydantic says about a place in the data is said about a line of the file.

This module must not know what the keys mean: that is `spec.py`.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from attnscope.errors import InputError
from attnscope.paths import is_far, place
from attnscope.spec.base import code_and_values
from attnscope.spec.conditions import Condition
from attnscope.spec.experiment import Experiment
from attnscope.spec.prompt_sources import SOURCES
from attnscope.yaml_file import Place, read_yaml


def read_experiment(path: str | Path, *, outside: bool = False) -> Experiment:
    """The experiment that a YAML file asks for. Paths in it are relative to the file, and do not
    leave its folder, unless what is `outside` is allowed: a file from somebody else must not read
    what lies about."""
    path = place(path)
    if not path.is_file():
        raise InputError(f"there is no experiment file {path}")
    data, lines = read_yaml(path)
    if not isinstance(data, dict):
        raise InputError(
            f"{path}: an experiment is a mapping with the keys {', '.join(Experiment.model_fields)}"
        )
    _find_files(data, path.parent, outside)
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        messages = [_explain(found, data, lines, path) for found in error.errors()]
        reasons = [_about(found, data) for found in error.errors()]
        reasons.sort(key=lambda about: about.get("code") != "unknown-key")  # a misspelling first
        about = next(filter(None, reasons), {})
        raise InputError("\n".join(dict.fromkeys(messages)), **about) from error


def written(experiment: Experiment) -> str:
    """The experiment as YAML, every default written out."""
    return yaml.safe_dump(experiment.complete(), sort_keys=False, allow_unicode=True, width=100)


def _find_files(data: dict[Any, Any], folder: Path, outside: bool) -> None:
    """Paths of prompts and class sets, from the folder of the experiment file."""
    prompts = data.get("prompts")
    if isinstance(prompts, dict) and isinstance(prompts.get("path"), str):
        prompts["path"] = _found("prompts.path", prompts["path"], folder, outside)
    classes = data.get("classes")
    if isinstance(classes, dict):
        data["classes"] = {
            label: _class_file(one, folder, outside) for label, one in classes.items()
        }
    elif classes is not None:
        named = classes if isinstance(classes, list) else [classes]
        data["classes"] = [_class_file(one, folder, outside) for one in named]


def _found(key: str, said: str, folder: Path, outside: bool) -> str:
    if is_far(folder):
        if said.startswith(("/", "~")) or ".." in said.split("/") or ":" in said:
            raise InputError(f"{key} {said!r} is outside {folder}; give the name of a file there")
        return str(folder / said)
    path = (folder / _expanded(said)).absolute()
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a zero in the name
        raise InputError(f"{key} {said!r} cannot be a file: {error}") from error
    if not outside and not inside:
        raise InputError(
            f"{key} {said!r} is outside the folder of the experiment ({folder.resolve()}); put the "
            "file there, or allow it with --outside (read_experiment(…, outside=True))"
        )
    return str(path)


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"prompts.path {path!r}: {error}") from error


def _class_file(name: Any, folder: Path, outside: bool) -> Any:
    if isinstance(name, str) and name.endswith((".yaml", ".yml")):
        return _found("classes", name, folder, outside)
    return name


def _explain(found: Any, data: dict[Any, Any], lines: dict[Place, int], path: Path) -> str:
    """One complaint of pydantic, in our words, with its line."""
    place = _place(found["loc"], data)
    about = code_and_values(found)
    if about.get("code") in ("renamed-key", "key-given-twice"):
        place = (about["value"],)
    known_place = place
    while known_place and known_place not in lines:
        known_place = known_place[:-1]
    at = f"{path}, line {lines.get(known_place, 1)}"
    name = ".".join(map(str, place))
    kind, message = found["type"], str(found["msg"]).removeprefix("Value error, ")
    if wrong := _unknown_key(found, data):
        fields = wrong["known"]
        near = get_close_matches(str(place[-1]), fields, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        return f"{at}: unknown key {name!r}{meant} (known: {', '.join(fields)})"
    if kind == "missing":
        return f"{at}: the key {name!r} is missing"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        said = data["prompts"].get("source") if isinstance(data.get("prompts"), dict) else None
        return f"{at}: unknown prompts.source {said!r}; known: {', '.join(SOURCES)}"
    value = _at(place, data)
    said = "" if isinstance(value, dict | list) or repr(value) in message else f" ({value!r})"
    return f"{at}: {name}{said}: {message}" if name else f"{at}: {message}"


def _about(found: Any, data: dict[Any, Any]) -> dict[str, Any]:
    """The code and the values of one error of pydantic."""
    if wrong := _unknown_key(found, data):
        return {"code": "unknown-key", **wrong}
    if found["type"] == "missing":
        return {"code": "missing-key", "value": ".".join(map(str, _place(found["loc"], data)))}
    return code_and_values(found)


def _unknown_key(found: Any, data: dict[Any, Any]) -> dict[str, Any] | None:
    """The key that pydantic does not know, and those that stand in its place."""
    if found["type"] != "extra_forbidden":
        return None
    place = _place(found["loc"], data)
    known = list(_model_at(place[:-1], data).model_fields)
    return {"value": ".".join(map(str, place)), "known": known}


def _place(loc: Place, data: Any) -> Place:
    """Where in the file: pydantic's place, without the branches of its unions."""
    place: Place = ()
    for step in loc:
        inside = _at(place, data)
        if isinstance(inside, dict):
            if step in inside or place != ("prompts",) or step not in SOURCES:
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
    """Whose keys stand at a place."""
    if place[:1] == ("prompts",):
        source = data["prompts"].get("source", "")
        return SOURCES[source]
    model: type[BaseModel] = Experiment
    if place[:1] == ("conditions",):
        model, place = Condition, place[2:]  # the step between them is a condition's name
    for step in place:
        field = model.model_fields.get(str(step))
        model = (field and _model_in(field.annotation)) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, alone or as one of several types."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
