"""Reads an experiment from YAML, with errors that name the line, and writes it as YAML."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from attnscope.errors import InputError
from attnscope.paths import is_remote, to_path
from attnscope.spec.base import code_and_values
from attnscope.spec.conditions import WITHOUT_FILE, Condition
from attnscope.spec.experiment import Experiment
from attnscope.spec.prompt_sources import SOURCES
from attnscope.vision.pictures import is_path
from attnscope.yaml_file import KeyPath, read_yaml


def read_experiment(
    path: str | Path, *, outside: bool = False, replaced: dict[str, Any] | None = None
) -> Experiment:
    """The experiment that a YAML file asks for, with `replaced` in place of keys of the file.

    Paths in it are relative to the file, and do not leave its folder, unless what is `outside` is
    allowed: an experiment file from another person must not read other files.
    """
    path = to_path(path)
    if not path.is_file():
        raise InputError(
            f"the experiment file {path} does not exist", code="file-missing", path=str(path)
        )
    data, lines = read_yaml(path)
    if not isinstance(data, dict):
        raise InputError(
            f"{path}: an experiment is a mapping with the keys "
            f"{', '.join(Experiment.model_fields)}",
            code="not-a-mapping",
            path=str(path),
            known=list(Experiment.model_fields),
        )
    data |= replaced or {}
    _find_files(data, path.parent, outside)
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        errors = [_about(detail, data, lines, path) for detail in error.errors()]
        messages = dict.fromkeys(message for message, _ in errors)
        # A misspelt key is often the cause of the other errors.
        first = next((v for _, v in errors if v["code"] == "unknown-key"), errors[0][1])
        raise InputError("\n".join(messages), **first) from error


def experiment_to_yaml(experiment: Experiment) -> str:
    """The experiment as YAML, every default written out."""
    return yaml.safe_dump(experiment.to_dict(), sort_keys=False, allow_unicode=True, width=100)


def _find_files(data: dict[Any, Any], folder: Path, outside: bool) -> None:
    """Paths of prompts and class sets, from the folder of the experiment file."""
    prompts = data.get("prompts")
    if isinstance(prompts, dict) and isinstance(prompts.get("path"), str):
        prompts["path"] = _path_in("prompts.path", prompts["path"], folder, outside)
    if isinstance(prompts, dict) and prompts.get("source") == "hub" and not prompts.get("path"):
        prompts["name"] = _hub_name(prompts.get("name"), folder, outside)
    _find_pictures(data, folder, outside)
    classes = data.get("classes")
    if isinstance(classes, dict):
        data["classes"] = {
            label: _class_file(one, folder, outside) for label, one in classes.items()
        }
    elif classes is not None:
        named = classes if isinstance(classes, list) else [classes]
        data["classes"] = [_class_file(one, folder, outside) for one in named]


def _find_pictures(data: dict[Any, Any], folder: Path, outside: bool) -> None:
    """Paths of pictures in records and conditions, from the folder of the experiment file."""

    def resolved(key: str, source: Any) -> Any:
        if isinstance(source, list):
            return [resolved(key, one) for one in source]
        return _path_in(key, source, folder, outside) if is_path(source) else source

    prompts, conditions = data.get("prompts"), data.get("conditions")
    if isinstance(prompts, list):
        prompts = {"records": prompts}
    if not isinstance(prompts, dict):
        prompts = {}
    if isinstance(prompts.get("folder"), str) and not prompts.get("path"):
        prompts["folder"] = _path_in("prompts.folder", prompts["folder"], folder, outside)
    records = prompts.get("records")
    for record in records if isinstance(records, list) else ():
        field = prompts.get("image", "image")
        if isinstance(record, dict) and record.get(field):
            record[field] = resolved(f"prompts.records.{field}", record[field])
    for name, condition in conditions.items() if isinstance(conditions, dict) else ():
        image = condition.get("image") if isinstance(condition, dict) else None
        if isinstance(image, str) and image and image not in WITHOUT_FILE:
            condition["image"] = _path_in(f"conditions.{name}.image", image, folder, outside)


def _path_in(key: str, name: str, folder: Path, outside: bool) -> str:
    if is_remote(folder):
        if name.startswith(("/", "~")) or ".." in name.split("/") or ":" in name:
            raise InputError(
                f"{key} {name!r} is outside {folder}; give the name of a file in it",
                code="path-outside-folder",
                key=key,
                value=name,
            )
        return str(folder / name)
    path = (folder / _expanded(name)).absolute()
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a zero in the name
        raise InputError(
            f"{key} {name!r} is not a possible path: {error}", code="bad-path", key=key, value=name
        ) from error
    if not outside and not inside:
        raise InputError(
            f"{key} {name!r} is outside the folder of the experiment ({folder.resolve()}); move "
            "the file there, or allow it with --outside (read_experiment(…, outside=True))",
            code="path-outside-folder",
            key=key,
            value=name,
        )
    return str(path)


def _hub_name(name: Any, folder: Path, outside: bool) -> Any:
    """The id of a data set; or the path of a folder, which `datasets` would read too."""
    if not isinstance(name, str) or is_remote(folder):
        return name
    local = (folder / _expanded(name)).exists() or Path(name).exists()
    return _path_in("prompts.name", name, folder, outside) if local else name


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(
            f"prompts.path {path!r}: {error}", code="bad-path", key="prompts.path", value=path
        ) from error


def _class_file(name: Any, folder: Path, outside: bool) -> Any:
    if isinstance(name, str) and name.endswith((".yaml", ".yml")):
        return _path_in("classes", name, folder, outside)
    return name


def _about(
    detail: Any, data: dict[Any, Any], lines: dict[KeyPath, int], path: Path
) -> tuple[str, dict[str, Any]]:
    """One error of pydantic: the message with its line, and the keywords of an `InputError`."""
    key_path, values = _key_path(detail["loc"], data), code_and_values(detail)
    if values["code"] in ("renamed-key", "key-given-twice"):
        key_path = (values["value"],)
    known_path = key_path
    while known_path and known_path not in lines:
        known_path = known_path[:-1]
    line, name = lines.get(known_path, 1), ".".join(map(str, key_path))
    values["line"] = line
    message = str(detail["msg"]).removeprefix("Value error, ")
    kind = detail["type"]
    if kind == "extra_forbidden":
        known = list(_model_at(key_path[:-1], data).model_fields)
        values |= {"value": name, "known": known}
        near = get_close_matches(str(key_path[-1]), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        message = f"unknown key {name!r}{hint} (known: {', '.join(known)})"
    elif kind == "missing":
        values["value"] = name
        message = f"the key {name!r} is missing"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        source = data["prompts"].get("source") if isinstance(data.get("prompts"), dict) else None
        values |= {"code": "unknown-source", "value": source, "known": list(SOURCES)}
        message = f"unknown prompts.source {source!r}; known: {', '.join(SOURCES)}"
    elif name:
        value = _at(key_path, data)
        short = isinstance(value, dict | list) or repr(value) in message
        message = f"{name}{'' if short else f' ({value!r})'}: {message}"
    return f"{path}, line {line}: {message}", values


def _key_path(loc: KeyPath, data: Any) -> KeyPath:
    """Where in the file: pydantic's place, without the branches of its unions."""
    key_path: KeyPath = ()
    for step in loc:
        inside = _at(key_path, data)
        if isinstance(inside, dict):
            if step in inside or key_path != ("prompts",) or step not in SOURCES:
                key_path = (*key_path, step)
        elif isinstance(inside, list) and isinstance(step, int):
            key_path = (*key_path, step)
        elif not key_path:
            key_path = (step,)
    return key_path


def _at(key_path: KeyPath, data: Any) -> Any:
    for step in key_path:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _model_at(key_path: KeyPath, data: dict[Any, Any]) -> type[BaseModel]:
    """Whose keys stand at a place."""
    if key_path[:1] == ("prompts",):
        short = isinstance(data["prompts"], list)
        return SOURCES["inline" if short else data["prompts"].get("source", "")]
    model: type[BaseModel] = Experiment
    if key_path[:1] == ("conditions",):
        model, key_path = Condition, key_path[2:]  # the step between them is a condition's name
    for step in key_path:
        field = model.model_fields.get(str(step))
        model = (field and _model_in(field.annotation)) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, alone or as one of several types."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
