"""Judges claims from the table of values.

All intervals of a claim (its lines, in each layer) hold together at 95 %: each has the level
1 - 0.05 / (lines x layers). So "holds", and "does not hold" where one line fails, are both wrong in
at most 5 % of runs, as far as the assumption of the test holds (docs/statistics.md).
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import polars as pl

from attnscope.spec.claims import Claim, Line
from attnscope.spec.experiment import Experiment
from attnscope.stats.evidence import (
    Binding,
    NotMeasuredError,
    RunContents,
    UndecidableError,
    missing,
    sides,
)
from attnscope.stats.outcome import WORDS, Result, contrast_of, decide
from attnscope.stats.resampling import ResamplingUnits
from attnscope.stats.sentences import claim_sentence, result_sentence
from attnscope.stats.tables import Matrix, Values

VERDICTS = (*WORDS, "does not hold", "not measured")
"""`does not hold`: of several lines, some fail."""
WRITTEN = ("written before the run", "changed after the run", "added after the run")
ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of a run on a claim."""

    claim: str
    statement: str
    """The claim in words, generated from its lines."""
    verdict: str
    """One of `VERDICTS`."""
    reason: str
    """The deciding numbers, what was needed, and n. If not measured: what to measure."""
    model: str | None = None
    condition: str | None = None
    layer: int | None = None
    lines: tuple[Line, ...] = ()
    results: tuple[Result, ...] = ()
    """One for each line."""
    written: str | None = None
    """When the claim was written: a text that begins with one of `WRITTEN`; None if unknown."""
    notes: tuple[str, ...] = ()
    """What limits the verdict: similar prompts, an unfinished run."""

    @property
    def sentence(self) -> str:
        """The statement. If it does not name the model, the model's name comes first."""
        if self.model is None or self.model in self.statement:
            return self.statement
        return f"{self.model}: {self.statement}"

    def __str__(self) -> str:
        """Verdict, statement, numbers, notes."""
        notes = "".join(f" ! {note}." for note in self.notes)
        return f"{self.verdict}: {self.sentence} {self.reason}{notes}"


@dataclass(frozen=True, slots=True)
class _Judge:
    """What all claims of a run share."""

    contents: RunContents
    pair: tuple[str, str] | None
    alpha: float = ALPHA
    notes: tuple[str, ...] = field(default=())


def judge(
    claims: Iterable[Claim],
    values: Values,
    *,
    experiment: Experiment | None = None,
    pair: tuple[str, str] | None = None,
    written: Mapping[str, str] | None = None,
    earlier: Sequence[str] = (),
    unfinished: bool = False,
    prompts: pl.DataFrame | None = None,
    cluster: str | Sequence[str] | None = None,
    strata: str | None = None,
) -> list[Verdict]:
    """Verdicts on claims: one for each claim and each model, condition and layer it covers.

    experiment   the run's experiment (`Run.experiment`): gives the order of models, the base
                 condition, and what the other conditions insert
    pair         the models that `model=a` and `model=b` stand for; default: the run's first two
    written      the text of the claims that were written before the run
    earlier      runs that measured the same prompts before
    prompts      prompt metadata; `cluster` and `strata` as in `compare`
    """
    claims = list(claims)
    needed = {measure for claim in claims for measure in claim.measures}
    lazy = values.lazy()
    table = lazy.filter(pl.col("measure").is_in(sorted(needed))).collect()
    contents = RunContents(
        models=_ordered(lazy, "model", experiment.models if experiment else ()),
        conditions=_ordered(lazy, "condition", experiment.conditions if experiment else ()),
        insertions={
            name: condition.kind
            for name, condition in (experiment.conditions if experiment else {}).items()
        },
        tables={str(rows["measure"][0]): rows for rows in table.partition_by("measure")},
        sources=ResamplingUnits(prompts, cluster, strata),
    )
    notes = ("the run is unfinished",) if unfinished else ()
    judging = _Judge(contents, pair, notes=notes)
    return [
        replace(verdict, written=_written(claim, written, earlier, contents.sources))
        for claim in claims
        for verdict in _judged(claim, judging)
    ]


