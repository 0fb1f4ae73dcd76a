"""`Experiment`: what to measure, as plain data. Frozen, validated, hashable.

Everything a run depends on stands here, with every default written out, so that the file in a run
directory is the whole question. `yaml.py` makes one of a YAML file.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr, model_validator

from attnscope.errors import InputError
from attnscope.measures.registry import MEASURES
from attnscope.spec.base import Count, Seed, StrictModel, validate
from attnscope.spec.conditions import Condition, base_of
from attnscope.spec.engines import check_vllm
from attnscope.spec.fields import (
    AllOrSome,
    BatchTokens,
    ClassSets,
    Device,
    Heads,
    Keys,
    Layers,
    MeasureName,
    OneOrMore,
    QueriesWord,
    as_list,
)
from attnscope.spec.generate import GENERATED, Generate
from attnscope.spec.prompt_sources import Prompts, SpeechPrompts, TokenPrompts
from attnscope.spec.queries import parse_queries

RENAMED = {"cut": "truncate"}
"""Keys that had another name, and today's."""
OF_ONE_PASS = {"flow", "values", "heads", "outputs", "activations", "residual", "next_token"}
"""Needs of measures that generation does not provide."""
_OF_RUN = re.compile(r"images/[0-9a-f]{64}\.[a-z]+$")
"""The name of a picture in a run."""
SPEECH_NEEDS = {"sums", "rows", "flow", "max_logit", "sound"}
"""What measures may need of a pass with sound."""
DISPLAY_KEYS = ("combine", "normalise")
"""Keys that say how numbers are shown; none of the numbers depends on them."""


def current_keys(data: Any) -> Any:
    """The keys with today's names: `normalize` is `normalise`; an old key is refused."""
    if not isinstance(data, dict):
        return data
    for old, new in RENAMED.items():
        if old in data:
            raise InputError(
                f"the key {old!r} has a new name: write {new!r}",
                code="renamed-key",
                value=old,
                new=new,
            )
    if "normalize" not in data:
        return data
    if "normalise" in data:
        raise InputError(
            "normalise and normalize are the same key: write one of them",
            code="key-given-twice",
            value="normalize",
        )
    return {"normalise" if key == "normalize" else key: value for key, value in data.items()}


class Profiles(StrictModel):
    """Of which layers and heads `profile` keeps a number per token, of those that are measured."""

    layers: Layers = "all"
    heads: Heads = "all"
    """For every model, or by the model's label."""

    def heads_of(self, label: str) -> AllOrSome:
        """The heads of a model."""
        return self.heads[label] if isinstance(self.heads, dict) else self.heads


