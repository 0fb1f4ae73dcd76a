"""Choose the device of a model: the requested one if it exists, else the best available."""

from attnscope.errors import unknown


def chosen_device(device: str | None) -> str:
    """Check a requested device; the default is the first GPU (CUDA, then MPS), else the CPU."""
    import torch

    available = {
        "cpu": True,
        "auto": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if device is None:
        return next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    kind, colon, number = device.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    numbered = not colon or (kind != "auto" and number.isdecimal() and int(number) < count)
    if not available.get(kind, False) or not numbered:
        raise unknown("device", device, [name for name, exists in available.items() if exists])
    return device
