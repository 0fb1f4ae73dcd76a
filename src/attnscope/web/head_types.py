"""The type of every head of a model, by the rules of `stats.head_types`.

Heads are classified on generated texts, not on the prompt of a view.
"""

from typing import Any

from attnscope.figures.head_types import COLOURS
from attnscope.stats import head_types
from attnscope.stats.head_types import HEAD_TYPES, NONE, summary
from attnscope.web.jobs import Job
from attnscope.web.measuring import between_layers
from attnscope.web.model_cache import Loaded

PROMPTS = 8
"""Texts per score: enough for a confidence interval."""


def classify_heads(loaded: Loaded, job: Job, *, needles: bool) -> dict[str, Any]:
    """Every head type with its rule and its number of heads, and the types of every head."""
    from attnscope.experiment.head_scores import head_scores

    cached = loaded.head_types.get(needles)
    if cached is not None:
        return cached
    with between_layers(loaded.model, job.check):
        scores = head_scores(
            loaded.model, loaded.tokenizer, prompts=PROMPTS, needles=needles, progress=job.report
        )
    table = head_types.classify_heads(scores)
    rows = {row["kind"]: row for row in summary(table).to_dicts()}
    tested = [each for each in HEAD_TYPES if needles or each.name != "retrieval"]
    names = [*(each.name for each in HEAD_TYPES), NONE]
    colours = dict(zip(names, COLOURS, strict=True))
    result = {
        "prompts": PROMPTS,
        "needles": needles,
        "types": [
            {
                "name": each.name,
                "rule": f"{each.about} > {each.threshold:g}",
                "colour": colours[each.name],
                "heads": rows[each.name]["certain"],
            }
            for each in tested
        ],
        "none": {"name": NONE, "colour": colours[NONE]},
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
