"""Load PEFT adapters: check an adapter and merge it into its base model.

A merged model is an ordinary model of its family. The adapter must match the base: all weights of
the adapter are used, and none is missing.
"""

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

from attnscope.errors import ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / CONFIG).is_file()


def check_adapter(folder: Path) -> None:
    """Refuse a folder that is no adapter or has pickled weights."""
    if not folder.is_dir():
        raise ModelError(
            f"the adapter {str(folder)!r} is not a folder", code="no-adapter", path=str(folder)
        )
    if not is_adapter(folder):
        raise ModelError(
            f"{str(folder)!r} is no adapter: it has no {CONFIG}",
            code="no-adapter",
            path=str(folder),
        )
    if not (folder / WEIGHTS).is_file():
        raise ModelError(
            f"the adapter {str(folder)!r} has no {WEIGHTS}. Pickled weights are refused; save the "
            "adapter again with PEFT, which writes safetensors",
            code="pickled-weights",
            path=str(folder),
        )
    base_of(folder)


def base_of(folder: Path) -> str | None:
    """The base model that the configuration of an adapter names."""
    try:
        named = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        base = named.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"cannot read {str(folder / CONFIG)!r}: {error}",
            code="unreadable-file",
            path=str(folder / CONFIG),
        ) from error
    return base if isinstance(base, str) and base else None


def merged(model: Any, folder: Path, name: str) -> Any:
    """Merge the adapter into the base model."""
    if importlib.util.find_spec("peft") is None:
        raise ModelError(
            f"{str(folder)!r} is a PEFT adapter, which needs the package peft: "
            "pip install 'attnscope[peft]'",
            code="missing-package",
            package="peft",
        )
    import peft
    from peft.utils import load_peft_weights
    from peft.utils.save_and_load import get_peft_model_state_dict

    base = type(model).__name__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # missing weights are an error below
            tuned = peft.PeftModel.from_pretrained(model, str(folder), torch_device="cpu")
        stored = load_peft_weights(str(folder), device="cpu")
        expected = get_peft_model_state_dict(tuned, save_embedding_layers=False)
    except Exception as error:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        reason = next((line.strip() for line in lines[1:] if "size mismatch" in line), lines[0])
        raise _mismatch(folder, name, base, reason) from error
    missing = sorted(set(expected) - set(stored))
    unused = sorted(set(stored) - set(expected))
    unused = [key for key in unused if "embed" not in key and "lm_head" not in key]
    for what, keys in (("the adapter lacks", missing), ("the base has no module for", unused)):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise _mismatch(folder, name, base, f"{what} {keys[0]}{more}")
    if not hasattr(tuned, "merge_and_unload"):
        kind = tuned.active_peft_config.peft_type
        raise ModelError(
            f"the adapter {str(folder)!r} has the type {kind.value}, which cannot be merged into "
            "its base; supported: LORA, IA3, LOHA, LOKR, OFT, BOFT, VERA",
            code="unsupported-adapter",
            type=kind.value,
        )
    result = tuned.merge_and_unload(safe_merge=True)
    result._hf_peft_config_loaded = False
    return result


def _mismatch(folder: Path, name: str, base: str, reason: str) -> ModelError:
    trained_on = base_of(folder)
    note = f" Its configuration names the base {trained_on!r}." if trained_on else ""
    return ModelError(
        f"the adapter {str(folder)!r} does not match the base {name!r} ({base}): "
        f"{reason.rstrip('.')}.{note} Give the base it was trained on",
        code="adapter-mismatch",
        path=str(folder),
        base=name,
        reason=reason,
    )
