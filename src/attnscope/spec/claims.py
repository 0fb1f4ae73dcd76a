"""Defines claims: named statements about a run that its tables can decide, read from YAML.

A claim has a quantity, a comparison, a direction, a scope and a rule. `stats/verdicts.py` judges
claims; `claims.yaml` has the built-in ones. The digest of a claim is written into a run before
anything is measured, so that a verdict can state whether the claim was fixed first.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from attnscope.errors import InputError, unknown
from attnscope.measures.registry import COLUMNS
from attnscope.paths import to_path
from attnscope.spec.base import StrictModel, validate
from attnscope.yaml_file import parse_yaml, read_yaml

PLACEHOLDERS = ("a", "b", "condition", "model", "layer")
"""Names that a statement may have in braces: the first and the second of the comparison, and the
condition, model and layer of the verdict."""
IN_BRACES = re.compile(r"\{([^{}]*)\}")


def _listed(value: Any) -> Any:
    """A single value may be written without a list."""
    return [value] if isinstance(value, str | int) else value


def _layers(value: Any) -> Any:
    if value in ("all", "each"):
        return value
    layers = _listed(value)
    good = isinstance(layers, list | tuple) and len(layers) > 0
    if not good or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in layers):
        raise InputError(
            f"layers {value!r} are not valid; give 'all', 'each' or layer numbers from 0",
            code="bad-layers",
            value=value,
        )
    return layers


class Quantity(StrictModel):
    """The measured quantity, by the columns of the table of values."""

    measure: StrictStr
    item: Annotated[tuple[StrictStr, ...], BeforeValidator(_listed)] | None = None
    """Classes, added up. None: all classes of the set, or a measure without classes. Of a measure
    that comes once for each of several items (spikes, for each share of tokens), one of them."""
    target: StrictStr | None = None
    """Of `flow`: to which class."""
    queries: StrictStr | None = None
    """None: the first that the run has; so for keys and classes."""
    keys: StrictStr | None = None
    classes: StrictStr | None = None
    normalise: Literal["mass", "per-token", "share", "lift"] = "mass"

    @model_validator(mode="after")
    def _declared(self) -> "Quantity":
        _known(self.measure)
        return self


class Comparison(StrictModel):
    """Compares the second of a pair with the first, or the value with a threshold."""

    over: Literal["model", "condition", "measure", "layer", "item", "queries", "keys"] | None = None
    pair: tuple[StrictStr | StrictInt, StrictStr | StrictInt] | None = None
    """Needed but over models, where it is the run's two models if it is left out. Conditions go
    by name, as `base`, or as `kind:KIND` of what they insert; items are classes."""
    threshold: float | None = None
    scale: Literal["difference", "ratio"] = "difference"
    """`ratio` takes the mean of logarithms: second over first, prompt by prompt. It needs values
    above 0."""
    by: Annotated[float, Field(ge=0)] = 0.0
    """At least by so much in the claimed direction; of a ratio 0.05 is a factor of 1.05."""

    @model_validator(mode="after")
    def _one_way(self) -> "Comparison":
        if (self.over is None) == (self.threshold is None):
            raise InputError(
                "a comparison needs either 'over' or 'threshold', and not both",
                code="bad-comparison",
            )
        if self.over is None and self.pair is not None:
            raise InputError(
                "a pair needs 'over': model, condition, measure, layer, item, queries or keys",
                code="bad-comparison",
            )
        if self.over not in (None, "model") and self.pair is None:
            raise InputError(
                f"over {self.over} needs a pair: [first, second]",
                code="pair-missing",
                over=self.over,
            )
        if self.over == "layer" and not all(isinstance(side, int) for side in self.pair or ()):
            raise InputError(
                "over layer needs a pair of layer numbers, counted from 0",
                code="bad-pair",
                value=self.pair,
            )
        if self.scale == "ratio" and self.threshold is not None and self.threshold <= 0:
            raise InputError(
                "a ratio needs a threshold above 0", code="bad-comparison", threshold=self.threshold
            )
        if self.over == "measure":
            for side in self.pair or ():
                _known(str(side))
        return self


class ClaimScope(StrictModel):
    """The layers of a claim, and how heads are combined."""

    layers: Annotated[Literal["all", "each"] | tuple[StrictInt, ...], BeforeValidator(_layers)] = (
        "all"
    )
    """`all`: every measured layer together. `each`: a verdict for every measured layer."""
    heads: Literal["mean", "sum", "max", "each"] = "mean"


class Rule(StrictModel):
    """How each row (a layer, or a layer and head) is decided, and how many rows must support.

    `interval`: the interval of the comparison excludes equality, and q < level.
    `significant`: q < level, in the claimed direction.
    `within`: the interval lies within the bounds.
    """

    kind: Literal["interval", "significant", "within"] = "interval"
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the rows that must support the claim. If more than 1 - share of them oppose it, the
    claim is contradicted."""
    share_of: Literal["measured", "population"] = "measured"
    """`measured`: count the measured rows. `population`: treat them as a sample; the lower 95 %
    Clopper-Pearson bound of the share must exceed `share`."""
    level: Annotated[float, Field(gt=0, lt=1)] = 0.05
    bounds: tuple[float, float] | None = None

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, data: Any) -> Any:
        if isinstance(data, dict) and "vote" in data:
            raise InputError(
                "the key 'vote' is now 'share_of': write 'share_of: measured' in place of "
                "'vote: these', and 'share_of: population' in place of 'vote: such'",
                code="renamed-key",
                old="vote",
                new="share_of",
            )
        return data

    @model_validator(mode="after")
    def _bounded(self) -> "Rule":
        if (self.kind == "within") != (self.bounds is not None):
            raise InputError(
                "bounds: [low, high] are needed by the rule 'within', and only by it",
                code="bad-rule",
                kind=self.kind,
            )
        if self.bounds is not None and self.bounds[0] >= self.bounds[1]:
            raise InputError(
                f"bounds {list(self.bounds)} are not in order; give [low, high]",
                code="bad-rule",
                bounds=self.bounds,
            )
        return self


