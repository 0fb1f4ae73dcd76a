"""The attention to each place of a picture, over the picture."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown
from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.numbers import rounded
from attnscope.figures.options import Option
from attnscope.figures.profiles import select_profiles
from attnscope.figures.select import AbsentError, Selection, thin
from attnscope.figures.shapes.picture_map import PictureMap
from attnscope.vision import ImageTokens, View
from attnscope.vision.pictures import blank_picture, decode

PANELS = 4
"""Largest number of maps in a row by default."""
FIELD = "box"
"""The metadata column with the box of what a question is about."""
BEST = "Shown are the heads with the largest pointing-game score in the other prompts"
SIDE = 480
"""Largest side in pixels of the picture in a figure."""
NEEDS = (
    "an experiment on prompts with pictures, with `profile` among its measures, has the numbers: "
    "docs/pictures.md"
)


def _numbers(request: Request, figure: Figure) -> Numbers:
    known = request.run.image_tokens
    if not known:
        raise AbsentError("this run has no pictures whose tokens have known places", missing=[])
    choice = request.choice
    model = (choice.models or [next(iter(request.run.experiment.models))])[0]
    prompt = min(choice.prompts or [row["prompt"] for row in known])
    condition = (choice.conditions or [request.run.experiment.base])[0]
    other = request.options["relative"]
    chosen = replace(choice, models=[model], prompts=[prompt])
    request = replace(request, choice=chosen)
    conditions = [condition, *([other] if other else [])]
    selection, _ = select_profiles(request, conditions, value="received", all_of="queries")
    best = _best(request, model, prompt, condition)
    shown = _shown(selection, request.options["maps"], best)
    picture = [_picture(known, model, prompt, one, request.options["image"]) for one in conditions]
    first = _tokens(picture[0])
    maps = _maps(selection.frame, first, condition, shown)
    if other:
        if picture[1]["views"] != picture[0]["views"]:
            raise InputError(
                f"the pictures of the conditions {condition!r} and {other!r} have different grids "
                "of tokens, so their maps cannot be compared; choose a condition with the same "
                "picture",
                code="other-grid",
                conditions=conditions,
            )
        maps = _ratio(maps, _maps(selection.frame, _tokens(picture[1]), other, shown))
    url, why = _background(request.run.path, picture[0])
    heads = selection.frame["head"].n_unique()
    head = "one map for each head" if "head" in shown else f"mean over heads ({heads} in the run)"
    y = f"Attention relative to {other}" if other else "Share of the attention"
    settings: dict[str, Any] = {"picture": url, "size": (first.height, first.width), "y": y}
    settings["box"] = box = _box(request, prompt, first)
    if other:
        settings |= {"rule": 1.0, "rule_means": "no change", "from_zero": False}
    return Numbers(
        data=rounded(maps.select("queries", "panel", *_PLACE, "value")),
        models=[model],
        settings=settings,
        words={"y": y.lower(), "means": _MEANS + (f", {_RELATIVE} {other}" if other else "")},
        sentences=[
            f"model {model}, {_layers(shown)}, {head}",
            f"queries: {', '.join(selection.queries)}; condition: {condition}",
            f"n = 1: prompt {prompt}, picture {picture[0]['image']}",
            _question(selection.frame.filter(condition=condition), known),
            "Colours show the mean over counted queries; the maps of one figure share their scale",
            "The outline is the box of what the question is about" if box else "",
            BEST if request.options["maps"] == "pointing" else "",
            "The layout of the tokens is a guess: a square" if picture[0]["assumed"] else "",
            why,
        ],
    )


_MEANS = "the share of a query's attention that goes to the tokens there"
_RELATIVE = "divided by the same share under the condition"
_PLACE = ["row", "column", "left", "top", "right", "bottom"]


def _best(request: Request, model: str, prompt: int, condition: str) -> pl.DataFrame:
    """Layer and head of the largest pointing-game scores in the other prompts."""
    if request.options["maps"] != "pointing":
        return pl.DataFrame()
    rows = request.run.values.filter(pl.col("prompt") != prompt, pl.col("value").is_not_null())
    queries = request.choice.queries or request.run.experiment.queries[0]
    where = {"model": model, "condition": condition, "queries": queries}
    scores = rows.filter(measure="pointing", **where).collect()
    if scores.is_empty():
        raise AbsentError(
            "maps=pointing shows the heads with the largest pointing scores, and this run has "
            "none; measure `grounding`",
            missing=["pointing"],
        )
    means = scores.group_by("layer", "head").agg(pl.col("value").mean())
    order = means.sort(["value", "layer", "head"], descending=[True, False, False])
    return order.head(PANELS).select("layer", "head").sort("layer", "head")


def _box(request: Request, prompt: int, picture: ImageTokens) -> list[float]:
    """Left, top, right and bottom of what the question is about, in pixels; empty for none."""
    prompts = request.run.prompts
    if FIELD not in prompts.columns:
        return []
    (value,) = prompts.filter(prompt=prompt)[FIELD].to_list() or [None]
    edges = json.loads(value) if isinstance(value, str) else value
    if edges is None:
        return []
    return [
        edge * size for edge, size in zip(edges, (picture.width, picture.height) * 2, strict=True)
    ]


def _shown(selection: Selection, maps: str, best: pl.DataFrame) -> pl.DataFrame:
    """The panels of a row: layers (mean over heads), heads of the first layer, or the best."""
    frame = selection.frame
    if maps == "pointing":
        return best.with_columns(panel=pl.format("layer {}, head {}", "layer", "head"))
    if maps == "layers":
        return pl.DataFrame({"layer": thin(selection.layers, PANELS)}).with_columns(
            panel=pl.format("layer {}", "layer")
        )
    heads = frame.filter(layer=selection.layers[0]).select("layer", "head").unique().sort("head")
    return heads.head(2 * PANELS).with_columns(
        panel=pl.format("layer {}, head {}", "layer", "head")
    )


def _picture(
    known: Sequence[Mapping[str, Any]], model: str, prompt: int, condition: str, image: int
) -> Mapping[str, Any]:
    rows = [
        row
        for row in known
        if (row["model"], row["prompt"], row["condition"]) == (model, prompt, condition)
    ]
    for row in rows:
        if row["image"] == image:
            return row
    if not rows:
        raise AbsentError(
            f"prompt {prompt} of model {model!r} has no picture under the condition {condition!r}",
            missing=[],
        )
    raise unknown("image", image, [row["image"] for row in rows])


def _tokens(picture: Mapping[str, Any]) -> ImageTokens:
    """The tokens of a picture as a run stores them."""
    views = [
        View(rows, columns, None if box is None else tuple(box), newline)
        for rows, columns, box, newline in picture["views"]
    ]
    return ImageTokens(
        sequence=0,
        positions=np.array(picture["positions"], dtype=np.int64),
        views=tuple(views),
        height=picture["height"],
        width=picture["width"],
        assumed=picture["assumed"],
    )


def _maps(
    frame: pl.DataFrame, tokens: ImageTokens, condition: str, shown: pl.DataFrame
) -> pl.DataFrame:
    """A row for each cell of each map: the share of the attention to all tokens of the prompt."""
    of = [column for column in ("layer", "head") if column in shown.columns]
    frame = frame.filter(condition=condition).join(shown, on=of, how="inner")
    share = pl.col("value") / pl.col("value").sum().over("queries", "layer", "head")
    means = (
        frame.with_columns(share)
        .group_by("queries", "panel", "position", maintain_order=True)
        .agg(pl.col("value").mean())
    )
    parts = []
    for (queries, panel), part in means.group_by("queries", "panel", maintain_order=True):
        weights = np.full(int(part["position"].max() or 0) + 1, np.nan)  # type: ignore[arg-type]
        weights[part["position"].to_numpy()] = part["value"].to_numpy()
        cells = _cells(tokens, tokens.to_map(weights))
        parts.append(cells.with_columns(queries=pl.lit(queries), panel=pl.lit(panel)))
    return pl.concat(parts)


def _cells(tokens: ImageTokens, values: NDArray[np.float64]) -> pl.DataFrame:
    """The cells of a map, with their places in pixels of the picture."""
    rows, columns, (left, top, right, bottom) = tokens.grid
    x = np.linspace(left, right, columns + 1) * tokens.width
    y = np.linspace(top, bottom, rows + 1) * tokens.height
    row, column = (index.ravel() for index in np.indices((rows, columns)))
    return pl.DataFrame(
        {
            "row": row,
            "column": column,
            "left": x[column],
            "top": y[row],
            "right": x[column + 1],
            "bottom": y[row + 1],
            "value": values.ravel(),
        }
    )


def _ratio(maps: pl.DataFrame, others: pl.DataFrame) -> pl.DataFrame:
    """Each cell divided by that of the other condition."""
    at = ["queries", "panel", "row", "column"]
    other = others.select(*at, other="value")
    ratio = pl.when(pl.col("other") > 0).then(pl.col("value") / pl.col("other"))
    return maps.join(other, on=at, how="left", maintain_order="left").with_columns(value=ratio)


def _background(folder: Path, picture: Mapping[str, Any]) -> tuple[str, str]:
    """The picture as a `data:` URL, made smaller; or why it is not shown."""
    try:
        image = decode((folder / picture["file"]).read_bytes(), picture["file"])
    except (OSError, InputError) as error:
        return "", f"The picture is not shown: {type(error).__name__}"
    if picture["blank"]:
        image = blank_picture(image)
    image.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}", ""


def _layers(shown: pl.DataFrame) -> str:
    numbers = ", ".join(map(str, shown["layer"].unique().sort()))
    return f"{'layers' if ',' in numbers else 'layer'} {numbers}"


def _question(frame: pl.DataFrame, known: Sequence[Mapping[str, Any]]) -> str:
    """The words of the prompt, without the tokens of its pictures."""
    cell = frame.select("model", "prompt", "condition").row(0, named=True)
    pictures = [row for row in known if all(row[name] == value for name, value in cell.items())]
    positions = {position for row in pictures for position in row["positions"]}
    one = frame.select("position", "token").unique().sort("position")
    words = one.filter(pl.col("position").is_in(list(positions)).not_())["token"]
    text = " ".join("".join(token or "" for token in words).split())
    return f"prompt: “{text[:120]}{'…' if len(text) > 120 else ''}”"


FIGURE = Figure(
    name="image-map",
    shows="attention to each place of a picture, over the picture",
    by=["queries", "panel", "row", "column"],
    shape=PictureMap(y="Share of the attention"),
    numbers=_numbers,
    differences="The figure shows one prompt, so nothing is compared.",
    title="Where in the picture the attention goes",
    what="Cells are places of the picture: {means}",
    quantity="{y}",
    needs=NEEDS,
    options={
        "image": Option(help="number of the picture in the prompt, from 1", default=1),
        "maps": Option(
            help="a map per layer (layers, default), per head of the first layer (heads), or for "
            "the heads with the largest pointing scores in the other prompts (pointing)",
            known=("layers", "heads", "pointing"),
        ),
        "relative": Option(help="a condition, such as a neutral question, to divide the maps by"),
    },
)
