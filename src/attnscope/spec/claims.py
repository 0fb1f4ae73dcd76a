"""Claims: named statements about a run, one line for each part.

    first_token > 0.3 in most heads
    mass[keys=maps, model=b] >= 1.05 * mass[keys=maps, model=a] in each layer

Every line is one contrast per prompt, `b - c * a - d`, tested against 0 (`stats/verdicts.py`). A
claim with several lines holds if all of them hold. The text of the claims is written into a run
before anything is measured, so that a verdict can state whether the claim came first.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from attnscope.errors import InputError
from attnscope.measures.registry import COLUMNS, range_of
from attnscope.paths import to_path
from attnscope.yaml_file import read_yaml

NORMALISE = ("mass", "per-token", "share", "lift")
RELATIONS = {">": "more", ">=": "more", "<": "less", "<=": "less"}
MOST_LAYERS = 10_000


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


OPTIONS = {"cls": "class", "scale": "as"}
OPTIONS = {OPTIONS.get(f.name, f.name): f.name for f in fields(Quantity) if f.name != "measure"}
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
    def quantities(self) -> tuple[Quantity, ...]:
        """Those of all lines."""
        return tuple(quantity for line in self.lines for quantity in line.quantities)

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures that it needs."""
        return tuple(dict.fromkeys(quantity.measure for quantity in self.quantities))

    def with_quantities(self, change: Callable[[Quantity], Quantity]) -> "Claim":
        """The claim with every quantity changed."""
        lines = [
            replace(line, left=change(line.left), right=line.right and change(line.right))
            for line in self.lines
        ]
        return replace(self, lines=tuple(lines))


class _Reader:
    """Reads a line from left to right; an error names the column."""

    def __init__(self, text: str, source: str):
        self.text, self.source, self.at = " ".join(str(text).split()), source, 0

    def take(self, pattern: str) -> re.Match[str] | None:
        """The next words if they match; they are then read."""
        if match := re.compile(rf"\s*{pattern}").match(self.text, self.at):
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
        start, match = self.at, self.take(r"(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)(\s?%)?(?!\w)")
        if match is None:
            return None
        value = float(match[1]) / (100 if match[2] else 1)
        return value if math.isfinite(value) else self.fail("a finite number", start)

    def quantity(self) -> Quantity:
        start, match = self.at, self.take(r"([a-zA-Z_]\w*)")
        if match is None:
            self.fail("a measure, or FACTOR * MEASURE on the right side")
        if match[1] not in COLUMNS:
            ends = [name for name in COLUMNS if name.endswith(f"_{match[1]}")]
            near = ends or difflib.get_close_matches(match[1], COLUMNS)
            names = " or ".join(near or ("mass", "first_token", "entropy"))
            self.fail(f"a measure of docs/measures.md, such as {names}", start, "unknown-measure")
        options: dict[str, Any] = {}
        if self.take(r"\["):
            while not self.take(r"\]"):
                self._option(options)
                if not self.take(",") and not self.take(r"(?=\])"):
                    self.fail("',' or ']'")
        quantity = Quantity(match[1], **options)
        if wrong := _misfit(quantity):
            self.fail(wrong, start)
        return quantity

    def _option(self, options: dict[str, Any]) -> None:
        start, match = self.at, self.take(r"(\w+)\s*=\s*([^,\]]+)")
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
        if self.take(r"in layers? (?=\d)"):
            return Scope("mean", self._layers())
        if self.take("in each layer"):
            return Scope("each")
        if self.take("in each of layers"):
            return Scope("each", self._layers())
        start = self.at
        match = self.take(r"in (most|every|all|at least (\d+)) (head|layer)s?\b")
        if match is None:
            return Scope()
        least: Any = int(match[2]) if match[2] else match[1].replace("all", "every")
        if least == 0:
            self.fail("at least 1", start)
        layers = self._layers() if self.take("of layers?") else None
        return Scope("heads" if match[3] == "head" else "layers", layers, least)

    def _layers(self) -> tuple[int, ...]:
        layers: list[int] = []
        while True:
            start, match = self.at, self.take(r"(\d+)(?:\s*[-–]\s*(\d+))?")
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not first <= last < MOST_LAYERS:
                self.fail("layer numbers from 0, such as 0 or 0-3", start)
            layers += range(first, last + 1)
            if not self.take(","):
                return tuple(dict.fromkeys(layers))


def _misfit(quantity: Quantity) -> str:
    """What a quantity lacks or has too much of; empty if nothing."""
    name, declared = quantity.measure, COLUMNS[quantity.measure]
    classes = bool(declared.items) or not declared.per.isdisjoint(("classes", "class pairs"))
    adds = "classes" in declared.per and declared.level == "head"
    optional = adds or (declared.default is not None and not quantity.cls)
    to = {"class pairs": "the class of the keys", "steps": "the step"}
    target = next((what for per, what in to.items() if per in declared.per), "")
    if declared.level in ("token", "query"):
        return f"a measure of heads or layers ({name} has a number for each {declared.level})"
    if quantity.cls and not classes:
        return f"no class= ({name} has none)"
    if classes and not optional and len(quantity.cls) != 1:
        return f"one class= of {name}"
    if bool(quantity.to) != bool(target):
        return f"to= ({target})" if target else f"no to= ({name} has none)"
    return "as= of mass only" if quantity.scale != "mass" and name != "mass" else ""


