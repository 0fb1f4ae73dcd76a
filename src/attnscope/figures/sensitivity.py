"""Draws a claim under every choice of queries, keys, classes and condition: a row per choice.

Each row has the difference, its interval and the verdict. Normalisations are different quantities,
so each has its own column. `attnscope.stats.sensitivity` computes the verdicts.
"""

from dataclasses import dataclass
from typing import Any

import polars as pl

from attnscope.figures.caption import layers_text, prompts_text
from attnscope.figures.charts.forest import SHAPES, forest, verdict_colours
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Option, Request
from attnscope.figures.numbers import intervals
from attnscope.figures.select import models_in_order
from attnscope.figures.sensitivity_rows import NEEDS, choose_claim, choose_rows, laid_out
from attnscope.figures.text_format import count, join
from attnscope.spec.claims import Claim, ClaimPart
from attnscope.stats.outcome import fill_statement, sides_of
from attnscope.stats.robustness import CHOICES, not_judged_note, robustness, robustness_summary

HEADS = {"mean": "mean over heads", "sum": "sum over heads", "max": "maximum over heads"}


@dataclass(frozen=True, kw_only=True)
class SensitivityContext:
    """Inputs of the text."""

    claim: Claim
    table: pl.DataFrame
    """The shown rows of `sensitivity`."""
    models: list[str]
    rows_title: str
    further: int
    """Layers that are not shown."""


def _numbers(request: Request) -> FigureNumbers[SensitivityContext]:
    claim, every = choose_claim(request)
    table, further = choose_rows(every, request.choice)
    frame, rows_title = laid_out(table)
    part = claim.parts[request.options["part"]]
    models = _models(request, claim)
    several = frame["quantity"].n_unique()
    label = max(len(text) for text in frame["choice"]) * request.theme.size * 0.5
    return FigureNumbers(
        data=frame,
        settings={
            "bounds": part.rule.bounds or (),
            "x_title": _compared(table, part, models) if several == 1 else None,
            "rows_title": rows_title,
        },
        width={1: 420, 2: 560, 3: 620}.get(several, 680),
        margin=min(label, 400) + 20,
        context=SensitivityContext(
            claim=claim, table=table, models=models, rows_title=rows_title, further=further
        ),
    )


def _text(numbers: FigureNumbers[SensitivityContext], request: Request) -> FigureText:
    context, data = numbers.context, numbers.data
    claim, table, models = context.claim, context.table, context.models
    part = claim.parts[request.options["part"]]
    layers = table["layer"].drop_nulls().unique().sort().to_list()
    survived = robustness_summary(table)
    agree = _agreement(table, survived)
    statement = fill_statement(claim.statement, _names(claim, models, table)).rstrip(".")
    what = _compared(table, part, models)
    bounds = part.rule.bounds or ()
    ratio = part.comparison.scale == "ratio"
    heads = "one value per layer" if _no_heads(request, table) else HEADS.get(part.scope.heads)
    overturned = survived["verdicts"] - survived["same_verdict"]
    bounds_text = (
        f", dashed lines at {join([f'{b:g}' for b in bounds])} are bounds" if bounds else ""
    )
    normalised = ", columns are normalisations" if data["quantity"].n_unique() > 1 else ""
    return FigureText(
        title=f"Sensitivity of the claim {claim.name} to analysis choices",
        caption=[
            "Each row is one choice of the analysis; colour and shape show the verdict on the "
            "claim "
            f"{claim.name}: {statement}",
            f"{agree}. All choices use the same data: they are not independent evidence",
            f"{' against '.join(reversed(models)) if _over_models(claim) else join(models)}, "
            f"{layers_text(layers)}, {heads or 'each head separately'}"
            + (f"; {count(context.further, 'further layer')} not shown" if context.further else ""),
            f"{what}; claimed: {_claimed(part)}{_part_text(claim, request.options['part'])}",
            f"Reference (shaded): {_reference(table)}",
            prompts_text(request, data, interval=intervals(data)),
            not_judged_note(survived["not_judged"]),
            "Each panel has its own scale" if data["panel"].n_unique() > 1 else "",
        ],
        models=models,
        overview=f"A forest plot: rows are choices of {context.rows_title or 'normalisation only'}"
        f"{normalised}. Claim: {statement}. {agree}.",
        axes=[
            f"x: {what}, with its 95 % interval; a line at {'1' if ratio else '0'} is no "
            f"difference{bounds_text}",
            f"y: {context.rows_title or 'where the claim was judged'}",
        ],
        legend=_legend(request),
        value="difference",
        quantity="ratio" if ratio else "difference",
        places={"quantity": "{}"}
        | ({"panel": "{}"} if data["panel"].n_unique() > 1 else {})
        | {"choice": "{}"}
        | ({"head": "head {}"} if "head" in data.columns else {}),
        split=["quantity"],
        notes=_notes(table, signed=not bounds),
        no_differences=f"{count(overturned, 'verdict')} differ from that of the reference: "
        "Notes lists the "
        "choices."
        if overturned
        else "No choice changes the verdict of the reference.",
    )


