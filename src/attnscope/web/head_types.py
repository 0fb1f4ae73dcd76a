"""What kind of head every head of a model is, as the page shows it: the rules of
`stats.head_kinds` on texts of their own, not on the prompt that is on screen."""

from typing import Any

from attnscope.figures.head_types import COLOURS
from attnscope.stats.head_types import KINDS, NONE, head_kinds, summary
from attnscope.web.jobs import Job
from attnscope.web.measuring import between_layers
from attnscope.web.model_cache import Loaded

PROMPTS = 8
"""Texts for each score: enough for an interval."""


def kinds_of(loaded: Loaded, job: Job, *, needles: bool) -> dict[str, Any]:
    """Every kind, when a head is of it, and how many are; and the kinds of every head."""
    from attnscope.experiment.head_scores import head_scores

    known = loaded.kinds.get(needles)
    if known is not None:
        return known
    with between_layers(loaded.model, job.check):
        scores = head_scores(
            loaded.model, loaded.tokenizer, prompts=PROMPTS, needles=needles, progress=job.say
        )
    table = head_kinds(scores)
    found = {row["kind"]: row for row in summary(table).to_dicts()}
    tried = [kind for kind in KINDS if needles or kind.name != "retrieval"]
    names = [*(kind.name for kind in KINDS), NONE]
    colours = dict(zip(names, COLOURS, strict=True))
    result = {
        "prompts": PROMPTS,
        "needles": needles,
        "kinds": [
            {
                "name": kind.name,
                "rule": f"{kind.about} > {kind.threshold:g}",
                "colour": colours[kind.name],
                "heads": found[kind.name]["certain"],
            }
            for kind in tried
        ],
        "none": {"name": NONE, "colour": colours[NONE]},
        "heads": [
            {
                "layer": row["layer"],
                "head": row["head"],
                "kind": row["kind"],
                "kinds": row["kinds"].split(", ") if row["kinds"] else [],
                "class": row["class"],
                "scores": {kind.name: row[kind.score] for kind in tried},
            }
            for row in table.to_dicts()
        ],
    }
    loaded.kinds[needles] = result
    return result
