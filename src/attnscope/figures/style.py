"""Title, size and theme of a figure: what a user may say about its looks.

This module must not know any figure.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnscope.errors import InputError
from attnscope.figures.theme import PUBLISHED, Theme

__all__ = ["Style"]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a figure is to look."""

    title: str | None = None
    width: float | None = None
    """Of all panels in a row together, in pixels, without axes."""
    height: float | None = None
    """Of one panel."""
    theme: Theme = PUBLISHED

    def __post_init__(self) -> None:
        for name in ("width", "height"):
            size = getattr(self, name)
            if size is not None and not 20 <= size <= 20_000:
                raise InputError(f"{name} must be between 20 and 20,000 pixels, not {size!r}")
