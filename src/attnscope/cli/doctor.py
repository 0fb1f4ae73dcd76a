"""`attnscope doctor`: versions, devices, and the kernel that measures on each."""

from __future__ import annotations

from attnscope.cli.options import Json
from attnscope.cli.output import print_json


def doctor(json: Json = False) -> None:
    """Print versions, devices and kernels, with what to install for faster ones."""
    import platform
    from importlib.metadata import version

    import torch

    from attnscope.kernels import installed_kernels

    packages = {name: version(name) for name in ("attnscope", "torch", "transformers")}
    values = {"python": platform.python_version(), **packages, **installed_kernels()}
    values["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if json:
        print_json(values)
        return
    for name, value in values.items():
        print(f"{name}: {value}")