class Experiment(StrictModel):
    """Models × prompts × conditions × layers × heads × queries × keys × classes × measures."""

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Letters, digits, dots, dashes: it becomes the name of a directory."""
    models: dict[StrictStr, StrictStr]
    """Label to name. A list of names is its own labels."""
    prompts: Prompts
    repeats: Count = 1
    """How often each prompt is asked, every time with other seeds of whatever is drawn."""
    chat: StrictBool | Literal["auto"] = "auto"
    """Put every prompt into the model's chat template; `auto` does if the models have one."""
    bos: StrictBool = False
    """Begin every text with the begin-of-sequence token, where the tokenizer does not."""
    truncate: Count | None = None
    """Keep this many tokens from the start of every text."""
    beyond_positions: StrictBool = False
    """Allow prompts longer than a model was made for, where it can compute them at all."""
    generate: Generate | None = None
    """How the model answers every prompt; measured while it does. Filled in where queries or keys
    are about what is generated."""
    conditions: dict[StrictStr, Condition] = Field(default_factory=lambda: {"base": Condition()})
    base: StrictStr = ""
    """The condition that the others are compared with; found where it is not given."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What runs the models."""
    layers: Layers = "all"
    heads: Heads = "all"
    """The heads to store: for every model, or by the model's label."""
    queries: Annotated[tuple[QueriesWord, ...], OneOrMore] = ("all",)
    keys: Annotated[tuple[Keys, ...], OneOrMore] = ("all",)
    """For `mass` and `lambda`; the other measures are about all keys."""
    classes: ClassSets = Field(default="default", validate_default=True)
    """Class sets for `mass` and `flow`, by the labels that the tables have. As names or paths of
    YAML files they are looked up once; the rules themselves are what is kept and written."""
    measures: Annotated[tuple[MeasureName, ...], OneOrMore] = ("mass",)
    profiles: Profiles = Profiles()
    """Per-token and per-query tables are large; limit them to these layers and heads."""
    bin: Count = 1
    """Of numbers per query: how many positions a mean is over."""
    combine: Literal["mean", "sum", "max", "each"] = "mean"
    """How readers combine heads. Every head is stored, whatever this says."""
    normalise: Literal["mass", "per-token", "share", "lift"] = "mass"
    """What readers show of `mass`. What each needs is stored, whatever this says."""
    seed: Seed = 0
    """Of `sample:K`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Device = None
    """As `attnscope.load` takes it; null is the first GPU there is, else the CPU."""
    backend: Literal["auto", "reference", "streaming", "triton", "eager-fallback"] = "auto"
    batch_tokens: BatchTokens = "auto"
    """As many prompts go through the model together as have this many tokens, padding included;
    auto is what suits the device."""
    interim: tuple[Count, ...] = ()
    """How many prompts the run had each time before more were added (`run --extend`). A batch has
    prompts of one addition."""

    @model_validator(mode="before")
    @classmethod
    def _label(cls, data: Any) -> Any:
        data = current_keys(data)
        if isinstance(data, dict) and isinstance(data.get("prompts"), list | tuple):
            data = {**data, "prompts": {"source": "inline", "records": data["prompts"]}}
        if isinstance(data, dict) and isinstance(data.get("models"), str | list | tuple):
            named = as_list(data["models"])
            for name in named:
                if not isinstance(name, str):
                    raise InputError(
                        f"{name!r} is not the name of a model; put it in quotes",
                        code="bad-model-name",
                        value=name,
                    )
                if named.count(name) > 1:
                    raise InputError(
                        f"model {name!r} is listed twice; give labels: 'a: {name}'",
                        code="listed-twice",
                        key="models",
                        value=name,
                    )
            data = {**data, "models": {name: name for name in named}}
        return data

    @model_validator(mode="after")
    def _check_all(self) -> Experiment:
        if not self.models:
            raise InputError(
                "no models: list at least one under 'models'", code="empty-list", key="models"
            )
        try:
            json.dumps(self.model_dump(), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{error.object[error.start]!r} is half of a surrogate pair, not a character",
                code="lone-surrogate",
            ) from None
        object.__setattr__(self, "base", base_of(self.conditions, self.base or None))
        about = (*(parse_queries(q).region or q for q in self.queries), *self.keys)
        if self.generate is None and GENERATED in about:
            object.__setattr__(self, "generate", Generate())
        if not self.classes:
            raise InputError(
                "classes is empty; name at least one class set", code="empty-list", key="classes"
            )
        for what in ("queries", "keys", "measures"):
            chosen = getattr(self, what)
            if not chosen:
                raise InputError(f"{what} is empty; name at least one", code="empty-list", key=what)
            if len(set(chosen)) < len(chosen):
                raise InputError(
                    f"{what} names something twice: {', '.join(chosen)}",
                    code="listed-twice",
                    key=what,
                    value=chosen,
                )
        for what, heads in (("heads", self.heads), ("profiles.heads", self.profiles.heads)):
            if isinstance(heads, dict) and set(heads) != set(self.models):
                raise InputError(
                    f"{what} by model names {', '.join(heads)}; the models' labels are "
                    f"{', '.join(self.models)}",
                    code="unknown-label",
                    key=what,
                    value=list(heads),
                    known=list(self.models),
                )
        return self._check_measures()

    def _check_measures(self) -> Experiment:
        pairs = [measure for measure in self.measures if MEASURES[measure].compares_to_base]
        if pairs and len(self.conditions) == 1:
            raise InputError(
                f"{pairs[0]!r} compares a condition with the base, and the base is the only "
                "condition; add a condition, or leave the measure out",
                code="no-variant",
                measure=pairs[0],
            )
        if self.engine == "vllm":
            check_vllm(self)
        if self.generate is not None:
            self._check_generation()
        elif alone := [name for name in self.measures if MEASURES[name].about_generation]:
            raise InputError(
                f"{alone[0]!r} measures the completion; let the model generate with "
                "'queries: predicts:generated' or 'generate'",
                code="needs-completion",
                measure=alone[0],
            )
        self._check_speech()
        if isinstance(self.prompts, TokenPrompts) and self.chat is True:
            raise InputError(
                "prompts of random tokens take no chat template; write chat: false",
                code="tokens-with-chat",
            )
        if self.repeats > 1 and not self._is_random():
            raise InputError(
                f"repeats: {self.repeats}, but no part of the experiment is random, so every "
                "repeat would give the same numbers. Leave repeats out, or use a random filler or "
                "position, random tokens, sample:K, or sampled completions",
                code="repeats-without-randomness",
                repeats=self.repeats,
            )
        if list(self.interim) != sorted(set(self.interim)) or (self.interim and self.repeats > 1):
            raise InputError(
                f"interim is {list(self.interim)}; it lists growing numbers of prompts, and "
                "repeats must be 1",
                code="bad-interim",
                value=list(self.interim),
            )
        for label in self.models:
            _part_of("layers", self.profiles.layers, self.layers)
            _part_of("heads", self.profiles.heads_of(label), self.heads_of(label))
        if "flow" in self.measures:
            for label, classes in self.classes.items():
                if any(one.judgement == "fraction" for one in classes):
                    raise InputError(
                        f"flow cannot use the class set {label!r}: it assigns fractions of a "
                        "token, so a query has no single class; use another set, such as default",
                        code="class-set-by-fraction",
                        value=label,
                    )
        return self

    def _check_speech(self) -> None:
        """Spoken sentences are fixed, and only they have sound."""
        spoken = isinstance(self.prompts, SpeechPrompts)
        hearing = [name for name in self.measures if "sound" in MEASURES[name].needs]
        if hearing and not spoken:
            raise InputError(
                f"{hearing[0]!r} measures attention to sound; use the prompt source 'speech'",
                code="needs-sound",
                measure=hearing[0],
            )
        changed = [one for one in self.conditions.values() if one != Condition()]
        if spoken and (self.variants or changed or self.chat is True or self.generate is not None):
            raise InputError(
                "prompts of the source 'speech' have one unchanged condition, no chat template, "
                "and no 'generate': the sound and its transcript belong together",
                code="speech-changed",
            )
        others = {name: MEASURES[name].needs - SPEECH_NEEDS for name in self.measures}
        if spoken and (self.engine != "transformers" or any(others.values())):
            known = [name for name, one in MEASURES.items() if one.needs <= SPEECH_NEEDS]
            raise InputError(
                "prompts of the source 'speech' are measured with engine: transformers, by the "
                f"measures of attention: {', '.join(known)}",
                code="not-with-speech",
                measures=[name for name, needs in others.items() if needs],
            )

    def _is_random(self) -> bool:
        """Whether anything depends on a seed."""
        fixed = {"repeat", "word"}
        inserted = [c for c in self.conditions.values() if c.insert is not None]
        return (
            any(
                c.position == "random" or (c.insert and c.insert.kind not in fixed)
                for c in inserted
            )
            or any(c.random is not None for c in self.conditions.values())
            or any(parse_queries(queries).sample for queries in self.queries)
            or (self.generate is not None and self.generate.sample)
        )

    def _check_generation(self) -> None:
        """What cannot be measured while a model answers, since it is not known beforehand."""
        for queries in self.queries:
            if parse_queries(queries).sample:
                raise InputError(
                    f"queries {queries!r}: a sample is drawn from a finished text, so it cannot "
                    "be combined with 'generate'; leave out one of the two",
                    code="sample-with-generate",
                    value=queries,
                )
        for name in self.measures:
            if needs := MEASURES[name].needs & OF_ONE_PASS:
                raise InputError(
                    f"{name!r} needs {', '.join(sorted(needs))}, which one pass over a finished "
                    "text gives and generation does not; measure it without 'generate', in an "
                    "experiment of its own",
                    code="measure-with-generate",
                    measure=name,
                    needs=sorted(needs),
                )

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the other conditions, in order."""
        return tuple(name for name in self.conditions if name != self.base)

    def heads_of(self, label: str) -> AllOrSome:
        """The heads to store of a model."""
        return self.heads[label] if isinstance(self.heads, dict) else self.heads

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, as plain data: what is written into a run."""
        return self.model_dump(mode="json")

    def identity(self) -> dict[str, Any]:
        """What the numbers depend on: not what readers choose, and not where a file lies."""
        keys_of_identity = {
            key: value for key, value in self.to_dict().items() if key not in DISPLAY_KEYS
        }
        keys_of_identity["prompts"] = {
            key: v for key, v in keys_of_identity["prompts"].items() if key != "path"
        }
        if (
            keys_of_identity["bin"] == 1
        ):  # which older questions do not say: theirs are the same ones
            del keys_of_identity["bin"]
        if not self.interim:
            del keys_of_identity["interim"]
        if self.engine == "transformers":
            del keys_of_identity["engine"]
        for condition in keys_of_identity["conditions"].values():
            condition["image"] = _name_in_run(condition["image"])
        prompts = keys_of_identity["prompts"]
        if "records" in prompts and prompts["image"] is not None:
            field = prompts["image"]
            prompts["records"] = [
                one | {field: _name_in_run(one[field])}
                if isinstance(one, dict) and field in one
                else one
                for one in prompts["records"]
            ]
        return keys_of_identity

    def with_keys(self, **keys: Any) -> Experiment:
        """The same question but for these keys, checked again."""
        return make_experiment(**{**self.to_dict(), **current_keys(keys)})

    @property
    def digest(self) -> str:
        """A hash of what is measured."""
        text = json.dumps(self.identity(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)


def _name_in_run(source: Any) -> Any:
    """A picture of a run by its name there, wherever the run lies."""
    if isinstance(source, list | tuple):
        return [_name_in_run(one) for one in source]
    if isinstance(source, str) and (name := _OF_RUN.search(source[-100:])):
        return name[0]
    return source


def _part_of(what: str, of_profiles: AllOrSome, measured: AllOrSome) -> None:
    if of_profiles == "all" or measured == "all":
        return
    beyond = [n for n in of_profiles if n not in measured]
    if beyond:
        raise InputError(
            f"profiles.{what} names {beyond[0]}, which is not measured; {what} are "
            f"{', '.join(map(str, measured))}",
            code="not-measured",
            key=f"profiles.{what}",
            value=beyond[0],
            known=list(measured),
        )


def make_experiment(**keys: Any) -> Experiment:
    """An experiment from Python; what is wrong with it is an `InputError`."""
    return validate(Experiment, keys, "the experiment")
