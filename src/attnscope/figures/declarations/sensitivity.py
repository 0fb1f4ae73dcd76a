"""A claim under every choice of queries, keys, classes and condition: a row per choice.

Each row has the difference, its interval and the verdict. Normalisations are different quantities,
so each has its own column.
"""

from typing import Any

import polars as pl

from attnscope.errors import AttnscopeError, InputError, unknown
from attnscope.figures.caption import layers_text, prompts_text
from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.numbers import in_order, rounded
from attnscope.figures.options import Option
from attnscope.figures.select import AbsentError, Choice, check_known, models_in_order, thin
from attnscope.figures.shapes.forest import Forest
from attnscope.figures.text_format import count, join
from attnscope.spec.claims import Claim, Line, load_claims
from attnscope.stats.sensitivity import (
    CHOICES,
    not_judged_note,
    robustness,
    robustness_summary,
    sensitivity,
)
from attnscope.stats.sentences import claim_sentence

ROWS = 72
"""Largest number of rows by default; further layers are not shown."""


def _numbers(request: Request, figure: Figure) -> Numbers:
    claim, every = _claim(request)
    table, further = _rows(every, request.choice)
    data, rows_title = _laid_out(table)
    part, models = claim.lines[request.options["part"]], _models(request, claim)
    bounds, what = part.bounds or _needed(part, table), _compared(table)
    one, several = data["quantity"].n_unique() == 1, data["panel"].n_unique() > 1
    summary = robustness_summary(table)
    agree, overturned = _agreement(table, summary), summary["verdicts"] - summary["same_verdict"]
    drawn = data["low"].null_count() < data.height
    places = {"quantity": "{}", "panel": "{}", "choice": "{}"}
    shown = {c: f for c, f in places.items() if c in data.columns and (c != "panel" or several)}
    statement = claim_sentence(claim).rstrip(".")
    rows = rows_title or "normalisation only"
    return Numbers(
        data=data,
        models=models,
        settings={
            "bounds": bounds,
            "x_title": what if one else "",
            "rows_title": rows_title,
        },
        words={"claim": claim.name, "statement": statement},
        sentences=[
            f"{agree}. All choices use the same data: they are not independent evidence",
            _scope(request, claim, part, models, table, further),
            f"{what}; claimed: {part.text}{_part_text(claim, request.options['part'])}",
            f"Reference (shaded): {_reference(table)}",
            prompts_text(request, data, interval=drawn),
            not_judged_note(summary["not_judged"]),
            "Each panel has its own scale" if several else "",
        ],
        text={
            "quantity": "ratio" if table["scale"][0] == "ratio" else "difference",
            "places": shown,
            "overview": f"A forest plot: rows are choices of {rows}"
            f"{'' if one else ', columns are normalisations'}. Claim: {statement}. {agree}.",
            "notes": _notes(table, signed=not part.bounds),
            "no_differences": f"{count(overturned, 'verdict')} differ from that of the reference: "
            "Notes lists the choices."
            if overturned
            else "No choice changes the verdict of the reference.",
        },
    )


def _scope(
    request: Request,
    claim: Claim,
    part: Line,
    models: list[str],
    table: pl.DataFrame,
    further: int,
) -> str:
    """Models, layers and heads."""
    of_measure = request.run.values.filter(pl.col("measure") == table["measure"][0])
    no_heads = bool(of_measure.select(pl.col("head").is_null().all()).collect().item())
    heads = "one value per layer" if no_heads else "mean over heads"
    heads = "each head separately" if part.scope.kind == "heads" else heads
    names = " against ".join(reversed(models)) if _over_models(claim) else join(models)
    shown = table["layer"].drop_nulls().unique().sort().to_list()
    layers = layers_text(shown) if shown else "mean over layers"
    layers = "all layers" if part.scope.kind == "heads" and not part.scope.layers else layers
    more = f"; {count(further, 'further layer')} not shown" if further else ""
    return f"{names}, {layers}, {heads}{more}"


def _claim(request: Request) -> tuple[Claim, pl.DataFrame]:
    """The claim and its table under every choice.

    The option `claim` names a claim of the run, a built-in one, or one in the file `claims`. The
    default is the first claim that the run can judge under more than one choice.
    """
    claim, part, file = (request.options[name] for name in ("claim", "part", "claims"))
    if request.choice.items is not None:
        raise InputError(
            "sensitivity shows a claim, and the claim names its classes; leave items out",
            code="conflicting-options",
            option="items",
        )
    if claim is None and part:
        raise InputError(
            f"part={part!r} needs the name of its claim; add claim=…",
            code="missing-claim",
            part=part,
        )
    known = request.verdict_cache.claims if file is None else load_claims(str(file))
    candidates = [one for one in known if claim is None or one.name == claim]
    if isinstance(claim, Claim):
        candidates = [claim]
    if not candidates:
        raise unknown("claim", claim, [one.name for one in known])
    for candidate in candidates:
        try:
            table = _sensitivity(request, candidate)
        except AttnscopeError:
            if claim is not None:
                raise
            continue
        written = pl.col("numbers") == "as written"  # the others have the same interval
        table = table.filter(pl.col("difference").is_not_null(), written)
        if table.select(*CHOICES).n_unique() > 1:
            return candidate, table
        if claim is not None:
            raise AbsentError(
                f"this run has only one choice for the claim {candidate.name!r}, so there is "
                "nothing to compare",
                code="one-choice-only",
                claim=candidate.name,
            )
    raise AbsentError(
        "this run has no claim that can be judged under more than one choice",
        code="one-choice-only",
    )


