"""PEFT adapters: a fine-tune as a small folder beside its base.

An adapter is merged into the base, so that the model is an ordinary one of its family and is
watched like any other. It must fit: every weight it has is used, and every weight it should have
is there.

This module must not know names of models, tokenizers or devices.
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
    """Refuse a folder that is no adapter, or whose weights are pickled."""
    if not folder.is_dir():
        raise ModelError(f"the adapter {str(folder)!r} is not a folder")
    if not is_adapter(folder):
        raise ModelError(f"{str(folder)!r} has no {CONFIG}, so it is no adapter")
    if not (folder / WEIGHTS).is_file():
        raise ModelError(
            f"the adapter {str(folder)!r} has no {WEIGHTS}; pickled weights are not read: save it "
            "again with PEFT, which writes safetensors"
        )
    base_of(folder)


def base_of(folder: Path) -> str | None:
    """The base that an adapter names."""
    try:
        named = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        base = named.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{str(folder / CONFIG)!r} cannot be read: {error}") from error
    return base if isinstance(base, str) and base else None


def merged(model: Any, folder: Path, name: str) -> Any:
    """The base with the adapter merged into it."""
    if importlib.util.find_spec("peft") is None:
        raise ModelError(
            f"{str(folder)!r} is a PEFT adapter, and loading one needs the package peft: "
            "pip install 'attnscope[peft]'"
        )
    import peft
    from peft.utils import load_peft_weights
    from peft.utils.save_and_load import get_peft_model_state_dict

    base = type(model).__name__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is missing is an error below
            tuned = peft.PeftModel.from_pretrained(model, str(folder), torch_device="cpu")
        stored = load_peft_weights(str(folder), device="cpu")
        expected = get_peft_model_state_dict(tuned, save_embedding_layers=False)
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()
        reason = next((line.strip() for line in said[1:] if "size mismatch" in line), said[0])
        raise ModelError(_does_not_fit(folder, name, base, reason)) from error
    missing = sorted(set(expected) - set(stored))
    unused = sorted(set(stored) - set(expected))
    unused = [key for key in unused if "embed" not in key and "lm_head" not in key]
    for what, keys in (("it lacks", missing), ("the base has no place for", unused)):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ModelError(_does_not_fit(folder, name, base, f"{what} {keys[0]}{more}"))
    if not hasattr(tuned, "merge_and_unload"):
        kind = tuned.active_peft_config.peft_type
        raise ModelError(
            f"the adapter {str(folder)!r} is of the kind {kind.value}, which cannot be merged into "
            "its base; those that can: LORA, IA3, LOHA, LOKR, OFT, BOFT, VERA"
        )
    whole = tuned.merge_and_unload(safe_merge=True)
    whole._hf_peft_config_loaded = False
    return whole


def _does_not_fit(folder: Path, name: str, base: str, reason: str) -> str:
    trained_on = base_of(folder)
    said = f" It says that it was trained on {trained_on!r}." if trained_on else ""
    return (
        f"the adapter {str(folder)!r} does not fit the base {name!r} ({base}): "
        f"{reason.rstrip('.')}.{said} Give the base it was trained on"
    )
