"""What a folder's files hold, before anything is built of them; and that a model was all in them.

Weights that are missing would be random numbers, so nothing may be missing. Only safetensors are
opened here: their heads say names and sizes without running anything.

This module must not know names of models, tokenizers or devices.
"""

import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeWarning, ModelError

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# More layers than this, and more than there are tensors, is no model: building it would take
# hours. (Layers may be fewer in the file than in the configuration: ALBERT shares them.)
_MANY_LAYERS = 200
# Heads and poolers read what the layers made; attention does not depend on them.
_AFTER_THE_LAYERS = ("pooler", "cls", "lm_head", "classifier", "qa_outputs", "score", "predictions")


def weight_files(folder: Path, unpickle: bool = False) -> list[Path]:
    """The files that hold the weights; refuses those that could run something."""
    if any(re.match(r"shard-\d{5}-model-", path.name) for path in folder.glob("shard-*")):
        raise ModelError(
            f"{str(folder)!r} holds the checkpoint of a distributed training; merge it first: load "
            "it where it was trained and call model.save_pretrained(folder)"
        )
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        return _shards(folder, unpickle)
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled and unpickle:
        return []
    if pickled:
        raise ModelError(
            f"{str(folder)!r} holds only pickled weights ({', '.join(pickled[:3])}), and loading a "
            "pickle can run anything. Convert them once, where you trust them: load the model with "
            "transformers and call model.save_pretrained(folder), which writes safetensors; or say "
            "load(…, unpickle=True)"
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    held = f"; there is {', '.join(others[:3])}, but no {WHOLE} or {INDEX}" if others else ""
    raise ModelError(f"{str(folder)!r} holds no weights: no *.safetensors file of a model{held}")


def _shards(folder: Path, unpickle: bool) -> list[Path]:
    try:
        named = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        shards = sorted({str(name) for name in named})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{str(folder / INDEX)!r} is no index of weights: {error!r}") from error
    for shard in shards:
        if Path(shard).name != shard:
            raise ModelError(f"{str(folder / INDEX)!r} names {shard!r}, which is no file beside it")
        if not shard.endswith(".safetensors") and not unpickle:
            raise ModelError(
                f"{str(folder / INDEX)!r} names {shard!r}, which is pickled, and loading a pickle "
                "can run anything. Convert it where you trust it, or say load(…, unpickle=True)"
            )
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(
            f"{str(folder)!r} lacks {len(missing)} of the {len(shards)} files of its weights: "
            f"{_some(missing)}"
        )
    return [folder / shard for shard in shards if shard.endswith(".safetensors")]


def check_files(folder: Path, unpickle: bool = False) -> None:
    """Refuse files that are cut off or broken, and a configuration that cannot be theirs."""
    from safetensors import SafetensorError, safe_open

    files = weight_files(folder, unpickle)
    tensors = 0
    for path in files:
        try:
            with safe_open(str(path), framework="numpy") as opened:
                tensors += len(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{str(path)!r} is no whole safetensors file ({error}); fetch it again"
            ) from error
    if files and not tensors:
        raise ModelError(f"the weights of {str(folder)!r} are empty: there is no tensor in them")
    if files:
        _check_size(folder, tensors, sum(path.stat().st_size for path in files))


def _check_size(folder: Path, tensors: int, size: int) -> None:
    """Before anything is built: a million layers take hours to refuse otherwise."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # transformers says what is wrong with it
    if not isinstance(config, dict):
        raise ModelError(f"could not load {str(folder)!r}: its config.json is no JSON object")
    if (explicit := config.get("transformers_weights")) is not None:
        raise ModelError(f"config.json names its own file of weights, {explicit!r}: not supported")
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        layers = _largest(part, "num_hidden_layers", "num_layers", "n_layer", "n_layers")
        words = _largest(part, "vocab_size") * _largest(part, "hidden_size", "n_embd", "d_model")
        if layers > max(_MANY_LAYERS, tensors) or words > 8 * size:
            raise ModelError(
                f"config.json of {str(folder)!r} does not fit its weights: it says {layers:,} "
                f"layers and {words:,} numbers for words; the weights are {tensors:,} tensors in "
                f"{size:,} bytes"
            )


def _largest(part: dict[str, Any], *keys: str) -> int:
    return max((n for key in keys if isinstance(n := part.get(key), int)), default=0)


def check_loaded(model: Any, info: dict[str, Any], name: str) -> None:
    """Refuse a model of which a part was not in the files."""
    missing = sorted(info.get("missing_keys") or ())
    mismatched = sorted(info.get("mismatched_keys") or ())
    if mismatched:
        told = [
            f"{key} is {_shape(there)}, not {_shape(asked)}" for key, there, asked in mismatched
        ]
        raise ModelError(
            f"{name!r} has weights of another shape than its config.json says: " + _some(told)
        )
    harmless = [] if model.can_generate() else [key for key in missing if _after_the_layers(key)]
    lost = [key for key in missing if key not in harmless]
    if lost:
        raise ModelError(
            f"{name!r} lacks weights of its {type(model).__name__}: {_some(lost)}. They would be "
            "random numbers; nothing was loaded"
        )
    if info.get("error_msgs"):
        raise ModelError(f"{name!r} could not be loaded: {str(info['error_msgs'][0]).strip()}")
    beyond = [key for key in info.get("unexpected_keys") or () if re.search(r"\.\d+\.", key)]
    if beyond:
        warnings.warn(
            f"{name!r} has weights that its {type(model).__name__} does not use: "
            f"{_some(sorted(beyond))}. If config.json says too few layers, this is another model",
            AttnscopeWarning,
            stacklevel=4,
        )
    _check_numbers(model, name)


def _check_numbers(model: Any, name: str) -> None:
    import torch

    for key, weight in model.named_parameters():
        if weight.is_meta or weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            continue
        # A sum is quick, and shows whether there is anything to look for; or it became too large.
        if not weight.detach().sum().isfinite() and not torch.isfinite(weight).all():
            raise ModelError(
                f"{name!r} has weights that are no numbers (nan or infinite): {key}. Nothing can "
                "be measured with them"
            )


def _after_the_layers(key: str) -> bool:
    return any(part in _AFTER_THE_LAYERS for part in key.split("."))


def _shape(of: Any) -> str:
    return " × ".join(map(str, of))


def _some(things: Iterable[str], shown: int = 3) -> str:
    things = list(things)
    more = f" and {len(things) - shown} more" if len(things) > shown else ""
    return ", ".join(things[:shown]) + more
