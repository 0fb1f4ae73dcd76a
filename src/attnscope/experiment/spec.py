"""`Experiment`: what is asked, as plain data. Frozen, validated, hashable.

Everything a run depends on stands here, with every default written out, so that the file in a run
directory is the whole question. `reading.py` makes one of a YAML file.

This module must not know models, files of a run, or how anything is measured.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from attnscope.errors import InputError, unknown
from attnscope.prompts.filler import KINDS, Filler
from attnscope.prompts.insertion import POSITIONS
from attnscope.prompts.math import LEVELS
from attnscope.tokens.named import load_classes

__all__ = [
    "MEASURES",
    "PAIR_MEASURES",
    "Condition",
    "Experiment",
    "FilePrompts",
    "Insert",
    "MathPrompts",
    "Prompts",
    "SpatialPrompts",
]

CLASS_MEASURES = ("mass", "flow")
HEAD_MEASURES = ("entropy", "first_token", "self_mass", "distance", "sink_mass")
PAIR_MEASURES = ("lambda", "uniformity", "value_similarity", "affine")
"""Of a variant against its base. `lambda` also gives lambda_ratio, spike_ratio and rest_ratio;
`affine` gives affine_lambda, affine_sigma and affine_r2."""
MEASURES = (*CLASS_MEASURES, *HEAD_MEASURES, *PAIR_MEASURES, "profile")

_QUERIES = ("all", "last", "sample:K", "after:REGION", "region:REGION")
_KEYS = ("all", "not-first", "the name of a region")


def _queries(value: Any) -> Any:
    if value in ("all", "last"):
        return value
    kind, _, what = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind == "sample" and what.isdecimal() and int(what) >= 4:
        return value
    if kind in ("after", "region") and what:
        return value
    if value == "generated":
        raise ValueError(
            "queries 'generated': a run reads prompts and generates nothing; use attnscope.watch "
            f"around model.generate for that, or one of {', '.join(_QUERIES)}"
        )
    hint = "; K is a whole number of at least 4" if kind == "sample" else ""
    raise ValueError(f"unknown queries {value!r}; known: {', '.join(_QUERIES)}{hint}")


def _key(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        raise ValueError(f"unknown keys {value!r}; known: {', '.join(_KEYS)}")
    return value


def _measure(value: Any) -> Any:
    if value not in MEASURES:
        raise unknown("measure", value, MEASURES)
    return value


def _position(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"unknown position {value!r}; {_POSITIONS}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"position {value} is before the first character; {_POSITIONS}")
        return value
    side, _, region = value.partition(":")
    if value not in POSITIONS and not (side in ("before", "after") and region):
        raise ValueError(f"unknown position {value!r}; {_POSITIONS}")
    return value


_POSITIONS = (
    f"known: {', '.join(POSITIONS)}, before:REGION, after:REGION, or the number of a character"
)


def _numbers(value: Any) -> Any:
    """`all`, or whole numbers from 0, each once."""
    if value == "all":
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    good = isinstance(value, list | tuple) and value
    if not good or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in value):
        raise ValueError(f"{value!r} is neither 'all' nor a list of whole numbers from 0")
    if len(set(value)) < len(value):
        raise ValueError(f"{value!r} names a number twice")
    return tuple(sorted(value))


def _heads(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(label): _numbers(numbers) for label, numbers in value.items()}
    return _numbers(value)


def _listed(value: Any) -> Any:
    """One thing may be written without the brackets of a list."""
    return value if isinstance(value, list | tuple) else [value]


def _classes(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"a class set is a name or the path of a YAML file, not {value!r}")
    load_classes(value)
    return value


Queries = Annotated[StrictStr, BeforeValidator(_queries)]
Keys = Annotated[StrictStr, BeforeValidator(_key)]
Measure = Annotated[StrictStr, BeforeValidator(_measure)]
Classes = Annotated[StrictStr, BeforeValidator(_classes)]
Numbers = Literal["all"] | tuple[int, ...]
OneOrMore = BeforeValidator(_listed)


class _Plain(BaseModel):
    """Frozen, nothing unknown, nothing converted behind the user's back."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class SpatialPrompts(_Plain):
    """Maps with a shape, from `attnscope.prompts.spatial`."""

    source: Literal["spatial"] = "spatial"
    count: Annotated[StrictInt, Field(ge=1)] = 64
    seed: StrictInt = 0
    task: Literal["action", "map"] = "action"
    split: Literal["train", "test"] | None = None
    size: Annotated[StrictInt, Field(ge=7)] = 9