def parse_line(text: str, source: str = "claim") -> Line:
    """One line of a claim; docs/claims.md has the grammar."""
    reader = _Reader(text, source)
    left = reader.quantity()
    if reader.take("within"):
        parts = _within(reader)
    elif sign := reader.take("(>=|<=|>|<)"):
        right = _right(reader, left)
        parts = {"relation": RELATIONS[sign[1]], "strict": "=" not in sign[1], **right}
    else:
        reader.fail(">, >=, <, <= or within")
    start, scope = reader.at, reader.scope()
    units = reader.take(r"clustered by ([^\s,]+)")
    if reader.take(r"(?=[*/+-])"):
        reader.fail("FACTOR * QUANTITY + NUMBER, in this order")
    if not reader.take("$"):
        reader.fail(
            "the end, 'clustered by COLUMN', or one of 'in layer N', 'in each layer', 'in most "
            "heads', 'in every head', 'in at least N heads of layers N-N' (or layers)"
        )
    line = Line(reader.text, left, scope=scope, cluster=units[1] if units else None, **parts)
    scoped, levels = scope != Scope(), {COLUMNS[q.measure].level for q in line.quantities}
    layer = any(q.layer is not None for q in line.quantities)
    if scoped and layer:
        reader.fail("no 'in …' after layer=", start)
    if (scoped or layer) and "text" in levels:
        reader.fail("no layer and no 'in …' (the measure has one value per text)", start)
    if scope.kind == "heads" and "layer" in levels:
        reader.fail("layers (the measure has one value per layer, not per head)", start)
    return line


def _within(reader: _Reader) -> dict[str, Any]:
    """LOW .. HIGH, or LOW .. HIGH * QUANTITY."""
    low = reader.number()
    if low is None or not reader.take(r"\.\."):
        reader.fail("LOW .. HIGH")
    high = reader.number()
    if high is None or high <= low:
        reader.fail("a number above LOW")
    right = reader.quantity() if reader.take(r"\*") else None
    return {"relation": "within", "right": right, "bounds": (low, high)}


def _right(reader: _Reader, left: Quantity) -> dict[str, Any]:
    """A number, or FACTOR * QUANTITY + NUMBER."""
    start, number = reader.at, reader.number()
    if number is not None and not reader.take(r"\*"):
        low, high = range_of(left.measure)
        high = math.inf if left.scale in ("lift", "per-token") else high
        if not low <= number <= high:  # the claim would be decided already
            reader.fail(f"a number from {low:g} to {high:g}, the range of {left.measure}", start)
        return {"right": None, "offset": number}
    factor, offset, right = 1.0 if number is None else number, 0.0, reader.quantity()
    if sign := reader.take(r"([-+])(?=\s*\.?\d)"):
        offset = (reader.number() or 0.0) * (-1 if sign[1] == "-" else 1)
    if factor <= 0:
        reader.fail("a factor above 0", start)
    return {"right": right, "factor": factor, "offset": offset}


def make_claims(data: Any, source: str) -> tuple[Claim, ...]:
    """Claims from a mapping of names to a line or a list of lines."""
    if not isinstance(data, Mapping) or not data:
        raise InputError(
            f"{source} must map names to lines, such as 'sinks: first_token > 0.3 in most heads'",
            code="bad-claims-file",
            path=source,
        )
    return tuple(_claim(name, lines, f"{source}: claim {name!r}") for name, lines in data.items())


def _claim(name: Any, lines: Any, where: str) -> Claim:
    lines = [lines] if isinstance(lines, str) else lines
    if not isinstance(lines, list | tuple) or not lines or not isinstance(name, str):
        wrong, code = "needs a line, or a list of lines", "bad-claims-file"
        raise InputError(f"{where} {wrong}", code=code, claim=name)
    parsed = tuple(parse_line(line, where) for line in lines)
    if len({line.scope.kind == "each" for line in parsed}) > 1:
        wrong = "either all lines are 'in each layer' or none"
        raise InputError(f"{where}: {wrong}", code="bad-claim", claim=name)
    return Claim(name, parsed)


def frozen(claims: Iterable[Claim]) -> dict[str, str]:
    """Text by name; of two claims with one name, that of the second."""
    return {claim.name: claim.text for claim in claims}


def to_yaml(claims: Iterable[Claim]) -> str:
    """Claims as a file that `load_claims` reads back."""
    data = {"claims": {claim.name: [line.text for line in claim.lines] for claim in claims}}
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000)


def load_claims(path: str | Path) -> tuple[Claim, ...]:
    """Claims of a YAML file: a mapping under the key `claims`."""
    path = to_path(path)
    if not path.is_file():
        wrong = f"there is no file {path}; give a YAML file with a key 'claims'"
        raise InputError(wrong, code="file-missing", path=str(path))
    data = read_yaml(path)[0]
    if not isinstance(data, dict) or set(data) != {"claims"}:
        wrong = f"{path} must have one key, 'claims', that maps names to lines"
        raise InputError(wrong, code="bad-claims-file", path=str(path))
    return make_claims(data["claims"], str(path))
