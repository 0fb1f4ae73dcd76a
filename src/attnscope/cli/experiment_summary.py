"""What an experiment asks for, in words: for `run --check`, and above every result.

This module must not know plans or models.
"""

from typing import Any

from attnscope.spec.experiment import Experiment
from attnscope.spec.generate import Generate


def choices(experiment: Experiment) -> list[str]:
    """What the numbers are of: every choice that a reader must know, a line each."""
    profiles = experiment.profiles
    lines = {
        "models": ", ".join(f"{label} ({name})" for label, name in experiment.models.items()),
        "prompts": _prompts(experiment),
        "conditions": "; ".join(_condition(experiment, name) for name in experiment.conditions),
        "layers": "all" if experiment.layers == "all" else _joined(experiment.layers),
        "heads": f"{_heads(experiment.heads)}, each stored by itself; readers combine them by "
        f"{experiment.combine}",
        "queries": _joined(experiment.queries),
        "keys": _joined(experiment.keys),
        "classes": "; ".join(
            f"{label} ({', '.join(_judged(one) for one in kinds)})"
            for label, kinds in experiment.classes.items()
        ),
        "measures": _joined(experiment.measures),
        "shown as": experiment.normalise,
    }
    if experiment.generate is not None:
        lines["answers"] = _answers(experiment.generate)
    if "profile" in experiment.measures:
        lines["profiles"] = f"layers {_told(profiles.layers)}; heads {_heads(profiles.heads)}"
    width = max(map(len, lines))
    return [f"{what.ljust(width)}  {said}" for what, said in lines.items()]


def _heads(heads: Any) -> str:
    if not isinstance(heads, dict):
        return _told(heads)
    return "; ".join(f"{_told(some)} of {label}" for label, some in heads.items())


def _told(numbers: Any) -> str:
    return "all" if numbers == "all" else _joined(numbers)


def _joined(things: Any) -> str:
    return ", ".join(map(str, things))


def _prompts(experiment: Experiment) -> str:
    options = experiment.prompts.model_dump(exclude={"source", "count"}, exclude_none=True)
    told = ", ".join(f"{key} {value}" for key, value in options.items() if value != {})
    count = experiment.prompts.count or "all"
    chat = "in the chat template" if experiment.chat else "as plain text"
    if experiment.bos:
        chat += ", begun with the begin-of-sequence token"
    return f"{count} {experiment.prompts.source} ({told}), {chat}"


def _answers(generate: Generate) -> str:
    how = "the likeliest token each time"
    if generate.sample:
        how = f"sampled, temperature {generate.temperature}, top-p {generate.top_p}, "
        how += f"seed {generate.seed}" if generate.repeatable else "no seed: NOT repeatable"
    return f"up to {generate.max_new_tokens} tokens, {how}"


def _condition(experiment: Experiment, name: str) -> str:
    condition = experiment.conditions[name]
    if condition.kind is None:
        return f"{name} (the prompt as it is)"
    if condition.insert is None:
        told = condition.model_dump(include=set(condition.rewrites), exclude_none=True)
        return f"{name} ({', '.join(f'{what}: {said}' for what, said in told.items())})"
    what = condition.insert
    unit = f" {what.filler(0).repeated!r}" if what.kind in ("repeat", "word") else ""
    return f"{name} ({what.count} × {what.kind}{unit}, {condition.position}, by {condition.by})"


def _judged(one: Any) -> str:
    return f"{one.name} by fraction" if one.judgement == "fraction" else one.name
