"""Selects the claim and the rows of the sensitivity figure, and puts them in order."""

from typing import Any

import polars as pl

from attnscope.errors import AttnscopeError, InputError, unknown
from attnscope.figures.figure import Request
from attnscope.figures.numbers import in_order, rounded
from attnscope.figures.select import AbsentError, Choice, check_known, models_in_order, thin
from attnscope.spec.claims import Claim, load_claims
from attnscope.stats.robustness import CHOICES
from attnscope.stats.sensitivity import sensitivity

NEEDS = (
    "an experiment with several queries, keys, class sets or conditions, and the measure of a "
    "claim, has them (examples/sensitivity-token-types.yaml, examples/sensitivity-filler.yaml)"
)
ROWS = 72
"""Largest number of rows by default; further layers are not shown."""


def choose_claim(request: Request) -> tuple[Claim, pl.DataFrame]:
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
        table = table.filter(pl.col("difference").is_not_null())
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


def choose_rows(table: pl.DataFrame, choice: Choice) -> tuple[pl.DataFrame, int]:
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
        present = table[column].drop_nulls().unique(maintain_order=True).to_list()
        kept = check_known(column, values, present or ["none: this claim has no such choice"])
        table = table.filter(pl.col(column).is_in(kept))
    if table.is_empty():
        raise InputError(
            "no row of the claim has this combination of options; leave one of them out",
            code="empty-selection",
        )
    layers = table["layer"].drop_nulls().unique().sort().to_list()
    rows = table.select("model", "queries", "keys", "classes", "condition", "spikes").n_unique()
    few = thin(layers, max(2, ROWS // rows)) if choice.layers is None else layers
    if len(few) == len(layers):
        return table, 0
    return table.filter(pl.col("layer").is_in(few)), len(layers) - len(few)


def laid_out(table: pl.DataFrame) -> tuple[pl.DataFrame, str]:
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
    columns = ["panel", "choice", "quantity", "model", "layer", "head", *CHOICES]
    columns += ["kind", "count", "position", "against", "scale", "difference", "low", "high", "n"]
    columns += ["unreliable", "q", "verdict", "changed", "reference", "same_sign", "same_verdict"]
    always = {"difference", "low", "high", "q", "same_sign", "same_verdict"}
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