class MathPrompts(_Plain):
    """Word problems, from `attnscope.prompts.math`."""

    source: Literal["math"] = "math"
    count: Annotated[StrictInt, Field(ge=1)] = 64
    seed: StrictInt = 0
    level: StrictInt | None = None
    """1 to 5; all levels in turn where it is not given."""

    @model_validator(mode="after")
    def _level(self) -> MathPrompts:
        if self.level is not None and self.level not in LEVELS:
            raise unknown("level", self.level, LEVELS)
        return self


class FilePrompts(_Plain):
    """The records of a file, from `attnscope.prompts.datasets`."""

    source: Literal["file"] = "file"
    path: StrictStr
    count: Annotated[StrictInt, Field(ge=1)] | None = None
    """The first so many records; all of them where it is not given."""
    template: StrictStr = "{question}"
    fields: dict[StrictStr, StrictStr] = {}
    system: StrictStr | None = None


Prompts = Annotated[SpatialPrompts | MathPrompts | FilePrompts, Field(discriminator="source")]


class Insert(_Plain):
    """What is inserted: the fields of `attnscope.prompts.Filler`."""

    kind: StrictStr = "repeat"
    unit: StrictStr | None = None
    count: Annotated[StrictInt, Field(ge=0)] = 55
    seed: StrictInt = 0
    """Prompt n gets the filler of seed + n, so that many prompts have many sentences."""

    @model_validator(mode="after")
    def _possible(self) -> Insert:
        if self.kind not in KINDS:
            raise unknown("kind of filler", self.kind, KINDS)
        self.filler(0)
        return self

    def filler(self, prompt: int) -> Filler:
        """What goes into this prompt."""
        return Filler(kind=self.kind, count=self.count, unit=self.unit, seed=self.seed + prompt)


class Condition(_Plain):
    """How a prompt is changed. The one without an insertion is the base."""

    insert: Insert | None = None
    position: Annotated[StrictInt | StrictStr, BeforeValidator(_position)] = "between"
    by: Literal["text", "ids"] = "text"

    @property
    def is_base(self) -> bool:
        """Whether this is the prompt as it is."""
        return self.insert is None


