"""Does a conclusion survive the choices behind it? A row per choice of queries, keys, classes and
condition: the difference with its interval, and the verdict on the claim.

Normalisations are other quantities, so each has its own column with its own axis. Everything is
judged by `attnscope.stats.sensitivity`; this module must not know how.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.errors import AttnscopeError, InputError, unknown
from attnscope.figures.assemble import assemble
from attnscope.figures.caption import caption, layers_said, prompts_said
from attnscope.figures.choice import Choice, models_in_order
from attnscope.figures.describe import Words
from attnscope.figures.figure import Figure, Run
from attnscope.figures.layout import nothing, panel_title, tips
from attnscope.figures.numbers import shown
from attnscope.figures.style import Style
from attnscope.figures.theme import PUBLISHED, Theme
from attnscope.figures.words import count, join
from attnscope.stats.claims import Claim, Part, built_in, load_claims
from attnscope.stats.sensitivity import CHOICES, in_a_line, survival
from attnscope.stats.sensitivity import sensitivity as judged_again
from attnscope.stats.verdicts import VERDICTS, stated

__all__ = ["NEEDS", "draw", "sensitivity"]

NEEDS = (
    "an experiment with several queries, keys, class sets or conditions, and the measure of a "
    "claim, has them (examples/sensitivity-token-types.yaml, examples/sensitivity-filler.yaml)"
)
ROWS = 72
"""The most rows below each other where no layers were asked for; further layers are left out."""
HEADS = {"mean": "mean over heads", "sum": "sum over heads", "max": "maximum over heads"}
SHAPES = dict(zip(VERDICTS, ("circle", "cross", "diamond", "square"), strict=True))


def sensitivity(
    frame: pl.DataFrame,
    *,
    bounds: Sequence[float] = (),
    x_title: str | None = None,
    rows_title: str = "",
    theme: Theme = PUBLISHED,
    width: float = 640,
) -> Any:
    """The chart of `frame`: `difference` with `low` and `high` in a row per `choice`, a column per
    `quantity`, a block of rows per `panel`; colour and shape by `verdict`, and the row with
    `reference` shaded. `bounds` are lines beside that of equality.
    """
    blocks = frame["panel"].unique(maintain_order=True).to_list()
    quantities = frame["quantity"].unique(maintain_order=True).to_list()
    wide = (width - 22 * (len(quantities) - 1)) / len(quantities)
    equal = 1.0 if frame["scale"][0] == "ratio" else 0.0
    rows = []
    for block in blocks:
        part = frame.filter(pl.col("panel") == block)
        order = part["choice"].unique(maintain_order=True).to_list()
        cells = []
        for name in quantities:
            first = name == quantities[0]
            cell = part.filter(pl.col("quantity") == name)
            marks = _marks(
                cell,
                order,
                lines=[(equal, False), *((bound, True) for bound in bounds)],
                domain=_domain(cell, [equal, *bounds]),
                x_title=(x_title or f"{name}: difference") if block == blocks[-1] else "",
                bold=part.filter("reference")["choice"].to_list(),
                labelled=first,
                rows_title=rows_title if block == blocks[0] else "",
                gap=24 if len(blocks) > 1 else 6,
                ticks=5 if len(quantities) == 1 else 3,
                theme=theme,
            )
            if first and len(blocks) > 1:
                marks.append(panel_title([block], width, theme, rise=8))
            cells.append(alt.layer(*marks).properties(width=wide, height=_step(part) * len(order)))
        rows.append(alt.hconcat(*cells, spacing=22, bounds="flush") if len(cells) > 1 else cells[0])
    return alt.vconcat(*rows, spacing=22).resolve_scale(color="shared", shape="shared")


def _step(part: pl.DataFrame) -> float:
    """Height of a row: room for a line of text, or for every head."""
    heads = part["head"].n_unique() if "head" in part.columns else 1
    return max(20.0 if part["choice"].n_unique() <= 8 else 15.0, 2.2 * heads + 4)


def _domain(part: pl.DataFrame, also: Sequence[float]) -> list[float]:
    found = [*also]
    for column in ("difference", "low", "high"):
        found += [v for v in (part[column].min(), part[column].max()) if isinstance(v, float)]
    low, high = min(found), max(found)
    edge = 0.06 * (high - low) or 0.5
    return [low - edge, high + edge]


def _marks(
    part: pl.DataFrame,
    order: Sequence[str],
    *,
    lines: Sequence[tuple[float, bool]],
    domain: Sequence[float],
    x_title: str,
    bold: Sequence[str],
    labelled: bool,
    rows_title: str,
    gap: float,
    ticks: int,
    theme: Theme,
) -> list[Any]:
    """One cell of the figure: the shaded row, the lines, intervals, points."""
    weight: Any = alt.Undefined
    if bold:
        test = f"indexof({json.dumps(list(dict.fromkeys(bold)))}, datum.value) >= 0"
        weight = {"condition": {"test": test, "value": "bold"}, "value": "normal"}
    y = alt.Y(
        "choice:N",
        sort=list(order),
        title=rows_title if labelled and rows_title else None,
        scale=alt.Scale(domain=list(order), paddingInner=0, paddingOuter=0),
        axis=alt.Axis(
            labels=labelled,
            labelFontWeight=weight,
            ticks=False,
            domain=False,
            grid=False,
            labelPadding=8,
            labelLimit=420,
            labelOverlap=False,
            titleAngle=0,
            titleAlign="right",
            titleAnchor="start",
            titleBaseline="bottom",
            titleX=-8,
            titleY=-6,
            titleFontSize=theme.size - 1,
        ),
    )
    x = alt.X(
        "difference:Q",
        title=x_title,
        scale=alt.Scale(domain=list(domain), nice=False, zero=False),
        axis=alt.Axis(grid=True, tickCount=ticks, labelOverlap=True, format="~g"),
    )
    said = list(VERDICTS[:3])
    legend = alt.Legend(
        orient="top",
        title="Verdict",
        titleOrient="left",
        symbolOpacity=1,
        symbolSize=60,
        offset=gap,
    )
    colour = alt.Color(
        "verdict:N",
        scale=alt.Scale(
            domain=said,
            range=[theme.filled, theme.without, theme.class_colours(["other"])[0]],
        ),
        legend=legend,
    )
    shape = alt.Shape(
        "verdict:N",
        scale=alt.Scale(domain=said, range=[SHAPES[name] for name in said]),
        legend=legend,
    )
    base = alt.Chart(part)
    placed: dict[str, Any] = {"y": y}
    many = "head" in part.columns and part["head"].n_unique() > 1
    if many:
        placed["yOffset"] = alt.YOffset("head:O", scale=alt.Scale(paddingOuter=0.5))
    marks: list[Any] = [
        base.transform_filter(alt.datum.reference)
        .mark_bar(style="chosen-row", height=alt.RelativeBandSize(band=1))
        .encode(y=y, x=alt.value(0), x2=alt.value("width"))
    ]
    for line, dashed in lines:
        marks.append(
            alt.Chart(nothing())
            .mark_rule(style="faint-rule", strokeDash=[4, 3] if dashed else [1, 0])
            .encode(x=alt.XDatum(line))
        )
    if part["low"].null_count() < part.height:
        marks.append(
            base.mark_rule(strokeWidth=1 if many else 1.6, opacity=1).encode(
                x=alt.X("low:Q", title=x_title), x2="high:Q", color=colour, **placed
            )
        )
    columns = [c for c in ("panel", *CHOICES, "head", "quantity") if c in part.columns]
    marks.append(
        base.mark_point(filled=True, size=9 if many else 46, opacity=1).encode(
            x=x,
            color=colour,
            shape=shape,
            tooltip=tips(part, [*columns, "difference", "low", "high", "n", "q", "verdict"]),
            **placed,
        )
    )
    return marks


def draw(
    run: Run,
    choice: Choice,
    style: Style,
    *,
    claim: str | Claim | None = None,
    claims: str | None = None,
    part: int = 0,
) -> Figure:
    """The figure of a run for one claim: by name, of the built-in ones or of those in the file
    `claims`; else the first that the run can judge under more than one choice. The verdict is on
    the whole claim, the differences are those of one `part`, counted from 0.
    """
    known = built_in() if claims is None else load_claims(claims)
    chosen, whole = _chosen(run, choice, claim, known, part)
    table = _selected(whole, choice)
    table, left_out = _few_enough(table, choice)
    shown_part = chosen.parts[part]
    ratio = shown_part.comparison.scale == "ratio"
    frame, rows_title = _frame(table)
    models = _models(run, choice, chosen)
    heads = "the whole layer" if _no_heads(run, table) else HEADS.get(shown_part.scope.heads)
    layers = table["layer"].drop_nulls().unique().sort().to_list()
    interval = frame["low"].null_count() < frame.height
    survived = in_a_line(table)
    agree = _agreement(table, survived)
    statement = stated(chosen.statement, _names(chosen, models, table)).rstrip(".")
    what = _compared(table, shown_part, models)
    bounds = shown_part.rule.bounds or ()
    said = caption(
        run,
        [
            f"Claim {chosen.name}: {statement}",
            f"{' against '.join(reversed(models)) if _over_models(chosen) else join(models)}, "
            f"{layers_said(layers)}, {heads or 'every head by itself'}"
            + (f"; {count(left_out, 'further layer')} not shown" if left_out else ""),
            f"{what}; claimed: {_claimed(shown_part)}"
            + (
                f"; the verdict is on all {len(chosen.parts)} parts of the claim, the figures are "
                f"of part {part} (counted from 0)"
                if len(chosen.parts) > 1
                else ""
            ),
            f"Reference (shaded): {_reference(table)}",
            prompts_said(frame["n"].to_list(), interval=interval),
            f"{agree}. The choices are the same data seen again, not further evidence",
            "Every panel has its own scale" if frame["panel"].n_unique() > 1 else "",
        ],
        models,
    )
    colours = (
        style.theme.filled,
        style.theme.without,
        style.theme.class_colours(["other"])[0],
    )
    words = Words(
        title=style.title or f"The claim {chosen.name} under every choice",
        overview=f"A forest plot: rows are choices of {rows_title or 'normalisation alone'}"
        + (", columns are normalisations" if frame["quantity"].n_unique() > 1 else "")
        + f". Claim: {statement}. {agree}.",
        axes=[
            f"x: {what}, with its 95 % interval; a line at {'1' if ratio else '0'} is no difference"
            + (
                f", dashed lines at {join([f'{b:g}' for b in bounds])} are bounds" if bounds else ""
            ),
            f"y: {rows_title or 'where the claim was judged'}",
        ],
        legend=[
            f"{name}: {SHAPES[name]}, {colour}"
            for name, colour in zip(VERDICTS, colours, strict=False)
        ]
        + ["shaded row: the reference, which is the claim's own choices"],
        value="difference",
        quantity="ratio" if ratio else "difference",
        places={"quantity": "{}"}
        | ({"panel": "{}"} if frame["panel"].n_unique() > 1 else {})
        | {"choice": "{}"}
        | ({"head": "head {}"} if "head" in frame.columns else {}),
        split=["quantity"],
        notes=_notes(table, signed=not bounds),
        no_differences=(
            f"Overturned by {count(survived['verdicts'] - survived['same_verdict'], 'verdict')}: "
            "the choices behind them are under Notes."
            if survived["same_verdict"] < survived["verdicts"]
            else "Nothing overturns the reference's verdict."
        ),
    )
    wide = {1: 420, 2: 560, 3: 620}.get(frame["quantity"].n_unique(), 680)
    width = style.width or wide
    label = max(len(text) for text in frame["choice"]) * style.theme.size * 0.5
    titled = what if frame["quantity"].n_unique() == 1 else None
    return assemble(
        "sensitivity",
        lambda: sensitivity(
            frame,
            bounds=bounds,
            x_title=titled,
            rows_title=rows_title,
            theme=style.theme,
            width=width,
        ),
        frame,
        words,
        caption=said,
        style=style,
        width=width + min(label, 400) + 20,
    )


def _chosen(
    run: Run, choice: Choice, asked: str | Claim | None, known: Sequence[Claim], part: int
) -> tuple[Claim, pl.DataFrame]:
    """The claim, and its table under every choice."""
    if choice.items is not None:
        raise InputError("sensitivity shows a claim, which names its own classes: leave items out")
    if asked is None and part:
        raise InputError(f"part {part!r} of which claim? Name it: claim=…")
    if isinstance(asked, Claim):
        candidates = [asked]
    else:
        candidates = [one for one in known if asked is None or one.name == asked]
    if not candidates:
        raise unknown("claim", asked, [one.name for one in known])
    values = run.values
    present = values.select(pl.col("model").unique()).collect()["model"].to_list()
    pair = None
    if choice.models is not None:
        for model in choice.models:
            if model not in present:
                raise unknown("model", model, models_in_order(run, present))
        values = values.filter(pl.col("model").is_in(list(choice.models)))
        if len(choice.models) == 2:
            pair = (choice.models[0], choice.models[1])
    if choice.prompts is not None:
        values = values.filter(pl.col("prompt").is_in(list(choice.prompts)))
    for one in candidates:
        try:
            table = judged_again(one, values, experiment=run.experiment, pair=pair, part=part)
        except AttnscopeError:
            if asked is not None:
                raise
            continue
        table = table.filter(pl.col("difference").is_not_null())
        if table.select(*CHOICES).n_unique() > 1:
            return one, table
        if asked is not None:
            raise InputError(
                f"claim {one.name!r} has one choice only in this run, so there is nothing to "
                f"survive; {NEEDS}"
            )
    raise InputError(
        f"this run has no claim that can be judged under more than one choice; {NEEDS}"
    )


def _selected(table: pl.DataFrame, choice: Choice) -> pl.DataFrame:
    """The rows to show of what was judged."""
    heads = choice.heads
    if isinstance(heads, dict):
        heads = sorted(set(heads.values()))
    asked: dict[str, Any] = {
        "layer": choice.layers,
        "head": heads,
        "condition": choice.conditions,
        **{name: (getattr(choice, name),) for name in ("queries", "keys", "classes")},
    }
    for column, wanted in asked.items():
        if wanted is None or wanted == (None,):
            continue
        there = table[column].drop_nulls().unique(maintain_order=True).to_list()
        for value in wanted:
            if value not in there:
                raise unknown(column, value, there or ["none: this claim has no such choice"])
        table = table.filter(pl.col(column).is_in(list(wanted)))
    if table.is_empty():
        raise InputError("nothing is left of the claim's choices; leave one of the options out")
    return table


def _few_enough(table: pl.DataFrame, choice: Choice) -> tuple[pl.DataFrame, int]:
    """Fewer layers, evenly spread, where all of them would be too many rows."""
    layers = table["layer"].drop_nulls().unique().sort().to_list()
    rows = table.select("model", "queries", "keys", "classes", "condition").n_unique()
    most = max(2, ROWS // rows)
    if choice.layers is not None or len(layers) <= most:
        return table, 0
    kept = sorted({layers[round(i * (len(layers) - 1) / (most - 1))] for i in range(most)})
    return table.filter(pl.col("layer").is_in(kept)), len(layers) - len(kept)


def _frame(table: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """The data of the figure, and what the names of its rows are made of."""
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
    title = " · ".join(varied)
    if not varied:  # normalisations alone: the places are the rows
        labels, blocks = blocks, ["all"] * len(rows)
    made = table.with_columns(
        pl.Series("panel", blocks, dtype=pl.String()),
        pl.Series("choice", labels, dtype=pl.String()),
        pl.coalesce("normalise", "measure").alias("quantity"),
        pl.when("reference").then(pl.lit("nothing")).otherwise("changed").alias("changed"),
    )
    order = {name: i for i, name in enumerate(dict.fromkeys(blocks))}
    made = made.sort(
        pl.col("panel").replace_strict(order, return_dtype=pl.Int32), maintain_order=True
    )
    columns = ["panel", "choice", "quantity", "model", "layer", "head", *CHOICES]
    columns += ["kind", "count", "position", "against", "scale", "difference", "low", "high", "n"]
    columns += ["q", "verdict", "changed", "reference", "same_sign", "same_verdict"]
    always = {"difference", "low", "high", "q", "same_sign", "same_verdict"}
    kept = [c for c in columns if c in always or made[c].null_count() < made.height]
    return shown(made.select(kept)), title


def _label(row: dict[str, Any], name: str) -> str:
    """A choice in a row's name; of a pair of conditions the second, of which the row is."""
    if name != "condition" or row["kind"] is None:
        return str(row[name])
    where = f", {row['position']}" if row["position"] is not None else ""
    name = row["condition"].removeprefix(f"{row['against']}, ")
    return f"{name} ({row['count']} × {row['kind']}{where})"


