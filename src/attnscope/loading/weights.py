"""Check weight files before a model is built, and check that a loaded model is complete.

Missing weights would be random numbers, so no weight may be missing. Only safetensors files are
opened here: their headers have names and sizes, and reading them runs no code.
"""

import json
import re
import warnings
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from attnscope import memory
from attnscope.errors import AttnscopeWarning, ModelError, bad_path

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_PICKLED, _PICKLES = (
    "pickled-weights",
    ", and loading a pickle can run any code. If you trust it, convert it once: load the model "
    "with transformers and call model.save_pretrained(folder). Or use load(…, unpickle=True)",
)
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADROOM = 256 << 20
"""Bytes of memory to leave free for other data."""
# Heads and poolers come after the layers; attention does not depend on them.
_AFTER_THE_LAYERS = {"pooler", "cls", "lm_head", "classifier", "qa_outputs", "score", "predictions"}


def weight_files(folder: Path, unpickle: bool = False) -> list[Path]:
    """The weight files of a folder; refuses files that could run code."""
    if any(re.match(r"shard-\d{5}-model-", path.name) for path in folder.glob("shard-*")):
        problem = (
            "has the checkpoint of a distributed training. Merge it first: load it where it was "
            "trained and call model.save_pretrained(folder)"
        )
        raise bad_path(folder, problem, "distributed-checkpoint")
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        return _shards(folder, unpickle)
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickled and unpickle:
        return []
    if pickled:
        raise bad_path(folder, f"has only pickled weights ({_some(pickled)}){_PICKLES}", _PICKLED)
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    note = f"; it has {_some(others)}" if others else ""
    raise bad_path(folder, f"has no weights: no {WHOLE} or {INDEX}{note}", "no-weights")


def _shards(folder: Path, unpickle: bool) -> list[Path]:
    index = folder / INDEX
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        shards = sorted({str(name) for name in named})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise bad_path(index, f"is no index of weights: {error!r}", "damaged-index") from error
    for shard in shards:
        if Path(shard).name != shard:
            problem = f"names {shard!r}, which is not in the same folder"
            raise bad_path(index, problem, "damaged-index", file=shard)
        if not shard.endswith(".safetensors") and not unpickle:
            raise bad_path(index, f"names the pickle {shard!r}{_PICKLES}", _PICKLED, file=shard)
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        problem = f"lacks {len(missing)} of its {len(shards)} weight files: {_some(missing)}"
        raise bad_path(folder, problem, "missing-weights", missing=missing)
    return [folder / shard for shard in shards if shard.endswith(".safetensors")]


def count_weights(folder: Path, unpickle: bool = False) -> int:
    """The number of weights in the files of a folder; refuses damaged files and pickles."""
    from safetensors import SafetensorError, safe_open

    files, total = weight_files(folder, unpickle), 0
    for path in files:
        try:
            with safe_open(str(path), framework="numpy") as opened:
                total += sum(prod(opened.get_slice(key).get_shape()) for key in opened.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            problem = f"is no complete safetensors file ({error}); download it again"
            raise bad_path(path, problem, "damaged-weights") from error
    if files and not total:
        raise bad_path(folder, "has weight files without tensors", "no-weights")
    return total


def check_memory(weights: int, width: int, name: str, device: str = "cpu") -> None:
    """Refuse a model of so many weights of `width` bytes that does not fit in the free memory.

    A system without free memory would end the process without a message.
    """
    free, needed = memory.free(device), weights * width + HEADROOM
    if free is not None and needed > free:
        raise ModelError(
            f"{name} does not fit in memory: {weights / 1e9:.2f} billion weights of {width} bytes "
            f"need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on {device}. Choose a "
            "smaller model, use dtype='bfloat16', or end other programs",
            code="not-enough-memory",
            needed=needed,
            free=free,
        )


def check_loaded(model: Any, info: dict[str, Any], name: str) -> None:
    """Refuse a model with weights that were missing in the files."""
    missing = sorted(info.get("missing_keys") or ())
    mismatched = sorted(info.get("mismatched_keys") or ())
    if mismatched:
        shapes = [f"{key} is {list(of)}, not {list(expected)}" for key, of, expected in mismatched]
        raise ModelError(
            f"{name!r} has weights whose shapes do not match its config.json: " + _some(shapes),
            code="config-mismatch",
            model=name,
            keys=[key for key, *_ in mismatched],
        )
    if not model.can_generate():
        missing = [key for key in missing if _AFTER_THE_LAYERS.isdisjoint(key.split("."))]
    if missing:
        raise ModelError(
            f"{name!r} lacks weights of its {type(model).__name__}: {_some(missing)}. They would "
            "be random numbers, so the model is not loaded",
            code="missing-weights",
            model=name,
            missing=missing,
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


def _some(things: Iterable[str], shown: int = 3) -> str:
    things = list(things)
    more = f" and {len(things) - shown} more" if len(things) > shown else ""
    return ", ".join(things[:shown]) + more
