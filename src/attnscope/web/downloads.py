"""A view as JSON, and as files to download: CSV, an experiment in YAML, one HTML page."""

import csv as tables
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from attnscope.errors import unknown
from attnscope.figures.page import templates
from attnscope.figures.text_format import BUNDLED, no_formula
from attnscope.look.html_page import RowProvider, render_page
from attnscope.spec.experiment import Experiment
from attnscope.spec.experiment_yaml import experiment_to_yaml
from attnscope.tokens.class_colours import class_colours
from attnscope.tokens.visible import visible_text
from attnscope.web.views import View

TEMPLATES = Path(__file__).parent / "templates"


def plain(values: NDArray[np.float32]) -> list[float | None]:
    """Values as JSON numbers of seven digits; None for nan and infinity."""
    return [number(v) for v in values.tolist()]


def number(value: float) -> float | None:
    """One value as a JSON number of seven digits; None for nan and infinity."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def binned(curve: dict[str, Any]) -> dict[str, Any]:
    """The bins of a curve as JSON."""
    values = {name: plain(curve[name].astype(np.float32)) for name in ("mean", "low", "high")}
    return {"size": curve["size"], "start": curve["start"].tolist(), **values}


_SENT = (
    *("prompt", "read", "classes", "names", "layers", "layer_count", "queries"),
    *("aligned_positions", "filler", "next_tokens"),
)


def metadata(view: View) -> dict[str, Any]:
    """The properties of a view that do not depend on layer and head."""
    return {
        "id": view.id,
        "model": view.model,
        "note": f"{view.model}: {BUNDLED}" if view.bundled else "",
        "tokens": [visible_text(token) for token in view.tokens],
        "colours": class_colours(view.names),
        "heads": [len(row) for row in view.average],
        "maps": view.maps(),
        **{name: getattr(view, name) for name in _SENT},
    }


def csv(view: View, of: str, queries: str, layer: int | None, head: int | None) -> str:
    """One row per token: its text, its class, and the value that shades it."""
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
    """An experiment in YAML that measures the same on many prompts, layer and head included."""
    request = view.request
    conditions: dict[str, Any] = {"base": {}}
    measures = ["mass", "entropy", "first_token"]
    if request.system is not None:
        conditions["system"] = {"system": request.system}
    filler = request.filler
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
            "chat": request.chat or request.system is not None,
            "queries": ["all", "last"],
            "measures": measures,
        }
        | {name: [number] for name, number in chosen.items() if number is not None}
    )
    return (
        "# The measurement of the live page, on many prompts:\n"
        "#   attnscope run experiment.yaml && attnscope report runs/from-the-page\n"
        "# The prompts are the bundled word problems. To use your own, give a JSONL file with a\n"
        "# question on every line:\n"
        "#   prompts: {source: file, path: questions.jsonl}\n" + experiment_to_yaml(repeated)
    )


def page(view: View, queries: str) -> str:
    """One HTML file, without external resources, that shades the text for every layer and head."""
    if queries not in view.received:
        raise unknown("choice of queries", queries, view.received)
    heads = [rows.astype(np.float64) for rows in view.received[queries]]
    title = f"{view.model}: attention received, queries {queries!r}"
    if view.bundled:
        title += f" ({BUNDLED})"
    shown = render_page(title, view.tokens[: view.read], view.layers, heads, _rows(view))
    template = templates(TEMPLATES).get_template("view.html")
    return template.render(model=view.model, text=Markup(shown.html))


def _rows(view: View) -> RowProvider | None:
    """The attention rows of a view, mean over heads; None if it keeps no queries and keys."""
    scope = view.scope
    if scope is None:
        return None
    return lambda layer, n: scope.row(layer, n).double().mean(0).cpu().numpy()
