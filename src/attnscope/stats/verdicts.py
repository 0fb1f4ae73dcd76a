"""Judges claims from the table of values.

All intervals of a claim (its lines, in each layer) hold together at 95 %: each has the level
1 - 0.05 / (lines x layers). So "holds", and "does not hold" where one line fails, are both wrong in
at most 5 % of runs, as far as the assumption of the test holds (docs/statistics.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import polars as pl

from attnscope.run.tables import Matrix, Values
from attnscope.spec.claims import Claim, Line
from attnscope.spec.experiment import Experiment
from attnscope.stats.evidence import NoEvidenceError, RunContents, read_claim
from attnscope.stats.means import MINIMUM
from attnscope.stats.outcome import (
    ALPHA,
    CANNOT_TELL,
    HOLDS,
    OPEN,
    OPPOSITE,
    SMALLER,
    WORDS,
    Result,
    contrast_of,
    decide,
)
from attnscope.stats.resampling import ResamplingUnits
from attnscope.stats.sentences import claim_sentence, result_sentence

FAILS, NOT_MEASURED = "does not hold", "not measured"
VERDICTS = (*WORDS, FAILS, NOT_MEASURED)
"""`does not hold`: of several lines, some fail."""
WRITTEN = ("written before the run", "changed after the run", "added after the run")


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

    @property
    def summary(self) -> str:
        """The verdict; if a claim does not hold, how many of its parts fail."""
        fail = sum(result.word in (SMALLER, OPPOSITE) for result in self.results)
        parts = f" ({fail} of {len(self.results)} parts fail)"
        return self.verdict + (parts if self.verdict == FAILS else "")

    def __str__(self) -> str:
        """Verdict, statement, numbers, notes."""
        notes = "".join(f" ! {note}." for note in self.notes)
        return f"{self.summary}: {self.sentence} {self.reason}{notes}"


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
    cluster: str | None = None,
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
    claims, sources = list(claims), ResamplingUnits(prompts, cluster, strata)
    measures = {measure for claim in claims for measure in claim.measures}
    contents = RunContents.of(values, measures, sources, experiment, pair)
    interim = experiment.interim if experiment else ()
    notes = ("the run is unfinished",) if unfinished else ()
    return [
        replace(
            verdict,
            written=_written(claim, written, earlier, interim, sources),
            notes=(*notes, *verdict.notes),
        )
        for claim in claims
        for verdict in _judged(claim, contents)
    ]


def _written(
    claim: Claim,
    written: Mapping[str, str] | None,
    earlier: Sequence[str],
    interim: Sequence[int],
    sources: ResamplingUnits,
) -> str | None:
    """When the claim was written, and how often the results could be seen before."""
    if written is None:
        return None
    look = ""
    if interim:
        numbers = ", ".join(map(str, interim))
        look = f"; look {len(interim) + 1} at the data, earlier with {numbers} prompts"
    if written.get(claim.name) != claim.text:
        return WRITTEN[1 if claim.name in written else 2] + look
    label = WRITTEN[0] + look
    if earlier:
        label += f"; prompts seen before ({', '.join(earlier)})"
    units = ", ".join(sources.chosen)
    return label + (f"; the units ({units}) were chosen afterwards" if units else "")


def verdict_table(verdicts: Sequence[Verdict]) -> pl.DataFrame:
    """Verdicts as a table, without their results."""
    names = ("claim", "model", "condition", "layer", "verdict", "written", "statement", "reason")
    schema = {name: pl.Int64() if name == "layer" else pl.String() for name in (*names, "notes")}
    rows = [[*(getattr(v, n) for n in names), "; ".join(v.notes) or None] for v in verdicts]
    return pl.DataFrame(rows, schema=schema, orient="row")


def verdict_dict(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain data, for JSON."""
    names = ("claim", "statement", "verdict", "reason", "model", "condition", "layer", "written")
    results = [
        {"line": line.text, **asdict(result)}
        for line, result in zip(verdict.lines, verdict.results, strict=False)  # not measured: none
    ]
    known = {name: getattr(verdict, name) for name in names}
    return {**known, "notes": list(verdict.notes), "lines": results}


