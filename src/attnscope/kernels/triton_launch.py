"""Launch Triton programs with a cache of compiled programs.

For every launch, Triton searches the compiled program by all its arguments, which takes as long as
the arithmetic of a short text. This cache skips the search for arguments of the same types.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from attnscope.kernels.triton_tiles import INTERPRETED

# Programs remembered: each length of text is one.
MOST = 4096
_NOTHING = nullcontext()
_started: dict[tuple[Any, ...], Any] = {}


def launch(
    program: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, int]
) -> None:
    """Run a program; the arguments are all of its parameters, in order, the first a tensor or a
    description of one."""
    if INTERPRETED:
        program[grid](*arguments, **options)
        return
    device = next(each.device.index for each in arguments if isinstance(each, Tensor))
    key = (id(program), device, *map(_specialization_key, arguments), *options.items())
    compiled = None if Ellipsis in key else _started.get(key)
    context = torch.cuda.device(device) if device != torch.cuda.current_device() else _NOTHING
    with context:
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*arguments)
            return
        compiled = program[grid](*arguments, **options)
    if Ellipsis not in key:
        if len(_started) >= MOST:
            _started.clear()
        _started[key] = compiled


def _specialization_key(argument: Any) -> Any:
    """What a compiled program depends on: dtype and 16-byte alignment of a tensor, the value of an
    integer, only the type of a float. `...` for other arguments."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, float):
        return float
    plain = argument is None or isinstance(argument, int | torch.dtype)
    return argument if plain or type(argument).__module__ == "triton.language.core" else ...
