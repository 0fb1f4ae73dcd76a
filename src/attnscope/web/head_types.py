"""The type of every head of a model, by the rules of `figures.head_types`.

Heads are classified on generated texts, not on the prompt of a view.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from attnscope.figures import head_types
from attnscope.figures.head_types import HEAD_TYPES, NONE, summary
from attnscope.figures.tables.heads import TYPES
from attnscope.recipes.heads import head_experiments, head_scores
from attnscope.run.store import open_run
from attnscope.web.jobs import Job, StoppedError
from attnscope.web.measuring import between_layers
from attnscope.web.model_cache import Loaded

PROMPTS = 8
"""Texts per score: enough for a confidence interval."""


class _Cancelled(BaseException):
    """Ends a run at once; an ordinary error would be stored as the failure of a batch."""


def classify_heads(loaded: Loaded, job: Job, *, needles: bool) -> dict[str, Any]:
    """Every head type with its rule and its number of heads, and the types of every head."""
    cached = loaded.head_types.get(needles)
    if cached is not None:
        return cached
    try:
        scores = _scores(loaded, job, needles=needles)
    except _Cancelled as error:
        raise StoppedError(str(error)) from error
    table = head_types.classify_heads(scores)
    rows = {row["kind"]: row for row in summary(table).to_dicts()}
    tested = [each for each in HEAD_TYPES if needles or each.name != "retrieval"]
    result = {
        "prompts": PROMPTS,
        "needles": needles,
        "types": [
            {
                "name": each.name,
                "rule": f"{each.about} > {each.threshold:g}",
                "colour": TYPES[each.name],
                "heads": rows[each.name]["certain"],
            }
            for each in tested
        ],
        "none": {"name": NONE, "colour": TYPES[NONE]},
        "heads": [
            {
                "layer": row["layer"],
                "head": row["head"],
                "type": row["kind"],
                "types": row["kinds"].split(", ") if row["kinds"] else [],
                "class": row["class"],
                "scores": {each.name: row[each.score] for each in tested},
            }
            for row in table.to_dicts()
        ],
    }
    loaded.head_types[needles] = result
    return result


def _scores(loaded: Loaded, job: Job, *, needles: bool) -> pl.DataFrame:
    """Run the recipes that score heads on the loaded model, into a temporary folder."""
    from attnscope.experiment.execute import run
    from attnscope.experiment.local import local

    def check() -> None:
        try:
            job.check()
        except StoppedError as error:
            raise _Cancelled(str(error)) from error

    experiments = head_experiments(loaded.source, prompts=PROMPTS, needles=needles)
    runs = {}
    with TemporaryDirectory(prefix="attnscope-") as folder:
        for name, experiment in experiments.items():
            job.report(f"{PROMPTS} prompts of the recipe {name}")
            with between_layers(loaded.model, check):
                run(experiment, Path(folder) / name, executor=partial(local, model=loaded.model))
            runs[name] = open_run(Path(folder) / name)
        return head_scores(runs)
