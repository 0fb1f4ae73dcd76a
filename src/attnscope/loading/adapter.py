"""Load PEFT adapters: check an adapter and merge it into its base model.

A merged model is an ordinary model of its family. The adapter must match the base: all weights of
the adapter are used, and none is missing.
"""

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

from attnscope.errors import ModelError, bad_path, missing_package

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / CONFIG).is_file()


def check_adapter(folder: Path) -> None:
    """Refuse a folder that is no adapter or has pickled weights."""
    if not is_adapter(folder):
        raise bad_path(folder, f"is no adapter: it is no folder with {CONFIG}", "no-adapter")
    if not (folder / WEIGHTS).is_file():
        problem = f"has no {WEIGHTS}, and pickled weights are refused; save it again with PEFT"
        raise bad_path(folder, problem, "pickled-weights")
    base_of(folder)


def base_of(folder: Path) -> str | None:
    """The base model that the configuration of an adapter names."""
    try:
        named = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        base = named.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise bad_path(folder / CONFIG, f"cannot be read: {error}", "unreadable-file") from error
    return base if isinstance(base, str) and base else None


def merged(model: Any, folder: Path, name: str) -> Any:
    """Merge the adapter into the base model."""
    if importlib.util.find_spec("peft") is None:
        raise missing_package(f"the adapter {str(folder)!r}", "peft", "peft")
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
        problem = (
            f"is an adapter of the type {kind.value}, which cannot be merged into its base; "
            "supported: LORA, IA3, LOHA, LOKR, OFT, BOFT, VERA"
        )
        raise bad_path(folder, problem, "unsupported-adapter", type=kind.value)
    result = tuned.merge_and_unload(safe_merge=True)
    result._hf_peft_config_loaded = False
    return result


def _mismatch(folder: Path, name: str, base: str, reason: str) -> ModelError:
    trained_on = base_of(folder)
    note = f" Its configuration names the base {trained_on!r}." if trained_on else ""
    problem = (
        f"does not match the base {name!r} ({base}): {reason.rstrip('.')}.{note} Give the base it "
        "was trained on"
    )
    return bad_path(folder, problem, "adapter-mismatch", base=name, reason=reason)