def _models(run: Run, choice: Choice, claim: Claim) -> list[str]:
    if _over_models(claim) and claim.parts[0].comparison.pair:
        return [str(side) for side in claim.parts[0].comparison.pair]
    if choice.models is not None:
        return list(choice.models)
    asked = list(run.experiment.models)
    present = run.values.select(pl.col("model").unique()).collect()["model"].to_list()
    return [m for m in asked if m in present] or models_in_order(run, present)


def _over_models(claim: Claim) -> bool:
    return any(part.comparison.over == "model" for part in claim.parts)


def _names(claim: Claim, models: Sequence[str], table: pl.DataFrame) -> dict[str, Any]:
    """What the statement's places are filled with, as far as it is the same for all rows."""
    if _over_models(claim):
        return {"a": models[0], "b": models[1]}
    if any(part.comparison.over == "condition" for part in claim.parts):
        return {"a": join(_against(table), "or"), "b": "as the row says"}
    return {}


def _against(table: pl.DataFrame) -> list[str]:
    return table["against"].unique(maintain_order=True).to_list()


def _agreement(table: pl.DataFrame, survived: dict[str, Any]) -> str:
    """How many verdicts are the reference's, and where all of them are."""
    whole, places = survived["survives"], survived["places"]
    kinds = [name for name in ("model", "layer") if table[name].drop_nulls().n_unique() > 1]
    word = {"model": "models", "layer": "layers"}.get("".join(kinds), "models and layers")
    said = (
        f"{survived['same_verdict']} of {count(survived['verdicts'], 'verdict')} "
        f"({count(survived['choices'], 'choice')}) are the reference's ({survived['verdict']})"
    )
    if survived["verdict"] == "undetermined":
        return f"{said}, which decides nothing by itself"
    said += "; the verdict "
    if places == 1:
        return said + ("survives every choice" if whole else "does not survive every choice")
    return f"{said}survives every choice in {whole} of {places} {word}"


