"""Claims: named statements about a run, one line for each part.

    first_token > 0.3 in most heads
    mass[keys=maps, model=b] >= 1.05 * mass[keys=maps, model=a] in each layer

Every line is one contrast per prompt, `b - c * a - d`, tested against 0 (`stats/verdicts.py`). A
claim with several lines holds if all of them hold. The text of the claims is written into a run
before anything is measured, so that a verdict can state whether the claim came first.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from attnscope.errors import InputError
from attnscope.measures.registry import COLUMNS
from attnscope.paths import to_path
from attnscope.yaml_file import parse_yaml, read_yaml

NORMALISE = ("mass", "per-token", "share", "lift")
RELATIONS = {">": "more", ">=": "more", "<": "less", "<=": "less"}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A measured quantity: the options in brackets after a measure."""

    measure: str
    keys: str = "all"
    queries: str = "all"
    cls: tuple[str, ...] = ()
    """`class=`: token classes, added up; of spikes, the share of tokens."""
    to: str | None = None
    """Of `flow`: to which class."""
    classes: str | None = None
    """The class set; needed if several sets of the run have these classes."""
    model: str | None = None
    """A label, or `a` and `b` for the first and second model; default: a verdict per model."""
    condition: str | None = None
    """A name, `base`, `variant` (any with an insertion), or `kind:KIND`; a verdict for each.
    Default: `variant` for measures that compare with the base, else `base`."""
    layer: int | None = None
    scale: str = "mass"
    """`as=`: mass, per-token, share or lift."""

    @property
    def selector(self) -> str:
        """The condition, or its default."""
        return self.condition or ("variant" if COLUMNS[self.measure].compares_to_base else "base")


OPTIONS = {"class": "cls", "as": "scale"} | {
    field.name: field.name
    for field in fields(Quantity)
    if field.name not in ("measure", "cls", "scale")
}
"""Option in brackets → field."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a line has to hold. Without layers: all that were measured."""

    kind: Literal["mean", "each", "heads", "layers"] = "mean"
    """`mean`: the mean over layers and heads. `each`: a verdict for each layer. `heads`, `layers`:
    in at least so many of them."""
    layers: tuple[int, ...] | None = None
    least: int | Literal["most", "every"] = "every"
    share: float = 0.5
    """Of `most`: more than this share."""

    def needed(self, rows: int) -> int:
        """How many of so many heads or layers."""
        if isinstance(self.least, int):
            return self.least
        return rows if self.least == "every" else int(rows * self.share) + 1


@dataclass(frozen=True, slots=True)
class Line:
    """One part of a claim: `left` against `factor * right + offset`, or within bounds."""

    text: str
    left: Quantity
    relation: Literal["more", "less", "within"]
    right: Quantity | None = None
    factor: float = 1.0
    offset: float = 0.0
    bounds: tuple[float, float] | None = None
    """Of `within`: factors of the right side, or values."""
    scope: Scope = Scope()
    strict: bool = False
    """Written with > or <; the test is the same."""
    cluster: str | None = None
    """Metadata column: prompts with the same value are one unit. Default: every prompt is one."""

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The left side, and the right one if it is a quantity."""
        return (self.left,) if self.right is None else (self.left, self.right)


@dataclass(frozen=True, slots=True)
class Claim:
    """A named claim; all of its lines have to hold."""

    name: str
    lines: tuple[Line, ...]

    @property
    def text(self) -> str:
        """The lines as written, for comparison with those of a run."""
        return "; ".join(line.text for line in self.lines)

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures that it needs."""
        return tuple(dict.fromkeys(q.measure for line in self.lines for q in line.quantities))


class _Reader:
    """Reads a line from left to right; an error names the column."""

    def __init__(self, text: str, source: str):
        self.text, self.source, self.at = " ".join(str(text).split()), source, 0

    def take(self, pattern: str) -> re.Match[str] | None:
        """The next words if they match; they are then read."""
        match = re.compile(rf"\s*{pattern}").match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def fail(self, expected: str, at: int | None = None, code: str = "bad-claim") -> NoReturn:
        column = self.at if at is None else at
        column += len(self.text[column:]) - len(self.text[column:].lstrip())
        rest = self.text[column : column + 20] or "the end"
        raise InputError(
            f"{self.source}: column {column + 1} of {self.text!r}: expected {expected}, got "
            f"{rest!r}; docs/claims.md has the grammar",
            code=code,
            column=column + 1,
            text=self.text,
        )

    def number(self) -> float | None:
        match = self.take(r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)(\s?%)?(?![\w])")
        return None if match is None else float(match[1]) / (100 if match[2] else 1)

    def quantity(self) -> Quantity:
        start = self.at
        match = self.take(r"([a-zA-Z_]\w*)")
        if match is None:
            self.fail("a measure or a number")
        if match[1] not in COLUMNS:
            self.fail(f"a measure ({', '.join(COLUMNS)})", start, "unknown-measure")
        options: dict[str, Any] = {}
        if self.take(r"\["):
            while not self.take(r"\]"):
                self._option(options)
                if not self.take(",") and not self.take(r"(?=\])"):
                    self.fail("',' or ']'")
        return Quantity(match[1], **options)

    def _option(self, options: dict[str, Any]) -> None:
        start = self.at
        match = self.take(r"(\w+)\s*=\s*([^,\]]+)")
        name = OPTIONS.get(match[1]) if match else None
        if match is None or name is None or name in options:
            self.fail(f"an option ({', '.join(sorted(OPTIONS))}) as name=value, each once", start)
        value: Any = match[2].strip()
        if name == "cls":
            value = tuple(part.strip() for part in value.split("+"))
        if name == "layer":
            value = int(value) if value.isdecimal() else self.fail("a layer number from 0", start)
        if name == "scale" and value not in NORMALISE:
            self.fail(f"as= {', '.join(NORMALISE)}", start)
        options[name] = value

    def scope(self) -> Scope:
        if self.take("in layer (?=\\d)"):
            return Scope("mean", self._layers())
        if self.take("in each layer"):
            return Scope("each")
        if self.take("in each of layers"):
            return Scope("each", self._layers())
        match = self.take(r"in (most|every|at least (\d+)) (head|layer)s?\b")
        if match is None:
            return Scope()
        kind: Any = f"{match[3]}s"
        least: Any = int(match[2]) if match[2] else match[1]
        if least == 0:
            self.fail("at least 1")
        layers = self._layers() if self.take("of layers?") else None
        return Scope(kind, layers, least)

    def _layers(self) -> tuple[int, ...]:
        layers: list[int] = []
        while True:
            match = self.take(r"(\d+)(?:\s*[-–]\s*(\d+))?")
            if match is None:
                self.fail("layer numbers from 0, such as 0 or 0-3")
            layers += range(int(match[1]), int(match[2] or match[1]) + 1)
            if not self.take(","):
                return tuple(dict.fromkeys(layers))


