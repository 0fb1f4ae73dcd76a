"""Finds the transformers model inside a wrapper: PEFT, `torch.compile`, data parallelism."""

from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch._dynamo import eval_frame
from transformers import PreTrainedModel

from attnscope.errors import ModelError

_INNER = {
    ("peft", "PeftModel"): lambda model: model.get_base_model(),
    ("peft", "PeftMixedModel"): lambda model: model.base_model.model,
    ("torch", "OptimizedModule"): lambda model: model._orig_mod,
    ("torch", "DataParallel"): lambda model: model.module,
    ("torch", "DistributedDataParallel"): lambda model: model.module,
}
"""Package and class of a wrapper → the model inside. A wrapper calls it once for each input, with
the same tokens."""


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside these wrappers, or the model itself.

    Hooks are on the modules of the inner model, so a call of the wrapper is measured too.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        kind = next((kind for kind in _class_names(inner) if kind in _INNER), None)
        if kind is None:
            raise _no_transformers_model(model)
        _check(inner, package=kind[0])
        inner = _INNER[kind](inner)
    return inner


def compiled_function(module: nn.Module) -> FunctionType | None:
    """The function of `torch.compile` that a module runs in place of its own, if there is one."""
    for name in ("_compiled_call_impl", "forward"):
        function = module.__dict__.get(name)
        if isinstance(function, FunctionType) and is_compiled(function.__code__):
            return function
    return None


def is_compiled(code: CodeType) -> bool:
    """Whether this is the code of the functions that `torch.compile` returns."""
    return code.co_name == "compile_wrapper" and code.co_filename == eval_frame.__file__


def _class_names(model: nn.Module) -> list[tuple[str, str]]:
    """The package and the name of each class of a module; no package is imported."""
    return [(cls.__module__.partition(".")[0], cls.__name__) for cls in type(model).__mro__]


def _check(wrapper: Any, package: str) -> None:
    """Refuse wrappers that run copies of the model, or other tokens."""
    devices = getattr(wrapper, "device_ids", None) or ()
    if isinstance(wrapper, nn.DataParallel) and len(devices) > 1:
        raise ModelError(
            f"DataParallel runs a copy of the model on each of {len(devices)} devices, and copies "
            "are not measured; use the model inside it (.module), or device_ids of one device",
            code="data-parallel-copies",
            devices=list(devices),
        )
    if package != "peft":
        return
    for name in wrapper.active_adapters:
        config = wrapper.peft_config[name]
        if config.is_prompt_learning:
            raise ModelError(
                f"the adapter {name!r} ({config.peft_type.value}) puts virtual tokens in "
                "front of the text, so positions are not those of the tokens; attnscope supports "
                "adapters that change weights, such as LoRA",
                code="virtual-tokens",
                adapter=name,
            )


def _no_transformers_model(model: nn.Module) -> ModelError:
    parts = [name for name, part in model.named_modules() if isinstance(part, PreTrainedModel)]
    advice = (
        f"use the PreTrainedModel inside it: .{parts[0]}"
        if parts
        else "pass a PreTrainedModel of transformers"
    )
    return ModelError(
        f"{type(model).__name__} is not a transformers model; {advice}",
        code="not-a-transformers-model",
        model=type(model).__name__,
        path=parts[0] if parts else None,
    )
