"""Short forms of the conditions of an experiment, for the command line.

baseline · filler[:COUNT[:UNIT]][@POSITION] · arm[:NAME=VALUE,…] · knockout:CLASS[@REGION] ·
steer:CLASS[@REGION]:FACTOR; a bar between values makes several: `arm:c=0.05|0.25|0.45`

Each form becomes the keys of a `Condition`, which checks their values.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from typing import Any

from attnscope.errors import InputError, unknown
from attnscope.spec.base import validate
from attnscope.spec.conditions import Condition

_WHERE = r"(?P<tokens>[^:@]*)(@(?P<region>[^:]+))?"
FORMS = {
    "baseline": re.compile(r"baseline"),
    "filler": re.compile(r"filler(:(?P<count>[0-9]*)(:(?P<unit>[^@]+))?)?(@(?P<position>.+))?"),
    "arm": re.compile(r"arm(:(?P<settings>[^=,]+=[^=,]*(,[^=,]+=[^=,]*)*))?"),
    "knockout": re.compile(rf"knockout:{_WHERE}"),
    "steer": re.compile(rf"steer:{_WHERE}(:(?P<factor>[^:]*))?"),
}


def parse_conditions(words: Iterable[str]) -> dict[str, Condition]:
    """The conditions that these words stand for, by their names; with the baseline first."""
    names = [name for word in words for name in expand(word)]
    return {name: parse(name) for name in dict.fromkeys(["baseline", *names])}


def expand(word: str) -> list[str]:
    """The conditions that a word with bars stands for: every combination of its values."""
    choices = [part.split("|") for part in re.split(r"([:,=@])", word)]
    if any("" in some for some in choices if len(some) > 1):
        raise _bad(word, "every bar | needs a value on both sides, as in arm:c=0.05|0.25")
    return ["".join(some) for some in product(*choices)]


def parse(name: str) -> Condition:
    """The condition of one word without bars."""
    kind = re.split("[:@]", name)[0]
    if kind not in FORMS:
        raise unknown("condition", kind, FORMS)
    match = FORMS[kind].fullmatch(name)
    if match is None:
        forms = "baseline, filler:COUNT:UNIT@POSITION, arm:NAME=VALUE,NAME=VALUE"
        raise _bad(name, f"known forms: {forms}, knockout:CLASS@REGION, steer:CLASS@REGION:FACTOR")
    keys: dict[str, Any] = {key: text for key, text in match.groupdict().items() if text}
    if kind == "baseline":
        return Condition()
    if kind == "filler":
        position = keys.pop("position", "between")
        if "count" in keys:
            keys["count"] = int(keys["count"])
        return validate(Condition, {"insert": keys, "position": position}, repr(name))
    if kind == "arm":
        pairs = [part.split("=") for part in keys.get("settings", "").split(",") if part]
        keys = {key: _number(name, text) for key, text in pairs}
        if "layer" in keys:
            keys["layers"] = (keys.pop("layer"),)
    if kind == "steer":
        keys["factor"] = _number(name, keys.get("factor", ""))
    return validate(Condition, {kind: keys}, repr(name))


def settings(condition: Condition) -> dict[str, str]:
    """The settings that a sweep can vary, with their values as text."""
    if condition.insert is not None:
        filler = condition.insert.filler(0)
        return {
            "length": str(filler.count),
            "unit": filler.repeated,
            "position": str(condition.position),
        }
    values: dict[str, Any] = {}
    for spec in (condition.arm, condition.knockout, condition.steer):
        if spec is not None:
            values |= spec.model_dump(exclude_unset=True)
    names = {"layers": "layer", "tokens": "class"}
    single = {names.get(k, k): v[0] if isinstance(v, tuple) else v for k, v in values.items()}
    return {k: v if isinstance(v, str) else f"{v:g}" for k, v in single.items()}


def _number(name: str, text: str) -> float | int:
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    raise InputError(
        f"{name!r}: {text!r} is not a number", code="not-a-number", condition=name, value=text
    )


def _bad(name: str, what: str) -> InputError:
    return InputError(f"{name!r}: {what}", code="bad-condition", condition=name)
