"""Whether cells belong together: what a run says of where it was measured, compared."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeWarning, InputError
from attnscope.paths import is_remote, read_file
from attnscope.run.layout import LARGEST

if TYPE_CHECKING:
    from attnscope.spec.experiment import Experiment

_OTHER_NUMBERS = {"attnscope", "experiment", "classes", "seeds", "repeatable"}
"""What may change more than the last digits, or is another question: never mixed."""


def differences(
    recorded: dict[str, Any], here: dict[str, Any], *, threads: bool = False
) -> dict[str, Any]:
    """How this environment differs from the recorded one. With `threads` the number of threads
    counts too; a continued run uses the recorded number."""
    aside = {"models", "claims", "prompts"} | (set() if threads else {"threads"})
    return {key: here[key] for key in here if key not in aside and recorded.get(key) != here[key]}


def prompts_digest(experiment: Experiment) -> str:
    """A digest of the source of the prompts, without where their file is and how many are used: a
    larger run of one seed measures the same prompts again."""
    prompts = experiment.identity()["prompts"]
    text = json.dumps(prompts | {"count": None}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def measured_before(folder: Path, prompts: str | None) -> list[str]:
    """The runs beside this one that measured the same prompts earlier, by the time of their first
    batch. Only of local directories: a store does not keep that time."""
    if prompts is None or is_remote(folder):
        return []
    first, earlier = _first_batch(folder), []
    for file in sorted(folder.absolute().parent.glob("*/environment.json")):
        try:
            if not _first_batch(file.parent) < first:
                continue
            recorded = json.loads(read_file(file, LARGEST))
        except (OSError, ValueError):
            continue  # an unreadable neighbour is no evidence
        if isinstance(recorded, dict) and recorded.get("prompts") == prompts:
            earlier.append(file.parent.name)
    return earlier


def _first_batch(folder: Path) -> float:
    """When the first batch of a run was written; infinite without any."""
    return min((file.stat().st_mtime for file in folder.glob("cells/*.json")), default=math.inf)


def refuse_differences(
    recorded: dict[str, Any], different: dict[str, Any], folder: Any, *, hint: str = ""
) -> None:
    """Refuse to mix the cells of two environments in one run."""
    if different:
        raise InputError(
            f"{folder} was started with other versions or hardware "
            f"({_differences(recorded, different)}). "
            "Results may differ in the last digits. Continue it there, or give another directory "
            "with "
            f"--out{hint}",
            code="other-environment",
            folder=str(folder),
            different=different,
        )


def accept_differences(
    recorded: dict[str, Any], different: dict[str, Any], folder: Any, *, mixed: bool
) -> None:
    """Refuse another environment, unless `mixed` allows it. Then a warning states the difference,
    and every batch records it."""
    if _OTHER_NUMBERS & different.keys():
        refuse_differences(recorded, different, folder)
    if not mixed:
        refuse_differences(
            recorded, different, folder, hint=", or pass --mixed to record the difference per batch"
        )
    elif different:
        warnings.warn(
            f"{folder} was started with other versions or hardware "
            f"({_differences(recorded, different)}); what is "
            "measured here may differ in the last digits, and each batch records the difference",
            AttnscopeWarning,
            stacklevel=3,
        )


def _differences(recorded: dict[str, Any], different: dict[str, Any]) -> str:
    return "; ".join(
        f"{key}: {recorded.get(key)} there, {one} here" for key, one in different.items()
    )
