"""What single keys of an experiment may say: how each is read, and what is refused."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, StrictStr

from attnscope.errors import InputError, is_int, unknown
from attnscope.measures.registry import MEASURES
from attnscope.spec.queries import parse_queries
from attnscope.tokens.class_sets import class_set, load_classes
from attnscope.tokens.classes import ClassSet

_KEYS = ("all", "not-first", "the name of a region")


def _queries(value: Any) -> Any:
    parse_queries(value)
    return value


def _key(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        raise InputError(
            f"unknown keys {value!r}; known: {', '.join(_KEYS)}",
            code="unknown-keys",
            value=value,
            known=list(_KEYS),
        )
    return value


def _measure(value: Any) -> Any:
    if not isinstance(value, str) or value not in MEASURES:
        raise unknown("measure", value, MEASURES)
    return value


def _device(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[a-z]+(:[0-9]{1,3})?", value):
        raise InputError(
            f"{value!r} is not the name of a device; write for example cpu, cuda, cuda:1 or mps",
            code="unknown-device",
            value=value,
        )
    return value


def _numbers(value: Any) -> Any:
    """`all`, or whole numbers from 0, each once."""
    if value == "all":
        return value
    if is_int(value):
        value = [value]
    if not isinstance(value, list | tuple) or not value or not all(map(is_int, value)):
        raise InputError(
            f"{value!r} is neither 'all' nor a list of whole numbers from 0",
            code="bad-numbers",
            value=value,
        )
    if len(set(value)) < len(value):
        raise InputError(f"{value!r} names a number twice", code="listed-twice", value=value)
    return tuple(sorted(value))


def _heads(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(label): _numbers(numbers) for label, numbers in value.items()}
    return _numbers(value)


def as_list(value: Any) -> Any:
    """One thing may be written without the brackets of a list."""
    return value if isinstance(value, list | tuple) else [value]


def _class_sets(value: Any) -> Any:
    """Label to rules. Names and files are their own labels; a label may also have its rules."""
    if not isinstance(value, dict):
        named = as_list(value)
        value = {}
        for source in named:
            if not isinstance(source, str):
                raise InputError(
                    f"a class set is a name or the path of a YAML file, not {source!r}. Rules in "
                    "the experiment need a label: 'classes: {mine: [RULE, …]}'",
                    code="bad-class-set",
                    value=source,
                )
            label = _label_of(source)
            if label in value:
                raise InputError(
                    f"two class sets have the same name: {', '.join([*value, label])}. A set from "
                    "a file has the file's name without its ending; give another label: 'label: "
                    "FILE.yaml'",
                    code="listed-twice",
                    key="classes",
                    value=label,
                )
            value[label] = source
    return {_word(label): _class_set(label, source) for label, source in value.items()}


def _label_of(source: str) -> str:
    return source.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".yaml").removesuffix(".yml")


def _class_set(label: str, source: Any) -> ClassSet:
    if isinstance(source, str | ClassSet):
        return load_classes(source)
    if not isinstance(source, list | tuple) or not source:
        raise InputError(
            f"class set {label!r} is a name, the path of a YAML file or a list of rules, not "
            f"{source!r}",
            code="bad-class-set",
            value=source,
            label=label,
        )
    return class_set(source)


def _rules(sets: dict[str, ClassSet]) -> dict[str, list[dict[str, Any]]]:
    return {label: classes.rules for label, classes in sets.items()}


def _word(label: Any) -> str:
    if not isinstance(label, str) or not label:
        raise InputError(f"{label!r} is not a label; give a word", code="bad-label", value=label)
    return label


def _tokens(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise InputError(
        f"{value!r} is not a number of tokens; give a whole number from 1, or auto",
        code="bad-count",
        value=value,
    )


QueriesWord = Annotated[StrictStr, BeforeValidator(_queries)]
Keys = Annotated[StrictStr, BeforeValidator(_key)]
MeasureName = Annotated[StrictStr, BeforeValidator(_measure)]
ClassSets = Annotated[dict[str, ClassSet], PlainValidator(_class_sets), PlainSerializer(_rules)]
OneOrMore = BeforeValidator(as_list)
AllOrSome = Literal["all"] | tuple[int, ...]
Layers = Annotated[AllOrSome, BeforeValidator(_numbers)]
Heads = Annotated[AllOrSome | dict[str, AllOrSome], BeforeValidator(_heads)]
"""For every model, or by the model's label."""
Device = Annotated[StrictStr | None, BeforeValidator(_device)]
BatchTokens = Annotated[int | Literal["auto"], BeforeValidator(_tokens)]