def _judged(claim: Claim, contents: RunContents) -> list[Verdict]:
    """The verdicts on one claim."""
    try:
        bound = contents.bound(claim)
    except NoEvidenceError as why:
        sentence = claim_sentence(claim)
        return [Verdict(claim.name, sentence, NOT_MEASURED, str(why), lines=claim.lines)]
    return [verdict for model, one in bound for verdict in _bound(claim, one, contents, model)]


def _bound(claim: Claim, bound: Claim, contents: RunContents, model: str | None) -> list[Verdict]:
    """Verdicts on a claim with the names of one model (or pair) and one choice of conditions."""
    condition = ", ".join(dict.fromkeys(str(q.condition) for q in bound.quantities))

    def verdict(word: str, reason: str, layer: int | None = None, **more: Any) -> Verdict:
        where = (model, condition, layer)
        sentence = claim_sentence(bound, layer)
        return Verdict(claim.name, sentence, word, reason, *where, lines=claim.lines, **more)

    try:
        samples = read_claim(bound, contents, model)
    except NoEvidenceError as why:
        return [verdict(CANNOT_TELL if why.measured else NOT_MEASURED, str(why))]
    each = claim.lines[0].scope.kind == "each"
    layers = samples[0][1].columns["layer"].to_list() if each else [None]
    results = _results(claim, samples, contents.sources, len(layers))
    notes: list[list[str]] = [[] for _ in layers]
    for name, correlation in _similar(claim, samples, contents.sources).items():
        clustered = replace(contents.sources, cluster=name)
        clusters = clustered.count(samples[0][1].prompts)
        judged = _results(claim, samples, clustered, len(layers))
        for of_layer, result in zip(notes, judged, strict=True):
            word = _overall(result)
            then = f"counted as clusters it {word if word in (HOLDS, FAILS) else f'is {word!r}'}"
            if clusters < MINIMUM:  # so few groups are no sample of others
                then = f"the verdict is about these {clusters} groups only"
            correlated = f"(intraclass correlation {correlation:.2f})"
            of_layer.append(f"prompts of one {name} are alike {correlated}: {then}")
    return [
        verdict(_overall(one), _reason(claim, one), layer, results=one, notes=tuple(of_layer))
        for layer, one, of_layer in zip(layers, results, notes, strict=True)
    ]


def _results(
    claim: Claim,
    samples: Sequence[tuple[Matrix | None, Matrix]],
    sources: ResamplingUnits,
    layers: int,
) -> list[tuple[Result, ...]]:
    """The results of all lines, for each layer."""
    by_line = []
    for line, (a, b) in zip(claim.lines, samples, strict=True):
        contrast = contrast_of(line, a, b, sources.of(line.cluster).labels(b.prompts))
        by_line.append(decide(line, b, contrast, ALPHA / len(claim.lines) / layers))
    return list(zip(*by_line, strict=True))


def _similar(
    claim: Claim, samples: Sequence[tuple[Matrix | None, Matrix]], sources: ResamplingUnits
) -> dict[str, float]:
    """Metadata columns whose prompts are alike, with the largest intraclass correlation."""
    pairs: list[tuple[str, float]] = []
    for line, (a, b) in zip(claim.lines, samples, strict=True):
        x = b.x if a is None else b.x - line.factor * a.x
        pairs += sources.of(line.cluster).similar(x, b.prompts).items()
    return dict(sorted(pairs, key=lambda pair: pair[1]))  # of one name the largest is the last


def _overall(results: Sequence[Result]) -> str:
    """The verdict on a claim, from the words of its lines: all of them must hold."""
    words = [result.word for result in results]
    if len(words) == 1 or set(words) == {HOLDS}:
        return words[0]
    if any(word in (SMALLER, OPPOSITE) for word in words):
        return FAILS
    return CANNOT_TELL if CANNOT_TELL in words else OPEN


def _reason(claim: Claim, results: Sequence[Result]) -> str:
    """The numbers of every line. Of several lines each has its word."""
    pairs = list(zip(claim.lines, results, strict=True))
    texts = [result_sentence(line, result) for line, result in pairs]
    if len(texts) > 1:
        words = [
            f"part {number} ({line.left.measure}) {result.word}: "
            for number, (line, result) in enumerate(pairs, 1)
        ]
        texts = [word + text for word, text in zip(words, texts, strict=True)]
    return "; ".join(texts) + "."
