"""Check weight files before a model is built, and check that a loaded model is complete.

Missing weights would be random numbers, so no weight may be missing. Only safetensors files are
opened here: their headers have names and sizes, and reading them runs no code.
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

# A configuration with more layers than this, and more than tensors, is refused: building the model
# would take hours. (A file may have fewer layers than its configuration: ALBERT shares them.)
_MANY_LAYERS = 200
# Heads and poolers come after the layers; attention does not depend on them.
_AFTER_THE_LAYERS = ("pooler", "cls", "lm_head", "classifier", "qa_outputs", "score", "predictions")


def weight_files(folder: Path, unpickle: bool = False) -> list[Path]:
    """The weight files of a folder; refuses files that could run code."""
    if any(re.match(r"shard-\d{5}-model-", path.name) for path in folder.glob("shard-*")):
        raise ModelError(
            f"{str(folder)!r} has the checkpoint of a distributed training. Merge it first: load "
            "it where it was trained and call model.save_pretrained(folder)",
            code="distributed-checkpoint",
            path=str(folder),
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
            f"{str(folder)!r} has only pickled weights ({', '.join(pickled[:3])}), and loading a "
            "pickle can run any code. If you trust them, convert them once: load the model with "
            "transformers and call model.save_pretrained(folder), which writes safetensors. Or use "
            "load(…, unpickle=True)",
            code="pickled-weights",
            path=str(folder),
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    note = f"; it has {', '.join(others[:3])}, but no {WHOLE} or {INDEX}" if others else ""
    raise ModelError(
        f"{str(folder)!r} has no weights: no *.safetensors file of a model{note}",
        code="no-weights",
        path=str(folder),
    )


def _shards(folder: Path, unpickle: bool) -> list[Path]:
    try:
        named = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        shards = sorted({str(name) for name in named})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(
            f"{str(folder / INDEX)!r} is no index of weights: {error!r}",
            code="damaged-index",
            path=str(folder / INDEX),
        ) from error
    for shard in shards:
        if Path(shard).name != shard:
            raise ModelError(
                f"{str(folder / INDEX)!r} names {shard!r}, which is not in the same folder",
                code="damaged-index",
                path=str(folder / INDEX),
                file=shard,
            )
        if not shard.endswith(".safetensors") and not unpickle:
            raise ModelError(
                f"{str(folder / INDEX)!r} names {shard!r}, which is pickled, and loading a pickle "
                "can run any code. If you trust it, convert it, or use load(…, unpickle=True)",
                code="pickled-weights",
                path=str(folder),
                file=shard,
            )
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(
            f"{str(folder)!r} lacks {len(missing)} of the {len(shards)} files of its weights: "
            f"{_some(missing)}",
            code="missing-weights",
            path=str(folder),
            missing=missing,
        )
    return [folder / shard for shard in shards if shard.endswith(".safetensors")]


def check_files(folder: Path, unpickle: bool = False) -> None:
    """Refuse truncated or damaged files, and a configuration that does not match them."""
    from safetensors import SafetensorError, safe_open

    files = weight_files(folder, unpickle)
    tensors = 0
    for path in files:
        try:
            with safe_open(str(path), framework="numpy") as opened:
                tensors += len(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{str(path)!r} is no complete safetensors file ({error}); download it again",
                code="damaged-weights",
                path=str(path),
            ) from error
    if files and not tensors:
        raise ModelError(
            f"the weight files of {str(folder)!r} have no tensors",
            code="no-weights",
            path=str(folder),
        )
    if files:
        _check_size(folder, tensors, sum(path.stat().st_size for path in files))


def _check_size(folder: Path, tensors: int, size: int) -> None:
    """Refuse a configuration much larger than its weights: building it would take hours."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # transformers reports the error
    if not isinstance(config, dict):
        raise ModelError(
            f"could not load {str(folder)!r}: its config.json is no JSON object",
            code="damaged-config",
            path=str(folder),
        )
    if (explicit := config.get("transformers_weights")) is not None:
        raise ModelError(
            f"config.json of {str(folder)!r} sets transformers_weights to {explicit!r}, which "
            "is not supported; remove this key",
            code="unsupported-config",
            path=str(folder),
            value=explicit,
        )
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        layers = _largest(part, "num_hidden_layers", "num_layers", "n_layer", "n_layers")
        words = _largest(part, "vocab_size") * _largest(part, "hidden_size", "n_embd", "d_model")
        if layers > max(_MANY_LAYERS, tensors) or words > 8 * size:
            raise ModelError(
                f"config.json of {str(folder)!r} does not match its weights: it has {layers:,} "
                f"layers and {words:,} weights of embeddings; the files have {tensors:,} tensors "
                f"in {size:,} bytes",
                code="config-mismatch",
                path=str(folder),
                layers=layers,
                tensors=tensors,
            )


def _largest(part: dict[str, Any], *keys: str) -> int:
    return max((n for key in keys if isinstance(n := part.get(key), int)), default=0)


def check_loaded(model: Any, info: dict[str, Any], name: str) -> None:
    """Refuse a model with weights that were missing in the files."""
    missing = sorted(info.get("missing_keys") or ())
    mismatched = sorted(info.get("mismatched_keys") or ())
    if mismatched:
        shapes = [
            f"{key} is {_shape(stored)}, not {_shape(expected)}"
            for key, stored, expected in mismatched
        ]
        raise ModelError(
            f"{name!r} has weights whose shapes do not match its config.json: " + _some(shapes),
            code="config-mismatch",
            model=name,
            keys=[key for key, *_ in mismatched],
        )
    harmless = [] if model.can_generate() else [key for key in missing if _after_the_layers(key)]
    lost = [key for key in missing if key not in harmless]
    if lost:
        raise ModelError(
            f"{name!r} lacks weights of its {type(model).__name__}: {_some(lost)}. They would be "
            "random numbers, so the model is not loaded",
            code="missing-weights",
            model=name,
            missing=lost,
        )
    if info.get("error_msgs"):
        raise ModelError(
            f"{name!r} could not be loaded: {str(info['error_msgs'][0]).strip()}",
            code="cannot-load",
            model=name,
        )
    beyond = [key for key in info.get("unexpected_keys") or () if re.search(r"\.\d+\.", key)]
    if beyond:
        warnings.warn(
            f"{name!r} has weights that its {type(model).__name__} does not use: "
            f"{_some(sorted(beyond))}. If config.json has too few layers, this is another model",
            AttnscopeWarning,
            stacklevel=4,
        )
    _check_numbers(model, name)


def _check_numbers(model: Any, name: str) -> None:
    import torch

    for key, weight in model.named_parameters():
        if weight.is_meta or weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            continue
        # A finite sum is a quick check; the sum of finite weights may also overflow.
        if not weight.detach().sum().isfinite() and not torch.isfinite(weight).all():
            raise ModelError(
                f"{name!r} has weights that are nan or infinite: {key}. Use another "
                "copy of the model",
                code="weights-not-finite",
                model=name,
                key=key,
            )


def _after_the_layers(key: str) -> bool:
    return any(part in _AFTER_THE_LAYERS for part in key.split("."))


def _shape(of: Any) -> str:
    return " × ".join(map(str, of))


def _some(things: Iterable[str], shown: int = 3) -> str:
    things = list(things)
    more = f" and {len(things) - shown} more" if len(things) > shown else ""
    return ", ".join(things[:shown]) + more
