"""Which device: the one asked for, checked, or the best there is. Nobody else decides.

This module must not know models.
"""

from attnscope.errors import ModelError


def chosen_device(wanted: str | None) -> str:
    """`wanted` if it is there; by default the first GPU there is (CUDA, then MPS), else the CPU."""
    import torch

    there = {
        "cpu": True,
        "auto": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if wanted is None:
        return next(kind for kind in ("cuda", "mps", "cpu") if there[kind])
    kind, colon, number = wanted.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    numbered = not colon or (kind != "auto" and number.isdecimal() and int(number) < count)
    if not there.get(kind, False) or not numbered:
        here = ", ".join(name for name, is_there in there.items() if is_there)
        raise ModelError(f"there is no device {wanted!r} here; there are: {here}")
    return wanted