def _no_heads(run: Run, table: pl.DataFrame) -> bool:
    of_measure = run.values.filter(pl.col("measure") == table["measure"][0])
    return bool(of_measure.select(pl.col("head").is_null().all()).collect().item())


def _compared(table: pl.DataFrame, part: Part, models: Sequence[str]) -> str:
    """What the difference, or the ratio, is of."""
    item = table["item"][0]
    what = table["measure"][0] + ("" if item is None else f" on {item}")
    sign, over = "over" if part.comparison.scale == "ratio" else "minus", part.comparison.over
    first = join(_against(table), "or")
    if over == "model":
        return f"{what}: {models[1]} {sign} {first}"
    of = "that of " if over in ("condition", "layer") else ""
    return f"{what} {sign} {of}{first}"


def _claimed(part: Part) -> str:
    if part.rule.bounds is not None:
        return f"within {part.rule.bounds[0]:g} to {part.rule.bounds[1]:g}"
    return f"{part.direction} than {1 if part.comparison.scale == 'ratio' else 0}"


def _reference(table: pl.DataFrame) -> str:
    own = table.filter("reference")
    if own.is_empty():
        same = [f"{name}: {table[name][0]}" for name in CHOICES if table[name].n_unique() == 1]
        return f"not among the rows shown, which all have {'; '.join(same) or 'other choices'}"
    row = own.row(0, named=True)
    said = [f"{name}: {row[name]}" for name in CHOICES if name != "normalise" and row[name]]
    how = f"normalised: {row['normalise']}" if row["normalise"] else "not normalised further"
    return "; ".join([*said, how])


def _notes(table: pl.DataFrame, *, signed: bool) -> list[str]:
    """For every place: how many choices agree, and the fewest that overturn the verdict."""
    once = table.unique(["model", "layer", *CHOICES], keep="first", maintain_order=True)
    notes = []
    for row in survival(once.with_columns(pl.lit(None, dtype=pl.Int64()).alias("head"))).to_dicts():
        where = [row["model"], None if row["layer"] is None else f"layer {row['layer']}"]
        place = ", ".join(one for one in where if one is not None)
        if row["verdict"] is None:
            notes.append(f"{place}: the claim's own choices have no verdict here")
            continue
        sign = f", {row['same_sign']} its sign" if signed else ""
        by = f"; overturned by {'; by '.join(row['overturned_by'])}" if row["overturned_by"] else ""
        notes.append(
            f"{place}: {row['verdict']}; {row['same_verdict']} of "
            f"{count(row['choices'], 'choice')} have this verdict{sign}{by}"
        )
    return notes
