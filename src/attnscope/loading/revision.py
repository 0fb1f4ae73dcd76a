"""Which weights these are: a digest of everything that is read of a folder or a file.

The revision is part of the identity of what is measured, so any edit must show: every byte is
read. That takes a while for large files, so a file's digest is kept beside its path, size, inode
and times, and read again as soon as one of them differs.

This module must not know models or what the files hold.
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
"""What transformers reads of a folder, tokenizer included."""

_SMALL = 2**20  # bytes: read sooner than looked up
_SETTLED = 2 * 10**9  # nanoseconds: a file changed just now may change again within one tick


def digest_of_folder(folder: Path) -> str:
    """Of every file that is read, by name and content."""
    found = {path for pattern in READ for path in folder.glob(pattern)}
    digest = hashlib.sha256()
    for path in sorted(path for path in found if path.is_file()):
        digest.update(f"{path.name}:{digest_of_file(path)}\n".encode())
    return digest.hexdigest()


def digest_of_file(path: Path) -> str:
    """The SHA-256 of a file, read anew unless it is known to be as it was."""
    path = path.resolve()
    known_as = home() / "digests" / hashlib.sha256(os.fsencode(path)).hexdigest()
    state = _state(path)
    if state["size"] > _SMALL and (known := _known(known_as, state)):
        return known
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    # Only where nothing moved while it was read, and the last change is past.
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
    """Whole or not at all; without a place to keep it, it is read again next time."""
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
