"""`StrictModel`: the base of every part of an experiment. Frozen, no unknown keys, no silent
conversion.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from attnscope.errors import InputError

MOST = 1_000_000
"""Prompts of an experiment, and tokens of a filler: more is a slip of the finger."""
Count = Annotated[StrictInt, Field(ge=1, le=MOST)]
Seed = Annotated[StrictInt, Field(ge=-(2**62), le=2**62)]


class StrictModel(BaseModel):
    """Plain data, checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


P = TypeVar("P", bound=StrictModel)


def code_and_values(first: Any) -> dict[str, Any]:
    """The code and the values of an error of pydantic, as keywords of an `InputError`."""
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        return {"code": cause.code, **cause.values}
    code = {"missing": "missing-key", "extra_forbidden": "unknown-key"}.get(first["type"])
    key = ".".join(map(str, first["loc"]))
    if code is not None:
        return {"code": code, "value": key}
    return {"code": "bad-value", "key": key, "value": first["input"], "rule": first["type"]}


def validate(kind: type[P], data: Any, source: str) -> P:
    """Validate data as a model; a wrong value is an `InputError` that starts with `source`."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        message = ": ".join(part for part in (source, where, what) if part)
        raise InputError(message, **code_and_values(first)) from error
