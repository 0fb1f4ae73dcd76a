"""Digests of model files: the revision of a local folder or file.

The revision is part of the identity of a measurement, so every byte is read and any edit changes
it. Reading large files is slow, so a digest is cached with the path, size, inode and times of its
file. It is computed again if one of them differs.
"""

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

from attnscope.loading.cache import home

READ = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
)
"""The files of a folder that transformers reads, tokenizer included."""

_SMALL = 2**20  # bytes: smaller files are read without the cache
_SETTLED = 2 * 10**9  # nanoseconds: a newer file may change again within one tick of the clock


def digest_of_folder(folder: Path) -> str:
    """The digest of the names and contents of all model files in a folder."""
    files = {path for pattern in READ for path in folder.glob(pattern)}
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file()):
        digest.update(f"{path.name}:{digest_of_file(path)}\n".encode())
    return digest.hexdigest()


def digest_of_file(path: Path) -> str:
    """The SHA-256 of a file, from the cache if the file has not changed."""
    path = path.resolve()
    known_as = home() / "digests" / hashlib.sha256(os.fsencode(path)).hexdigest()
    state = _state(path)
    if state["size"] > _SMALL and (known := _known(known_as, state)):
        return known
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    # Cache the digest only if the file did not change while it was read, nor just before.
    settled = time.time_ns() - max(state["mtime_ns"], state["ctime_ns"]) > _SETTLED
    if state["size"] > _SMALL and settled and state == _state(path):
        _remember(known_as, {**state, "sha256": digest.hexdigest()})
    return digest.hexdigest()


def _state(path: Path) -> dict[str, int]:
    now = path.stat()
    return {
        "size": now.st_size,
        "mtime_ns": now.st_mtime_ns,
        "ctime_ns": now.st_ctime_ns,
        "inode": now.st_ino,
        "device": now.st_dev,
    }


def _known(known_as: Path, state: dict[str, int]) -> str | None:
    try:
        kept = json.loads(known_as.read_text(encoding="utf-8"))
        digest = kept.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return str(digest) if kept == state else None


def _remember(known_as: Path, kept: dict[str, int | str]) -> None:
    """Write a cache entry completely or not at all; errors are ignored."""
    try:
        known_as.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=known_as.parent)
    except OSError:
        return
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(kept, file)
        os.replace(name, known_as)
    except OSError:
        Path(name).unlink(missing_ok=True)
