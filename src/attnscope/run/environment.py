"""Whether cells belong together: what a run says of where it was measured, compared.

This module must not know models, or how an environment is described.
"""

from __future__ import annotations

from typing import Any

from attnscope.errors import InputError


def same_or_refuse(
    there: dict[str, Any], here: dict[str, Any], folder: Any, *, threads: bool = False
) -> None:
    """Refuse to mix the cells of two environments in one run. The number of threads counts only
    where it cannot be kept to: whoever continues a run takes the number that is recorded."""
    aside = ("models", "claims") if threads else ("models", "claims", "threads")
    differing = [
        f"{key}: {there.get(key)} there, {here[key]} here"
        for key in here
        if key not in aside and there.get(key) != here[key]
    ]
    if differing:
        raise InputError(
            f"{folder} was begun in another environment ({'; '.join(differing)}), and its last "
            "digits could not be repeated here; finish it there, or give another directory "
            "with --out"
        )