def _legend(request: Request) -> list[str]:
    """Shape and colour of each verdict, and the shaded row."""
    return [
        *(
            f"{name}: {SHAPES[name]}, {colour}"
            for name, colour in zip(SHAPES, verdict_colours(request.theme), strict=True)
        ),
        "shaded row: the reference, which has the choices of the claim",
    ]


def _models(request: Request, claim: Claim) -> list[str]:
    if _over_models(claim) and claim.parts[0].comparison.pair:
        return [str(side) for side in claim.parts[0].comparison.pair]
    if request.choice.models is not None:
        return list(request.choice.models)
    present = request.run.values.select(pl.col("model").unique()).collect()["model"].to_list()
    return models_in_order(request.run, present)


def _over_models(claim: Claim) -> bool:
    return any(part.comparison.over == "model" for part in claim.parts)


def _names(claim: Claim, models: list[str], table: pl.DataFrame) -> dict[str, Any]:
    """Values for the placeholders of the statement that are the same in all rows."""
    if _over_models(claim):
        return {"a": models[0], "b": models[1]}
    if any(part.comparison.over == "condition" for part in claim.parts):
        return {"a": join(_against(table), "or"), "b": "as the row says"}
    return sides_of(claim)


def _against(table: pl.DataFrame) -> list[str]:
    return table["against"].unique(maintain_order=True).to_list()


def _agreement(table: pl.DataFrame, survived: dict[str, Any]) -> str:
    """The number of verdicts that equal the reference, and where all of them do."""
    survives, places = survived["survives"], survived["places"]
    varied = [name for name in ("model", "layer") if table[name].drop_nulls().n_unique() > 1]
    word = {"model": "models", "layer": "layers"}.get("".join(varied), "models and layers")
    text = (
        f"{survived['same_verdict']} of {count(survived['verdicts'], 'verdict')} "
        f"({count(survived['choices'], 'choice')}) equal the reference ({survived['verdict']})"
    )
    if survived["verdict"] == "undetermined":
        return f"{text}, which decides nothing"
    text += "; the verdict "
    if places == 1:
        return text + ("is the same for every choice" if survives else "depends on the choice")
    return f"{text}is the same for every choice in {survives} of {places} {word}"


def _no_heads(request: Request, table: pl.DataFrame) -> bool:
    of_measure = request.run.values.filter(pl.col("measure") == table["measure"][0])
    return bool(of_measure.select(pl.col("head").is_null().all()).collect().item())


def _compared(table: pl.DataFrame, part: ClaimPart, models: list[str]) -> str:
    """The quantity of the difference or ratio."""
    item = table["item"][0]
    what = table["measure"][0] + ("" if item is None else f" on {item}")
    sign, over = "over" if part.comparison.scale == "ratio" else "minus", part.comparison.over
    first = join(_against(table), "or")
    if over == "model":
        return f"{what}: {models[1]} {sign} {first}"
    of = "that of " if over in ("condition", "layer") else ""
    return f"{what} {sign} {of}{first}"


def _claimed(part: ClaimPart) -> str:
    if part.rule.bounds is not None:
        return f"within {part.rule.bounds[0]:g} to {part.rule.bounds[1]:g}"
    return f"{part.direction} than {1 if part.comparison.scale == 'ratio' else 0}"


def _part_text(claim: Claim, part: int) -> str:
    if len(claim.parts) == 1:
        return ""
    return (
        f"; the verdict is on all {len(claim.parts)} parts of the claim, the differences are of "
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
    once = table.unique(["model", "layer", *CHOICES], keep="first", maintain_order=True)
    notes = []
    for row in robustness(
        once.with_columns(pl.lit(None, dtype=pl.Int64()).alias("head"))
    ).to_dicts():
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
    needs=NEEDS,
    numbers=_numbers,
    chart=forest,
    text=_text,
    options={
        "claim": Option(help="`claim`: name of the claim; default: the first with several choices"),
        "claims": Option(help="`claims`: a file of claims"),
        "part": Option(help="`part`: part of the claim that is shown; default 0", default=0),
    },
)
