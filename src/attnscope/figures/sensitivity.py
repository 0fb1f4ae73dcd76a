"""Does a conclusion survive the choices behind it? A row per choice of queries, keys, classes and
condition: the difference with its interval, and the verdict on the claim.

Normalisations are other quantities, so each has its own column with its own axis. Everything is
judged by `attnscope.stats.sensitivity`; this module must not know how.
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
    """What the words tell of."""

    claim: Claim
    table: pl.DataFrame
    """What `sensitivity` found, as far as it is shown."""
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
    heads = "the whole layer" if _no_heads(request, table) else HEADS.get(part.scope.heads)
    overturned = survived["verdicts"] - survived["same_verdict"]
    bounds_text = (
        f", dashed lines at {join([f'{b:g}' for b in bounds])} are bounds" if bounds else ""
    )
    normalised = ", columns are normalisations" if data["quantity"].n_unique() > 1 else ""
    return FigureText(
        title=f"The claim {claim.name} under every choice",
        caption=[
            f"Claim {claim.name}: {statement}",
            f"{' against '.join(reversed(models)) if _over_models(claim) else join(models)}, "
            f"{layers_text(layers)}, {heads or 'every head by itself'}"
            + (f"; {count(context.further, 'further layer')} not shown" if context.further else ""),
            f"{what}; claimed: {_claimed(part)}{_part_text(claim, request.options['part'])}",
            f"Reference (shaded): {_reference(table)}",
            prompts_text(request, data, interval=intervals(data)),
            f"{agree}. The choices are the same data seen again, not further evidence",
            not_judged_note(survived["not_judged"]),
            "Every panel has its own scale" if data["panel"].n_unique() > 1 else "",
        ],
        models=models,
        overview=f"A forest plot: rows are choices of {context.rows_title or 'normalisation alone'}"
        f"{normalised}. Claim: {statement}. {agree}.",
        axes=[
            f"x: {what}, with its 95 % interval; a line at {'1' if ratio else '0'} is no "
            f"difference{bounds_text}",
            f"y: {context.rows_title or 'where the claim was judged'}",
        ],
        legend=[
            *(
                f"{name}: {SHAPES[name]}, {colour}"
                for name, colour in zip(SHAPES, verdict_colours(request.theme), strict=True)
            ),
            "shaded row: the reference, which is the claim's own choices",
        ],
        value="difference",
        quantity="ratio" if ratio else "difference",
        places={"quantity": "{}"}
        | ({"panel": "{}"} if data["panel"].n_unique() > 1 else {})
        | {"choice": "{}"}
        | ({"head": "head {}"} if "head" in data.columns else {}),
        split=["quantity"],
        notes=_notes(table, signed=not bounds),
        no_differences=f"Overturned by {count(overturned, 'verdict')}: the choices behind them are "
        "under Notes."
        if overturned
        else "Nothing overturns the reference's verdict.",
    )


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
    """What the statement's places are filled with, as far as it is the same for all rows."""
    if _over_models(claim):
        return {"a": models[0], "b": models[1]}
    if any(part.comparison.over == "condition" for part in claim.parts):
        return {"a": join(_against(table), "or"), "b": "as the row says"}
    return sides_of(claim)


def _against(table: pl.DataFrame) -> list[str]:
    return table["against"].unique(maintain_order=True).to_list()


def _agreement(table: pl.DataFrame, survived: dict[str, Any]) -> str:
    """How many verdicts are the reference's, and where all of them are."""
    survives, places = survived["survives"], survived["places"]
    varied = [name for name in ("model", "layer") if table[name].drop_nulls().n_unique() > 1]
    word = {"model": "models", "layer": "layers"}.get("".join(varied), "models and layers")
    text = (
        f"{survived['same_verdict']} of {count(survived['verdicts'], 'verdict')} "
        f"({count(survived['choices'], 'choice')}) are the reference's ({survived['verdict']})"
    )
    if survived["verdict"] == "undetermined":
        return f"{text}, which decides nothing by itself"
    text += "; the verdict "
    if places == 1:
        return text + ("survives every choice" if survives else "does not survive every choice")
    return f"{text}survives every choice in {survives} of {places} {word}"


def _no_heads(request: Request, table: pl.DataFrame) -> bool:
    of_measure = request.run.values.filter(pl.col("measure") == table["measure"][0])
    return bool(of_measure.select(pl.col("head").is_null().all()).collect().item())


def _compared(table: pl.DataFrame, part: ClaimPart, models: list[str]) -> str:
    """What the difference, or the ratio, is of."""
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
        f"; the verdict is on all {len(claim.parts)} parts of the claim, the figures are of part "
        f"{part} (counted from 0)"
    )


def _reference(table: pl.DataFrame) -> str:
    reference = table.filter("reference")
    if reference.is_empty():
        same = [f"{name}: {table[name][0]}" for name in CHOICES if table[name].n_unique() == 1]
        return f"not among the rows shown, which all have {'; '.join(same) or 'other choices'}"
    row = reference.row(0, named=True)
    choices = [f"{name}: {row[name]}" for name in CHOICES if name != "normalise" and row[name]]
    how = f"normalised: {row['normalise']}" if row["normalise"] else "not normalised further"
    return "; ".join([*choices, how])


def _notes(table: pl.DataFrame, *, signed: bool) -> list[str]:
    """For every place: how many choices agree, and the fewest that overturn the verdict."""
    once = table.unique(["model", "layer", *CHOICES], keep="first", maintain_order=True)
    notes = []
    for row in robustness(
        once.with_columns(pl.lit(None, dtype=pl.Int64()).alias("head"))
    ).to_dicts():
        where = [row["model"], None if row["layer"] is None else f"layer {row['layer']}"]
        location = ", ".join(one for one in where if one is not None)
        if row["verdict"] is None:
            notes.append(f"{location}: the claim's own choices have no verdict here")
            continue
        sign = f", {row['same_sign']} its sign" if signed else ""
        by = f"; overturned by {'; by '.join(row['overturned_by'])}" if row["overturned_by"] else ""
        notes.append(
            f"{location}: {row['verdict']}; {row['same_verdict']} of "
            f"{count(row['choices'], 'choice')} have this verdict{sign}{by}"
        )
    return notes


FIGURE = Figure(
    name="sensitivity",
    shows="a claim under every choice: a row per choice, difference and interval, verdict as "
    "colour and shape",
    needs=NEEDS,
    numbers=_numbers,
    chart=forest,
    text=_text,
    options={
        "claim": Option(help="`claim` (else the first that has choices)"),
        "claims": Option(help="`claims` a file of them"),
        "part": Option(help="`part` whose difference is shown, from 0", default=0),
    },
)