def _written(
    claim: Claim,
    written: Mapping[str, str] | None,
    earlier: Sequence[str],
    sources: ResamplingUnits,
) -> str | None:
    if written is None:
        return None
    if claim.name not in written:
        return WRITTEN[2]
    if written[claim.name] != claim.text:
        return WRITTEN[1]
    label = WRITTEN[0]
    if earlier:
        label += f"; prompts seen before ({', '.join(earlier)})"
    units = ", ".join(sources.chosen)
    return label + (f"; the units ({units}) were chosen afterwards" if units else "")


def verdict_table(verdicts: Sequence[Verdict]) -> pl.DataFrame:
    """Verdicts as a table, without their results."""
    names = ("claim", "model", "condition", "layer", "verdict", "written", "statement", "reason")
    schema = {name: pl.Int64() if name == "layer" else pl.String() for name in names}
    rows = [[getattr(verdict, name) for name in names] for verdict in verdicts]
    table = pl.DataFrame(rows, schema=schema, orient="row")
    notes = pl.Series("notes", ["; ".join(v.notes) or None for v in verdicts], dtype=pl.String())
    return table.with_columns(notes)


def verdict_dict(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain data, for JSON."""
    names = ("claim", "statement", "verdict", "reason", "model", "condition", "layer", "written")
    results = [
        {"line": line.text, **asdict(result)}
        for line, result in zip(verdict.lines, verdict.results, strict=False)  # not measured: none
    ]
    known = {name: getattr(verdict, name) for name in names}
    return {**known, "notes": list(verdict.notes), "lines": results}


def _ordered(values: pl.LazyFrame, what: str, first: Iterable[str]) -> list[str]:
    """The values of a column: first the ones in `first`, in that order, then the others."""
    present = values.select(pl.col(what).unique(maintain_order=True)).collect()[what].to_list()
    listed = [name for name in first if name in present]
    return listed + [name for name in present if name not in listed]


def _judged(claim: Claim, judging: _Judge) -> list[Verdict]:
    contents = judging.contents
    try:
        for measure in claim.measures:
            if measure not in contents.tables:
                raise missing(measure)
        bindings = _bindings(claim, judging)
    except NotMeasuredError as why:
        words = claim_sentence(claim, lambda q: (q.model or "", q.condition or ""))
        return [Verdict(claim.name, words, "not measured", str(why), lines=claim.lines)]
    return [verdict for binding in bindings for verdict in _bound(claim, judging, binding)]


def _bindings(claim: Claim, judging: _Judge) -> list[Binding]:
    """Every model, and every assignment of the run's conditions to the claim's selectors."""
    contents = judging.contents
    quantities = [quantity for line in claim.lines for quantity in line.quantities]
    named = [quantity.model for quantity in quantities if quantity.model is not None]
    models: dict[str, str] = {}
    if {"a", "b"} & set(named) - set(contents.models):
        two = judging.pair or tuple(contents.models)
        if len(two) != 2:
            raise NotMeasuredError(
                f"the claim compares two models, and this run has {len(two)}: {', '.join(two)}; "
                "choose two with `pair`, or add models to the experiment"
            )
        models = {"a": two[0], "b": two[1]}
    for name in [*(models.get(name, name) for name in named), *models.values()]:
        if name not in contents.models:
            raise NotMeasuredError(
                f"no model {name!r} in this run; it has {', '.join(contents.models)}"
            )
    alone: list[str | None] = list(contents.models) if len(named) < len(quantities) else [None]
    selectors = list(dict.fromkeys(quantity.selector for quantity in quantities))
    ways = itertools.product(*(contents.matching(selector) for selector in selectors))
    bound = [dict(zip(selectors, way, strict=True)) for way in ways]
    # Two sides with two selectors are two conditions.
    pairs = [(line.left.selector, line.right.selector) for line in claim.lines if line.right]
    good = [way for way in bound if all(a == b or way[a] != way[b] for a, b in pairs)]
    if not good:
        raise NotMeasuredError(
            f"the claim compares two conditions, and this run has only one that matches "
            f"{' and '.join(selectors)}; add another to the experiment's conditions"
        )
    return [Binding(model, models, way) for model, way in itertools.product(alone, good)]


def _bound(claim: Claim, judging: _Judge, binding: Binding) -> list[Verdict]:
    """Verdicts for one model (or pair) and one choice of conditions."""
    condition = ", ".join(dict.fromkeys(binding.conditions.values())) or None

    def names(quantity: Any) -> tuple[str, str]:
        model = binding.model_of(quantity) if quantity.model else ""
        return model, binding.condition_of(quantity)

    def verdict(word: str, reason: str, layer: int | None = None, **more: Any) -> Verdict:
        words = claim_sentence(claim, names, layer)
        where = (binding.model, condition, layer)
        return Verdict(claim.name, words, word, reason, *where, lines=claim.lines, **more)

    sources = judging.contents.sources
    try:
        samples = [sides(line, judging.contents, binding) for line in claim.lines]
        for line in claim.lines:
            if line.cluster not in (None, *sources.names):
                raise NotMeasuredError(f"the prompts have no metadata column {line.cluster!r}")
    except NotMeasuredError as why:
        return [verdict("not measured", str(why))]
    except UndecidableError as why:
        return [verdict(WORDS[4], f"{why}.")]
    each = claim.lines[0].scope.kind == "each"
    layers = samples[0][1].columns["layer"].to_list() if each else [None]
    alpha = judging.alpha / len(claim.lines) / len(layers)
    results = _decided(claim, samples, sources, alpha)
    similar = _similar(claim, samples, sources)
    clustered = {
        name: _decided(claim, samples, replace(sources, cluster=name), alpha) for name in similar
    }
    verdicts = []
    for at, layer in enumerate(layers):
        of_layer = tuple(of_line[at] for of_line in results)
        word = _overall(of_layer)
        notes = [
            f"prompts of one {name} are alike (intraclass correlation {share:.2f}): counted as "
            f"clusters it {_verb(_overall(tuple(of_line[at] for of_line in clustered[name])))}"
            for name, share in similar.items()
        ]
        more = {"results": of_layer, "notes": (*judging.notes, *notes)}
        verdicts.append(verdict(word, _reason(claim, of_layer), layer, **more))
    return verdicts


def _verb(word: str) -> str:
    return word if word in ("holds", "does not hold") else f"is {word!r}"


def _decided(
    claim: Claim,
    samples: Sequence[tuple[Matrix | None, Matrix]],
    sources: ResamplingUnits,
    alpha: float,
) -> list[list[Result]]:
    """The results of each line, one for each layer."""
    results = []
    for line, (a, b) in zip(claim.lines, samples, strict=True):
        contrast = contrast_of(line, a, b, _units(line, sources).labels(b.prompts))
        results.append(decide(line, b, contrast, alpha))
    return results


def _units(line: Line, sources: ResamplingUnits) -> ResamplingUnits:
    """The units that were asked for, or those of the line."""
    return (
        sources if sources.cluster or not line.cluster else replace(sources, cluster=line.cluster)
    )


def _similar(
    claim: Claim, samples: Sequence[tuple[Matrix | None, Matrix]], sources: ResamplingUnits
) -> dict[str, float]:
    """Metadata columns whose prompts are alike, with the largest intraclass correlation."""
    similar: dict[str, float] = {}
    for line, (a, b) in zip(claim.lines, samples, strict=True):
        x = b.x if a is None else b.x - line.factor * a.x
        for name, share in _units(line, sources).similar(x, b.prompts).items():
            similar[name] = max(share, similar.get(name, 0.0))
    return similar


def _overall(results: Sequence[Result]) -> str:
    """The verdict on a claim, from the words of its lines: all of them must hold."""
    words = [result.word for result in results]
    if len(words) == 1 or set(words) == {WORDS[0]}:
        return words[0]
    if any(word in (WORDS[1], WORDS[2]) for word in words):
        return "does not hold"
    return WORDS[4] if WORDS[4] in words else WORDS[3]


def _reason(claim: Claim, results: Sequence[Result]) -> str:
    """The numbers of every line. Of several lines each has its word."""
    texts = [
        result_sentence(line, result) for line, result in zip(claim.lines, results, strict=True)
    ]
    if len(texts) > 1:
        texts = [
            f"{line.left.measure} {result.word}: {text}"
            for line, result, text in zip(claim.lines, results, texts, strict=True)
        ]
        fail = sum(result.word in (WORDS[1], WORDS[2]) for result in results)
        texts[0] = f"{fail} of {len(texts)} parts fail. " + texts[0] if fail else texts[0]
    return "; ".join(texts) + "."
