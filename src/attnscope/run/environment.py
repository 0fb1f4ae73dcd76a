"""Whether cells belong together: what a run says of where it was measured, compared.

This module must not know models, or how an environment is described.
"""

import warnings
from typing import Any

from attnscope.errors import AttnscopeWarning, InputError

_OTHER_NUMBERS = {"attnscope", "experiment", "classes", "seeds", "repeatable"}
"""What may change more than the last digits, or is another question: never mixed."""


def elsewhere(
    there: dict[str, Any], here: dict[str, Any], *, threads: bool = False
) -> dict[str, Any]:
    """What is different here from where the run was begun. The number of threads counts only
    where it cannot be kept to: whoever continues a run takes the number that is recorded."""
    aside = ("models", "claims") if threads else ("models", "claims", "threads")
    return {key: here[key] for key in here if key not in aside and there.get(key) != here[key]}


def refuse(there: dict[str, Any], different: dict[str, Any], folder: Any, *, way: str = "") -> None:
    """Refuse to mix the cells of two environments in one run."""
    if different:
        raise InputError(
            f"{folder} was begun in another environment ({_told(there, different)}), and its last "
            "digits could not be repeated here; finish it there, or give another directory with "
            f"--out{way}"
        )


def accept(there: dict[str, Any], different: dict[str, Any], folder: Any, *, mixed: bool) -> None:
    """Refuse it, unless the user allows it: then what differs is said here, and recorded with each
    batch by whoever stores it."""
    if _OTHER_NUMBERS & different.keys():
        refuse(there, different, folder)
    if not mixed:
        refuse(there, different, folder, way="; or mix them with --mixed, on the record")
    elif different:
        warnings.warn(
            f"{folder} was begun in another environment ({_told(there, different)}); what is "
            "measured here may differ in its last digits, and each batch of it says so",
            AttnscopeWarning,
            stacklevel=3,
        )


def _told(there: dict[str, Any], different: dict[str, Any]) -> str:
    return "; ".join(f"{key}: {there.get(key)} there, {one} here" for key, one in different.items())
