"""The grammar of `queries`: which rows of the attention count, as a word.

"all" · "last" · "generated" · "predicts" · "sample:K" · "after:REGION" · "region:REGION" ·
"predicts:REGION"

Parsed here and nowhere else. Which of them make sense is for the user of a word to say: `watch`
knows no regions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from attnscope.errors import InputError

IN_A_WATCH = ("all", "last", "generated", "predicts", "sample:K")
IN_A_RUN = (
    "all",
    "last",
    "sample:K",
    "after:REGION",
    "region:REGION",
    "predicts:REGION",
    "generated",
)
SMALLEST_SAMPLE = 4


@dataclass(frozen=True)
class QueryChoice:
    """A choice of queries."""

    kind: str
    """`all`, `last`, `generated`, `predicts`, `sample`, `after` or `region`."""
    region: str | None = None
    """Of `after`, `region` and `predicts`."""
    sample: int = 0
    """K of `sample:K`."""


def parse_queries(text: object, known: Sequence[str] = IN_A_RUN) -> QueryChoice:
    """What a word means; refuses one that is not of the forms `known`."""
    kind, colon, what = text.partition(":") if isinstance(text, str) else ("", "", "")
    forms = {form.partition(":")[0]: form for form in known}
    form = forms.get(kind, "")
    if form == "sample:K" and colon:
        # A number longer than any text would only cost time to read.
        good = what.isascii() and what.isdecimal() and len(what) < 10
        if not good or int(what) < SMALLEST_SAMPLE:
            raise InputError(
                f"queries {text!r}: K of sample:K is a whole number of at least {SMALLEST_SAMPLE}",
                code="bad-sample-size",
                value=text,
                smallest=SMALLEST_SAMPLE,
            )
        return QueryChoice("sample", sample=int(what))
    if form.endswith(":REGION") and what:
        return QueryChoice(kind, region=what)
    if form and form == text:
        return QueryChoice(kind)
    raise InputError(
        f"unknown queries {text!r}; known: {', '.join(known)}",
        code="unknown-queries",
        value=text,
        known=list(known),
    )