class Experiment(_Plain):
    """Models × prompts × conditions × layers × heads × queries × keys × classes × measures."""

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Letters, digits, dots, dashes: it becomes the name of a directory."""
    models: dict[StrictStr, StrictStr]
    """Label to name. A list of names is its own labels."""
    prompts: Prompts
    chat: StrictBool = True
    """Put every prompt into the model's chat template."""
    conditions: dict[StrictStr, Condition] = {"base": Condition()}
    layers: Annotated[Numbers, BeforeValidator(_numbers)] = "all"
    heads: Annotated[Numbers | dict[str, Numbers], BeforeValidator(_heads)] = "all"
    """The heads to store: for every model, or by the model's label."""
    queries: Annotated[tuple[Queries, ...], OneOrMore] = ("all",)
    keys: Annotated[tuple[Keys, ...], OneOrMore] = ("all",)
    """For `mass` and `lambda`; the other measures are about all keys."""
    classes: Annotated[tuple[Classes, ...], OneOrMore] = ("default",)
    """Class sets for `mass` and `flow`: names, or paths of YAML files."""
    measures: Annotated[tuple[Measure, ...], OneOrMore] = ("mass",)
    combine: Literal["mean", "sum", "max", "each"] = "mean"
    """How readers combine heads. Every head is stored, whatever this says."""
    normalise: Literal["mass", "per-token", "share", "lift"] = "mass"
    """What readers show of `mass`. What each needs is stored, whatever this says."""
    seed: StrictInt = 0
    """Of `sample:K`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: StrictStr | None = None
    """As `attnscope.load` takes it; null is the first GPU there is, else the CPU."""
    backend: Literal["auto", "reference", "streaming", "triton", "eager-fallback"] = "auto"
    batch_tokens: Annotated[StrictInt, Field(ge=1)] = 8192
    """As many prompts go through the model together as have this many tokens, padding included."""

    @model_validator(mode="before")
    @classmethod
    def _label(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("models"), str | list | tuple):
            named = _listed(data["models"])
            if len(set(map(str, named))) < len(named):
                twice = next(name for name in named if named.count(name) > 1)
                raise ValueError(f"model {twice!r} is listed twice; give labels: 'a: {twice}'")
            data = {**data, "models": {str(name): name for name in named}}
        return data

    @model_validator(mode="after")
    def _whole(self) -> Experiment:
        if not self.models:
            raise ValueError("no models: list at least one under 'models'")
        bases = [name for name, condition in self.conditions.items() if condition.is_base]
        if len(bases) != 1:
            raise ValueError(
                f"{len(bases)} conditions are without an insertion ({', '.join(bases) or 'none'}); "
                "exactly one is the base: 'base: {}'"
            )
        for what in ("queries", "keys", "classes", "measures"):
            chosen = getattr(self, what)
            if not chosen:
                raise ValueError(f"{what} is empty; name at least one")
            if len(set(chosen)) < len(chosen):
                raise ValueError(f"{what} names something twice: {', '.join(chosen)}")
        if isinstance(self.heads, dict) and set(self.heads) != set(self.models):
            raise ValueError(
                f"heads by model names {', '.join(self.heads)}; the models' labels are "
                f"{', '.join(self.models)}"
            )
        return self._possible()

    def _possible(self) -> Experiment:
        pairs = [measure for measure in self.measures if measure in PAIR_MEASURES]
        if pairs and len(self.conditions) == 1:
            raise ValueError(
                f"{pairs[0]!r} compares a condition with the base, and there is only the base; "
                "add a condition with an insertion, or leave it out"
            )
        labels = list(self.class_sets)
        if len(labels) < len(self.classes):
            raise ValueError(
                f"two class sets have the same name: {', '.join(labels)}; a set from a file is "
                "called by the file's name, without its ending"
            )
        if "flow" in self.measures:
            for label, classes in self.class_sets.items():
                if any(one.judgement == "fraction" for one in classes):
                    raise ValueError(
                        f"flow cannot use the class set {label!r}: it is judged by fraction, so "
                        "a query is of no single class; use another set, such as default"
                    )
        return self

    @property
    def base(self) -> str:
        """The name of the condition without an insertion."""
        return next(name for name, condition in self.conditions.items() if condition.is_base)

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the other conditions, in order."""
        return tuple(name for name in self.conditions if name != self.base)

    @cached_property
    def class_sets(self) -> dict[str, Any]:
        """The class sets by the names that the tables call them."""
        return {_label_of(source): load_classes(source) for source in self.classes}

    def heads_of(self, label: str) -> Numbers:
        """The heads to store of a model."""
        return self.heads[label] if isinstance(self.heads, dict) else self.heads

    def complete(self) -> dict[str, Any]:
        """Every key with its value, as plain data: what is written into a run."""
        return self.model_dump(mode="json")

    @cached_property
    def digest(self) -> str:
        """A hash of all of it; of a class set in a file, the rules."""
        rules = {label: classes.fingerprint for label, classes in self.class_sets.items()}
        text = json.dumps([self.complete(), rules], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)


def _label_of(source: str) -> str:
    return source.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".yaml").removesuffix(".yml")


def made(**keys: Any) -> Experiment:
    """An experiment from Python; what is wrong with it is an `InputError`."""
    from pydantic import ValidationError

    try:
        return Experiment(**keys)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the experiment"
        raise InputError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error