class ClaimPart(StrictModel):
    """One condition of a claim."""

    quantity: Quantity
    comparison: Comparison
    direction: Literal["more", "less"] | None = None
    """Of the value against the threshold, or of the second of the pair against the first."""
    scope: ClaimScope = ClaimScope()
    rule: Rule = Rule()

    @model_validator(mode="after")
    def _directed(self) -> "ClaimPart":
        if (self.rule.kind == "within") != (self.direction is None):
            raise InputError(
                "a direction is needed (more or less), except with the rule 'within'",
                code="bad-direction",
                value=self.direction,
            )
        if self.rule.kind == "within" and self.comparison.by:
            raise InputError(
                "the rule 'within' has bounds, so 'by' is not possible",
                code="bad-rule",
                kind=self.rule.kind,
            )
        return self


class Claim(StrictModel):
    """A named statement with its parts; all of them have to hold."""

    name: StrictStr
    statement: StrictStr
    """May contain the placeholders of `PLACEHOLDERS` in braces, and no other braces."""
    condition: StrictStr | None = None
    """A name, `base`, `variant` (any with an insertion), or `kind:KIND`; a verdict for each."""
    excludes: Annotated[tuple[StrictStr, ...], BeforeValidator(_listed)] = ()
    """Claims that cannot hold where this one does."""
    parts: Annotated[tuple[ClaimPart, ...], Field(min_length=1)]

    @field_validator("statement")
    @classmethod
    def _placeholders(cls, statement: str) -> str:
        if wrong := [c for c in statement if ord(c) < 32 and c not in "\t\n"]:
            raise InputError(f"{wrong[0]!r} is a control character", code="control-character")
        for name in IN_BRACES.findall(statement):
            if name not in PLACEHOLDERS:
                raise unknown("placeholder", name, PLACEHOLDERS)
        return statement

    @model_validator(mode="before")
    @classmethod
    def _single(cls, data: Any) -> Any:
        """A claim of one part may be written without the list."""
        if isinstance(data, dict) and "parts" not in data:
            named = {name: data[name] for name in cls.model_fields if name in data}
            return {**named, "parts": [{k: v for k, v in data.items() if k not in named}]}
        return data


def _known(measure: str) -> None:
    if measure not in COLUMNS:
        raise unknown("measure", measure, COLUMNS)


def digest(claim: Claim) -> str:
    """The digest of a claim, without its name."""
    content = claim.model_dump(mode="json", exclude={"name"})
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def frozen(claims: Iterable[Claim] | None = None) -> dict[str, str]:
    """Digests by name: of the built-in claims, and of those given, which come first."""
    digests = {claim.name: digest(claim) for claim in built_in()}
    return digests | {claim.name: digest(claim) for claim in claims or ()}


def to_yaml(claims: Iterable[Claim]) -> str:
    """Claims as a file that `load_claims` reads back, every default written out."""
    data = {"claims": [claim.model_dump(mode="json", exclude_none=True) for claim in claims]}
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


def built_in() -> tuple[Claim, ...]:
    """The claims that come with attnscope."""
    source = files("attnscope.spec").joinpath("claims.yaml")
    data, _ = parse_yaml(source.read_text(encoding="utf-8"), "claims.yaml")
    return _claims(data, "claims.yaml")


def load_claims(path: str | Path) -> tuple[Claim, ...]:
    """Claims of a YAML file: a list, under the key `claims`."""
    path = to_path(path)
    if not path.is_file():
        raise InputError(
            f"there is no file {path}; give a YAML file with a list 'claims'",
            code="file-missing",
            path=str(path),
        )
    data, _ = read_yaml(path)
    return _claims(data, str(path))


def _claims(data: Any, source: str) -> tuple[Claim, ...]:
    listed = data.get("claims") if isinstance(data, dict) and set(data) == {"claims"} else None
    if not isinstance(listed, list) or not listed:
        raise InputError(
            f"{source} must have one key, 'claims', with a list of claims",
            code="bad-claims-file",
            path=source,
        )
    claims = []
    for number, entry in enumerate(listed):
        name = entry.get("name", number) if isinstance(entry, dict) else number
        claims.append(validate(Claim, entry, f"{source}: claim {name!r}"))
    names = [claim.name for claim in claims]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(
            f"{source}: two claims have the same name: {', '.join(sorted(twice))}",
            code="duplicate-name",
            names=sorted(twice),
        )
    return tuple(claims)
