"""A summary of an experiment as text: for `run --check` and above every result."""

from typing import Any

from attnscope.spec.experiment import Experiment
from attnscope.spec.generate import Generate


def choices(experiment: Experiment) -> list[str]:
    """The choices of an experiment that its numbers depend on, one line each."""
    profiles = experiment.profiles
    lines = {
        "models": ", ".join(f"{label} ({name})" for label, name in experiment.models.items()),
        "prompts": _prompts(experiment),
        "conditions": "; ".join(_condition(experiment, name) for name in experiment.conditions),
        "layers": "all" if experiment.layers == "all" else _joined(experiment.layers),
        "heads": f"{_heads(experiment.heads)}, stored separately; combined by {experiment.combine}",
        "queries": _joined(experiment.queries),
        "keys": _joined(experiment.keys),
        "classes": "; ".join(
            f"{label} ({', '.join(map(_class_set, sets))})"
            for label, sets in experiment.classes.items()
        ),
        "measures": _joined(experiment.measures),
    }
    if "mass" in experiment.measures:
        lines["shown as"] = experiment.normalise
    if experiment.generate is not None:
        lines["completions"] = _completions(experiment.generate)
    if "profile" in experiment.measures:
        lines["profiles"] = f"layers {_numbers(profiles.layers)}; heads {_heads(profiles.heads)}"
    width = max(map(len, lines))
    return [f"{name.ljust(width)}  {text}" for name, text in lines.items()]


def _heads(heads: Any) -> str:
    if not isinstance(heads, dict):
        return _numbers(heads)
    return "; ".join(f"{_numbers(some)} of {label}" for label, some in heads.items())


def _numbers(numbers: Any) -> str:
    return "all" if numbers == "all" else _joined(numbers)


def _joined(things: Any) -> str:
    return ", ".join(map(str, things))


def _prompts(experiment: Experiment) -> str:
    hidden = {"source", "count", "records"}
    if getattr(experiment.prompts, "image", None) == "image":
        hidden.add("image")  # the default
    options = experiment.prompts.model_dump(exclude=hidden, exclude_none=True)
    settings = ", ".join(f"{key} {value}" for key, value in options.items() if value != {})
    records = getattr(experiment.prompts, "records", ())
    count = experiment.prompts.count or len(records) or "all"
    chat = "with the chat template" if experiment.chat else "as plain text"
    if experiment.bos:
        chat += ", with the begin-of-sequence token"
    return f"{experiment.prompts.source}, {count} prompts ({settings}), {chat}"


def _completions(generate: Generate) -> str:
    how = "greedy decoding"
    if generate.sample:
        how = f"sampled, temperature {generate.temperature}, top-p {generate.top_p}, "
        how += f"seed {generate.seed}" if generate.repeatable else "no seed: NOT reproducible"
    return f"up to {generate.max_new_tokens} tokens, {how}"


def _condition(experiment: Experiment, name: str) -> str:
    condition = experiment.conditions[name]
    if condition.kind is None:
        return f"{name} (the unchanged prompt)"
    if condition.insert is None:
        changes = condition.model_dump(include=set(condition.rewrites), exclude_none=True)
        return f"{name} ({', '.join(f'{key}: {value}' for key, value in changes.items())})"
    what = condition.insert
    unit = f" {what.filler(0).repeated!r}" if what.kind in ("repeat", "word") else ""
    return f"{name} ({what.count} × {what.kind}{unit}, {condition.position}, by {condition.by})"


def _class_set(one: Any) -> str:
    return f"{one.name} by fraction" if one.judgement == "fraction" else one.name
