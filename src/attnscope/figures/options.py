"""Options of figures: their values, their defaults, and those that several figures have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from attnscope.errors import InputError, unknown
from attnscope.figures.select import Choice
from attnscope.spec.claims import NORMALISE as NORMALISATIONS

LAYOUT = ("title", "width", "height")
UNITS = ("cluster", "strata")


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of one figure. Its default is `default`, or the first of `known`."""

    help: str
    """Its values, for the list of options in the docs."""
    known: tuple[Any, ...] | None = None
    """Allowed values; None: the figure checks the value."""
    default: Any = None

    def read(self, name: str, keywords: Mapping[str, Any]) -> Any:
        """The value among the keywords, checked, or the default."""
        if name not in keywords:
            return self.known[0] if self.known and self.default is None else self.default
        value = keywords[name]
        # By type too: to Python, True is 1.
        same = [k for k in self.known or () if type(k) is type(value) and k == value]
        if self.known is not None and not same:
            raise unknown(name, value, [k for k in self.known if k is not None])
        return value


COMBINE = {
    "combine": Option(
        help="mean, sum or max over heads; default: as in the experiment",
        known=(None, "mean", "sum", "max"),
    )
}
MEASURE = {"measure": Option(help="name of a measure; default: mass, else entropy, else the first")}
NORMALISE = {
    "normalise": Option(
        help="mass, share, per-token or lift; default: as in the experiment",
        known=(None, *NORMALISATIONS),
    )
}
SCALE = {
    "scale": Option(
        help="a colour scale per panel (default), or shared by all panels",
        known=("panel", "shared"),
    )
}
LEAVE_OUT_FIRST = {"leave_out_first": Option(help="hide the first token", known=(False, True))}


def parse(
    figure: str, options: Mapping[str, Option], keywords: Mapping[str, Any]
) -> tuple[Choice, dict[str, Any]]:
    """The choice of data and the options of a figure; an unknown option is an error."""
    chosen = [f.name for f in fields(Choice)]
    for name in keywords:
        if name not in (*options, *chosen, *LAYOUT, *UNITS):
            known = [*options, *sorted(chosen), *sorted(LAYOUT), *UNITS, "theme", "dark"]
            raise InputError(
                f"unknown option {name!r} of {figure}; known: {', '.join(known)}",
                code="unknown-option",
                value=name,
                known=known,
            )
    for name in ("width", "height"):
        size = keywords.get(name)
        if size is not None and not (isinstance(size, int | float) and 20 <= size <= 20_000):
            raise InputError(
                f"{name} must be between 20 and 20,000 pixels, not {size!r}",
                code="bad-size",
                option=name,
                value=size,
            )
    choice = Choice(**{name: value for name, value in keywords.items() if name in chosen})
    return choice, {name: option.read(name, keywords) for name, option in options.items()}
