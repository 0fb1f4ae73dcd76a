"""A view as something to send or to keep: plain numbers, a table, an experiment, one HTML file."""

import csv as tables
import io
import math
from functools import cache
from html import escape
from typing import Any

import numpy as np
import vl_convert
from numpy.typing import NDArray

from attnscope.capture.html_page import Gaze, drawn
from attnscope.errors import unknown
from attnscope.figures.text_format import BUNDLED, no_formula
from attnscope.spec.experiment import Experiment
from attnscope.spec.experiment_yaml import written
from attnscope.tokens.class_colours import class_colours
from attnscope.tokens.visible import visible_text
from attnscope.web.views import View


def plain(values: NDArray[np.float32]) -> list[float | None]:
    """Numbers as JSON has them, seven digits each; null for what is undefined."""
    return [number(v) for v in values.tolist()]


def number(value: float) -> float | None:
    """One of them."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def binned(curve: dict[str, Any]) -> dict[str, Any]:
    """A curve, bin by bin."""
    told = {name: plain(curve[name].astype(np.float32)) for name in ("mean", "low", "high")}
    return {"size": curve["size"], "start": curve["start"].tolist(), **told}


_TOLD = (
    *("prompt", "read", "classes", "names", "layers", "deep", "queries"),
    *("twins", "filler", "likely"),
)


def facts(view: View) -> dict[str, Any]:
    """Everything about a view that does not change with layer and head."""
    return {
        "id": view.id,
        "model": view.model,
        "note": f"{view.model}: {BUNDLED}" if view.bundled else "",
        "tokens": [visible_text(token) for token in view.tokens],
        "colours": class_colours(view.names),
        "heads": [len(row) for row in view.average],
        "maps": view.maps(),
        **{name: getattr(view, name) for name in _TOLD},
    }


def csv(view: View, of: str, queries: str, layer: int | None, head: int | None) -> str:
    """One row per token: what it says, its class, and the number that shades it."""
    values = view.shade(of, queries, layer, head)
    out = io.StringIO()
    rows = tables.writer(out, lineterminator="\n")
    rows.writerow(["position", "token", "class", "model", "layer", "head", "queries", of])
    where = ["mean" if layer is None else layer, "mean" if head is None else head]
    for n, value in enumerate(plain(values)):
        name = view.names[view.classes[n]] if view.classes[n] >= 0 else ""
        rows.writerow(
            [
                n,
                no_formula(view.tokens[n]),
                name,
                view.model,
                *where,
                queries,
                "" if value is None else value,
            ]
        )
    return out.getvalue()


def experiment(view: View, layer: int | None = None, head: int | None = None) -> str:
    """What was measured here, asked of many prompts; in one layer and head, where they are
    chosen."""
    asked = view.asked
    conditions: dict[str, Any] = {"base": {}}
    measures = ["mass", "entropy", "first_token"]
    if asked.system is not None:
        conditions["system"] = {"system": asked.system}
    filler = asked.filler
    if filler is not None and filler.count:
        where = filler.model_dump(include={"position", "by"})
        insert = filler.model_dump(exclude={"position", "by"}, exclude_none=True)
        conditions[filler.kind] = {"insert": insert, **where}
        measures += ["lambda", "uniform_slope", "uniformity"]
    chosen = {"layers": layer, "heads": head}
    repeated = Experiment.model_validate(
        {
            "name": "from-the-page",
            "models": [view.model],
            "prompts": {"source": "math", "count": 64},
            "conditions": conditions,
            "chat": asked.chat or asked.system is not None,
            "queries": ["all", "last"],
            "measures": measures,
        }
        | {name: [number] for name, number in chosen.items() if number is not None}
    )
    return (
        "# What was looked at on the page, asked of many prompts:\n"
        "#   attnscope run experiment.yaml && attnscope report runs/from-the-page\n"
        "# The prompts are the bundled word problems; for your own, a JSONL file with a question\n"
        "# in every line:\n"
        "#   prompts: {source: file, path: questions.jsonl}\n" + written(repeated)
    )


def page(view: View, queries: str) -> str:
    """The text with its shades for every layer and head, in one file that asks nobody."""
    if queries not in view.received:
        raise unknown("choice of queries", queries, view.received)
    heads = [rows.astype(np.float64) for rows in view.received[queries]]
    title = f"{view.model}: attention received, queries {queries!r}"
    if view.bundled:
        title += f" ({BUNDLED})"
    body = drawn(title, view.tokens[: view.read], view.layers, heads, _gaze(view)).html
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "script-src 'unsafe-inline'; style-src 'unsafe-inline'\">"
        f"<title>{escape(view.model)}: where attention goes</title>"
        "<style>:root{color-scheme:light dark}body{margin:1.5rem auto;padding:0 1rem;"
        "max-width:60rem}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _gaze(view: View) -> Gaze | None:
    """What a token looks at, from what was kept of the view."""
    scope = view.scope
    if scope is None:
        return None
    return lambda layer, n: scope.row(layer, n).double().mean(0).cpu().numpy()


@cache
def vega() -> str:
    """Vega, Vega-Lite and their embedding, as one script."""
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