def _sensitivity(request: Request, claim: Claim) -> pl.DataFrame:
    """The claim under every choice, for the chosen models and prompts."""
    choice, part = request.choice, request.options["part"]
    if (
        choice.models is None
        and choice.prompts is None
        and not part
        and claim in request.verdict_cache.claims
    ):
        return request.verdict_cache.under_choices(claim)
    values = request.run.values
    pair = None
    if choice.models is not None:
        present = values.select(pl.col("model").unique()).collect()["model"]
        models = check_known("model", choice.models, models_in_order(request.run, present))
        values = values.filter(pl.col("model").is_in(models))
        pair = (models[0], models[1]) if len(models) == 2 else None
    if choice.prompts is not None:
        values = values.filter(pl.col("prompt").is_in(list(choice.prompts)))
    return sensitivity(
        claim,
        values,
        experiment=request.run.experiment,
        pair=pair,
        part=part,
        **request.units.settings,
    )


def _rows(table: pl.DataFrame, choice: Choice) -> tuple[pl.DataFrame, int]:
    """The rows to show, and the number of layers that are not shown."""
    heads = choice.heads
    if isinstance(heads, dict):
        heads = sorted(set(heads.values()))
    chosen_values: dict[str, Any] = {
        "layer": choice.layers,
        "head": heads,
        "condition": choice.conditions,
        **{name: (getattr(choice, name),) for name in ("queries", "keys", "classes")},
    }
    for column, values in chosen_values.items():
        if values is None or values == (None,):
            continue
        known = table[column].drop_nulls() if column in table.columns else pl.Series()
        present = known.unique(maintain_order=True).to_list()
        kept = check_known(column, values, present or ["none: this claim has no such choice"])
        table = table.filter(pl.col(column).is_in(kept))
    if table.is_empty():
        raise InputError(
            "no row of the claim has this combination of options; leave one of them out",
            code="empty-selection",
        )
    layers = table["layer"].drop_nulls().unique().sort().to_list()
    rows = table.select(
        "model", "queries", "keys", "classes", "condition", "spikes", "numbers"
    ).n_unique()
    few = thin(layers, max(2, ROWS // rows)) if choice.layers is None else layers
    if len(few) == len(layers):
        return table, 0
    return table.filter(pl.col("layer").is_in(few)), len(layers) - len(few)


def _laid_out(table: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """The data of the figure, and the names of the choices that label its rows."""
    varied = [
        name for name in CHOICES if name != "normalise" and table[name].drop_nulls().n_unique() > 1
    ]
    several = [name for name in ("model", "layer") if table[name].drop_nulls().n_unique() > 1]
    rows = table.to_dicts()
    blocks = [
        ", ".join(f"layer {row[n]}" if n == "layer" else str(row[n]) for n in several) or "all"
        for row in rows
    ]
    labels = [" · ".join(_label(row, name) for name in varied) for row in rows]
    if not varied:  # only normalisations vary: models and layers are the rows
        labels, blocks = blocks, ["all"] * len(rows)
    data = table.with_columns(
        pl.Series("panel", blocks, dtype=pl.String()),
        pl.Series("choice", labels, dtype=pl.String()),
        pl.coalesce("normalise", "measure").alias("quantity"),
        pl.when("reference").then(pl.lit("nothing")).otherwise("changed").alias("changed"),
    )
    data = in_order(data, panel=list(dict.fromkeys(blocks)))
    columns = ["panel", "choice", "quantity", "model", "layer", *CHOICES]
    columns += ["kind", "count", "position", "against", "scale", "difference", "low", "high", "n"]
    columns += ["p", "verdict", "changed", "reference", "same_sign", "same_verdict"]
    always = {"difference", "low", "high", "p", "same_sign", "same_verdict"}
    kept = [c for c in columns if c in always or data[c].null_count() < data.height]
    return rounded(data.select(kept)), " · ".join(varied)


def _label(row: dict[str, Any], name: str) -> str:
    """The label of a choice; for a pair of conditions, the second one."""
    if name == "spikes":
        return f"spikes {row[name]}"
    if name != "condition" or row["kind"] is None:
        return str(row[name])
    where = f", {row['position']}" if row["position"] is not None else ""
    name = row["condition"].removeprefix(f"{row['against']}, ")
    return f"{name} ({row['count']} × {row['kind']}{where})"


def _models(request: Request, claim: Claim) -> list[str]:
    if request.choice.models is not None:
        return list(request.choice.models)
    present = request.run.values.select(pl.col("model").unique()).collect()["model"].to_list()
    return models_in_order(request.run, present)


def _over_models(claim: Claim) -> bool:
    return any(len({q.model for q in line.quantities}) > 1 for line in claim.lines)


def _agreement(table: pl.DataFrame, survived: dict[str, Any]) -> str:
    """The number of verdicts that equal the reference, and where all of them do."""
    survives, places = survived["survives"], survived["places"]
    varied = [name for name in ("model", "layer") if table[name].drop_nulls().n_unique() > 1]
    word = {"model": "models", "layer": "layers"}.get("".join(varied), "models and layers")
    text = (
        f"{survived['same_verdict']} of {count(survived['verdicts'], 'verdict')} "
        f"({count(survived['choices'], 'choice')}) equal the reference ({survived['verdict']})"
    )
    if survived["verdict"] in ("open", "cannot tell"):
        return f"{text}, which decides nothing"
    text += "; the verdict "
    if places == 1:
        return text + ("is the same for every choice" if survives else "depends on the choice")
    return f"{text}is the same for every choice in {survives} of {places} {word}"


def _compared(table: pl.DataFrame) -> str:
    """The quantity of the difference or ratio."""
    item, kind = table["item"][0], table["scale"][0]
    what: str = table["measure"][0] + ("" if item is None else f" of {item}")
    against = join(table["against"].unique(maintain_order=True).to_list(), "or")
    if kind in ("heads", "layers"):
        return f"number of {kind} whose {what} is beyond what is needed"
    return {"value": what, "ratio": f"{what} over {against}"}.get(kind, f"{what} minus {against}")


def _needed(line: Line, table: pl.DataFrame) -> tuple[float, ...]:
    """The number that the estimate is compared with, unless it is that of no difference."""
    kind = table["scale"][0]
    if kind == "ratio":
        return (line.factor,) if line.factor != 1 else ()
    return (line.offset,) if kind == "value" or (kind == "difference" and line.offset) else ()


def _part_text(claim: Claim, part: int) -> str:
    if len(claim.lines) == 1:
        return ""
    return (
        f"; the verdict is on all {len(claim.lines)} parts of the claim, the differences are of "
        "part "
        f"{part} (counted from 0)"
    )


def _reference(table: pl.DataFrame) -> str:
    reference = table.filter("reference")
    if reference.is_empty():
        same = [f"{name}: {table[name][0]}" for name in CHOICES if table[name].n_unique() == 1]
        return f"not shown; all rows have {'; '.join(same) or 'other choices'}"
    row = reference.row(0, named=True)
    choices = [f"{name}: {row[name]}" for name in CHOICES if name != "normalise" and row[name]]
    how = f"normalised: {row['normalise']}" if row["normalise"] else "raw values"
    return "; ".join([*choices, how])


def _notes(table: pl.DataFrame, *, signed: bool) -> list[str]:
    """For each model and layer: the choices that agree, and the smallest changes that do not."""
    notes = []
    for row in robustness(table).to_dicts():
        where = [row["model"], None if row["layer"] is None else f"layer {row['layer']}"]
        location = ", ".join(one for one in where if one is not None)
        if row["verdict"] is None:
            notes.append(f"{location}: the choices of the claim have no verdict here")
            continue
        sign = f", {row['same_sign']} its sign" if signed else ""
        by = f"; changed by {'; by '.join(row['overturned_by'])}" if row["overturned_by"] else ""
        notes.append(
            f"{location}: {row['verdict']}; {row['same_verdict']} of "
            f"{count(row['choices'], 'choice')} have this verdict{sign}{by}"
        )
    return notes


FIGURE = Figure(
    name="sensitivity",
    shows="a claim under every analysis choice: a row per choice with difference, interval and "
    "verdict",
    by=["quantity", "choice"],
    shape=Forest(),
    numbers=_numbers,
    differences="",
    title="Sensitivity of the claim {claim} to analysis choices",
    what="Each row is one choice of the analysis; colour and shape show the verdict on the claim "
    "{claim}: {statement}",
    quantity="difference",
    needs="an experiment with several queries, keys, class sets or conditions, and the measure of "
    "a claim, has them (examples/sensitivity-token-types.yaml, examples/sensitivity-filler.yaml)",
    options={
        "claim": Option(help="name of the claim; default: the first with several choices"),
        "claims": Option(help="a file of claims"),
        "part": Option(help="line of the claim that is shown, from 0; default 0", default=0),
    },
)
