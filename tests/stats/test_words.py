"""The word of every result follows from what is printed: its interval and its needed value."""

import math
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnscope.spec.claims import Line, make_claims, parse_line
from attnscope.stats.outcome import ALPHA, COUNTS, WORDS, Result, none_of, word_of
from attnscope.stats.sentences import cells_of
from attnscope.stats.verdicts import judge
from made_values import measured

LINES = (
    "first_token[model=b] >= 1.05 * first_token[model=a]",
    "first_token[model=b] <= 0.95 * first_token[model=a]",
    "first_token[model=b] > first_token[model=a]",
    "first_token[model=b] > first_token[model=a] + 0.01",
    "first_token[model=b] within 0.9 .. 1.1 * first_token[model=a]",
    "first_token[model=b] < 30 %",
    "first_token[model=b] > 0",
    "first_token[model=b] within 0.1 .. 0.3",
    "value_similarity[condition=base, model=b] within 0.9 .. 1.1 * "
    "value_similarity[condition=base, model=a]",
)
SCOPES = ("", " in layer 0", " in each layer", " in most heads", " in at least 2 heads")
SCOPES += (" in every layer", " in at least 1 layer")


def read(line: Line, result: Result) -> str:
    """The word that a reader derives from the printed cells alone."""
    cells = cells_of(line, result)
    if cells["interval"] == "–":
        return "cannot tell"
    low, high = (
        side if "limit" in part else float(part)
        for side, part in zip(
            (-math.inf, math.inf), cells["interval"].rstrip(" %").split(" … "), strict=True
        )
    )
    needed = [float(part) for part in cells["needed"].strip("≥≤ %").split(" to ")]
    if len(needed) == 2:
        inside = needed[0] <= low and high <= needed[1]
        outside = high < needed[0] or needed[1] < low
        return "holds" if inside else "opposite" if outside else "open"
    if cells["needed"].startswith("≤"):
        low, high, needed = -high, -low, [-needed[0]]
    if high < needed[0]:
        none = {"ratio": 0.0, "difference": 0.0 if line.factor == 1 else math.inf}
        other_side = high < none.get(result.kind, math.inf) and result.kind not in COUNTS
        return "opposite" if other_side else "smaller than claimed"
    return "holds" if low >= needed[0] else "open"


def values(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    made = {
        "normal": lambda: 0.3 + 0.05 * rng.normal(size=shape),
        "skewed": lambda: rng.beta(0.5, 5, size=shape),
        "constant": lambda: np.full(shape, 0.3),
        "tied": lambda: np.round(0.3 + 0.05 * rng.normal(size=shape), 1),
        "zeros": lambda: np.zeros(shape),
        "mostly zeros": lambda: rng.random(shape) * (rng.random(shape) < 0.3),
        "missing": lambda: np.where(rng.random(shape) < 0.1, np.nan, rng.random(shape)),
        "near 0": lambda: 1e-6 * rng.exponential(size=shape),
        "either sign": lambda: np.clip(0.3 * rng.normal(size=shape), -1, 1),
    }
    return made[kind]()


KINDS = ("normal", "skewed", "constant", "tied", "zeros", "mostly zeros", "missing", "near 0")


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(LINES),
    st.sampled_from(SCOPES),
    st.sampled_from((1, 5, 6, 7, 12, 30)),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.sampled_from((None, 0.95, 1.0, 1.05, 1.2)),
    st.sampled_from((None, 1, 3, 8)),
    st.integers(0, 10**6),
)
def test_every_word_follows_from_what_is_printed(
    text: str,
    scope: str,
    prompts: int,
    kind_a: str,
    kind_b: str,
    factor: float | None,
    clusters: int | None,
    seed: int,
) -> None:
    rng, shape = np.random.default_rng(seed), (prompts, 2, 2)
    signed = text.startswith("value")
    a, b = (values("either sign" if signed else kind, rng, shape) for kind in (kind_a, kind_b))
    if factor is not None:
        b = np.clip(factor * a * (1 + 0.01 * rng.normal(size=shape)), -1, 1)

    def value(model: str, prompt: int, condition: str, layer: int, head: int) -> float | None:
        x = float((a if model == "a" else b)[prompt, layer, head])
        return None if math.isnan(x) else min(max(x, -1.0 if signed else 0.0), 1.0)

    table = measured(
        text.split("[")[0],
        value,
        models=("a", "b"),
        conditions=("base",),
        prompts=range(prompts),
        layers=2,
    )
    units = {}
    if clusters is not None:
        column = [str(one) for one in rng.integers(0, clusters, prompts)]
        units = {
            "prompts": pl.DataFrame({"prompt": range(prompts), "text": column}),
            "cluster": "text",
        }
    for verdict in judge(make_claims({"claim": text + scope}, "test"), table, **units):
        for line, result in zip(verdict.lines, verdict.results, strict=True):
            _check(line, result)


def _check(line: Line, result: Result) -> None:
    assert result.word in WORDS
    if result.kind in COUNTS:
        if result.word == "cannot tell":
            assert result.note
        else:
            assert read(line, result) == result.word
        return
    assert read(line, result) == result.word, (line.text, result)
    assert (result.p is None) == (result.low is None) == (result.word == "cannot tell")
    if result.p is not None:
        decided = result.word in ("holds", "opposite") or len(result.needed) == 1
        assert result.p <= ALPHA + 1e-9 or result.word == "open"
        assert not (decided and result.word == "open" and result.p < ALPHA - 1e-9)
        assert result.low <= result.estimate <= result.high


@given(
    st.sampled_from(LINES[:8]),
    st.floats(-2, 2),
    st.floats(0, 1),
    st.floats(1e-9, 1e-3),
    st.booleans(),
)
@example(LINES[5], 0.2999999, 0.0, 1e-7, True)
@example(LINES[5], 0.3, 0.0, 1e-9, True)
def test_rounding_never_changes_the_word(
    text: str, low: float, width: float, gap: float, close: bool
) -> None:
    line = parse_line(text)
    kind = "value" if line.right is None else "difference" if line.offset else "ratio"
    needed = line.bounds or (line.factor if kind == "ratio" else line.offset,)
    if close:  # an end that rounds to the needed value
        low = needed[0] + gap
    high = low + width + 1e-6
    word = word_of(line, low, high, needed, none_of(line, kind))
    result = Result(
        kind=kind, word=word, estimate=(low + high) / 2, low=low, high=high, needed=needed
    )
    assert read(line, result) == word


@pytest.mark.parametrize(("low", "high"), [(0.1284, 0.5617), (-0.00048, 0.00048), (2 / 3, 1e6)])
def test_printed_ends_contain_the_interval(low: float, high: float) -> None:
    result = Result(kind="value", word="open", estimate=low, low=low, high=high, needed=(0.2,))
    cells = cells_of(parse_line("entropy > 0.2"), result)
    ends = [float(end) for end in cells["interval"].split(" … ")]
    assert ends[0] <= low
    assert ends[1] >= high