def parse_line(text: str, source: str = "claim") -> Line:
    """One line of a claim; docs/claims.md has the grammar."""
    reader = _Reader(text, source)
    left = reader.quantity()
    if reader.take("within"):
        low = reader.number()
        if low is None or not reader.take(r"\.\."):
            reader.fail("LOW .. HIGH")
        high = reader.number()
        if high is None or high <= low:
            reader.fail("a number above LOW")
        right = reader.quantity() if reader.take(r"\*") else None
        parts: dict[str, Any] = {"relation": "within", "right": right, "bounds": (low, high)}
    else:
        sign = reader.take("(>=|<=|>|<)")
        if sign is None:
            reader.fail(">, >=, <, <= or within")
        parts = {"relation": RELATIONS[sign[1]], "strict": "=" not in sign[1], **_right(reader)}
    scope = reader.scope()
    units = reader.take(r"clustered by ([^\s,]+)")
    parts["cluster"] = units[1] if units else None
    if not reader.take("$"):
        reader.fail(
            "'in layer N', 'in each layer', 'in most heads', 'in at least N heads', "
            "'clustered by COLUMN', or the end"
        )
    one_layer = any(q.layer is not None for q in (left, parts["right"]) if q is not None)
    if one_layer and scope != Scope():
        reader.fail("no 'in …' after layer=", reader.text.rfind(" in "))
    return Line(reader.text, left, scope=scope, **parts)


def _right(reader: _Reader) -> dict[str, Any]:
    """The right side: a number, or FACTOR * QUANTITY + NUMBER."""
    number = reader.number()
    if number is not None and not reader.take(r"\*"):
        return {"right": None, "offset": number}
    factor = 1.0 if number is None else number
    right = reader.quantity()
    offset = 0.0
    if sign := reader.take(r"([-+])(?=\s*\d)"):
        offset = (reader.number() or 0.0) * (-1 if sign[1] == "-" else 1)
    if factor <= 0:
        reader.fail("a factor above 0")
    return {"right": right, "factor": factor, "offset": offset}


def make_claims(data: Any, source: str) -> tuple[Claim, ...]:
    """Claims from a mapping of names to a line or a list of lines."""
    if not isinstance(data, Mapping) or not data:
        raise InputError(
            f"{source} must map names to lines, such as 'sinks: first_token > 0.3 in most heads'",
            code="bad-claims-file",
            path=source,
        )
    claims = []
    for name, lines in data.items():
        listed = [lines] if isinstance(lines, str) else lines
        if not isinstance(listed, list | tuple) or not listed or not isinstance(name, str):
            raise InputError(
                f"{source}: claim {name!r} needs a line, or a list of lines",
                code="bad-claims-file",
                claim=name,
            )
        where = f"{source}: claim {name!r}"
        parsed = tuple(parse_line(line, where) for line in listed)
        if len({line.scope.kind == "each" for line in parsed}) > 1:
            raise InputError(
                f"{where}: either all lines are 'in each layer' or none",
                code="bad-claim",
                claim=name,
            )
        claims.append(Claim(name, parsed))
    return tuple(claims)


def frozen(claims: Iterable[Claim]) -> dict[str, str]:
    """Text by name; of two claims with one name, that of the second."""
    return {claim.name: claim.text for claim in claims}


def to_yaml(claims: Iterable[Claim]) -> str:
    """Claims as a file that `load_claims` reads back."""
    data = {"claims": {claim.name: [line.text for line in claim.lines] for claim in claims}}
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000)


def parse_claims(text: str, source: str) -> tuple[Claim, ...]:
    """Claims from YAML text: a mapping under the key `claims`."""
    return _claims(parse_yaml(text, source)[0], source)


def load_claims(path: str | Path) -> tuple[Claim, ...]:
    """Claims of a YAML file: a mapping under the key `claims`."""
    path = to_path(path)
    if not path.is_file():
        raise InputError(
            f"there is no file {path}; give a YAML file with a key 'claims'",
            code="file-missing",
            path=str(path),
        )
    return _claims(read_yaml(path)[0], str(path))


def _claims(data: Any, source: str) -> tuple[Claim, ...]:
    if not isinstance(data, dict) or set(data) != {"claims"}:
        raise InputError(
            f"{source} must have one key, 'claims', that maps names to lines",
            code="bad-claims-file",
            path=source,
        )
    return make_claims(data["claims"], source)
