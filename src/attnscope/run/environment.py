"""Whether cells belong together: what a run says of where it was measured, compared."""

import warnings
from typing import Any

from attnscope.errors import AttnscopeWarning, InputError

_OTHER_NUMBERS = {"attnscope", "experiment", "classes", "seeds", "repeatable"}
"""What may change more than the last digits, or is another question: never mixed."""


def differences(
    recorded: dict[str, Any], here: dict[str, Any], *, threads: bool = False
) -> dict[str, Any]:
    """How this environment differs from the recorded one. With `threads` the number of threads
    counts too; a continued run uses the recorded number."""
    aside = ("models", "claims") if threads else ("models", "claims", "threads")
    return {key: here[key] for key in here if key not in aside and recorded.get(key) != here[key]}


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
