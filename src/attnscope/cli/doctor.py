"""`attnscope doctor`: versions, devices, kernels and caches; with a model, a check of it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from attnscope.cli.options import Device, Dtype, Json
from attnscope.cli.output import print_json

EXTRAS = {
    "cpu": "numba",
    "data": "datasets",
    "eval": "lm_eval",
    "gguf": "gguf",
    "peft": "peft",
    "ray": "ray",
    "remote": "upath",
    "train": "accelerate",
    "vision": "PIL",
    "vllm": "vllm",
    "web": "fastapi",
    "zoo": "attnscope_zoo",
}
"""Extra → a package that it installs."""
SIGNS = {True: "ok", False: "FAILED", None: "not checked"}


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Also check this model on a short text."),
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """Print versions, devices, memory, kernels, caches and extras; with a model, check it.

    The check compares sums and attention rows with the model's own eager attention, and tests that
    a knockout changes the output. The exit code is 1 if a check fails.
    """
    values = _environment()
    checks = [] if model is None else _checks(model, device, dtype)
    if json:
        listed = [check._asdict() for check in checks]
        print_json(values if model is None else {**values, "checks": listed})
    else:
        for name, value in values.items():
            print(f"{name}: {value}")
        for check in checks:
            print(f"{check.name}: {SIGNS[check.passed]}: {check.detail}")
    if any(check.passed is False for check in checks):
        raise typer.Exit(1)


def _checks(model: str, device: str | None, dtype: str) -> list[Any]:
    from attnscope.loading import load_text_model
    from attnscope.look.model_check import check_model

    return check_model(*load_text_model(model, device=device, dtype=dtype))


def _environment() -> dict[str, str]:
    """Name → value, in the order in which they are printed."""
    import platform

    import torch

    import attnscope
    from attnscope import memory
    from attnscope.kernels import installed_kernels

    values = {"attnscope": attnscope.__version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "triton", "numba"):
        values[package] = _version(package)
    devices = [f"cpu ({torch.get_num_threads()} threads{_gigabytes(memory.free())})"]
    for number in range(torch.cuda.device_count()):
        name = f"cuda:{number}"
        devices.append(
            f"{name} ({torch.cuda.get_device_name(number)}{_gigabytes(memory.free(name))})"
        )
    values["devices"] = ", ".join(devices)
    missing = [name for name, package in EXTRAS.items() if find_spec(package) is None]
    installed = [name for name in EXTRAS if name not in missing]
    values |= installed_kernels()
    values["extras"] = ", ".join(installed) or "none"
    if missing:
        values["extras not installed"] = ", ".join(missing)
    return values | _caches()


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gigabytes(size: int | None) -> str:
    return "" if size is None else f", {size / 1e9:.1f} GB free"


def _caches() -> dict[str, str]:
    """The cache folders, with the size of what is in them."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from attnscope.loading.cache import home

    folders = {"cache of attnscope": home(), "cache of the hub": Path(HF_HUB_CACHE)}
    return {name: f"{folder} ({_size(folder) / 1e9:.1f} GB)" for name, folder in folders.items()}


def _size(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)
