"""Digests of model files: the revision of a local folder or file.

The revision is part of the identity of a measurement, so every byte is read and any edit changes
it. Reading large files is slow, so a digest is cached with the path, size, inode and times of its
file. It is computed again if one of them differs.
"""

import hashlib
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from attnscope.loading.cache import home

READ = (
    *("config.json", "generation_config.json", "adapter_config.json", "*.safetensors"),
    *("*.safetensors.index.json", "pytorch_model*", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab*", "merges.txt", "*.model", "chat_template*"),
    "*processor_config.json",
)
"""The files of a folder that transformers reads, tokenizer and processor included."""

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
    entry = home() / "digests" / hashlib.sha256(os.fsencode(path)).hexdigest()
    state = _state(path)
    if state[0] > _SMALL and (known := _known(entry, state)):
        return known
    digest = sha256_of(path)
    # Cache the digest only if the file did not change while it was read, nor just before.
    settled = time.time_ns() - max(state[1:3]) > _SETTLED
    if state[0] > _SMALL and settled and state == _state(path):
        with suppress(OSError):  # of the cache
            entry.parent.mkdir(parents=True, exist_ok=True)
            unfinished = entry.with_name(f"{entry.name}.{os.getpid()}-{secrets.token_hex(4)}")
            unfinished.write_text(" ".join(map(str, (*state, digest))), encoding="ascii")
            unfinished.replace(entry)
    return digest


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, read now."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state(path: Path) -> tuple[int, ...]:
    """Size, times, inode and device of a file."""
    now = path.stat()
    return now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino, now.st_dev


def _known(entry: Path, state: tuple[int, ...]) -> str | None:
    """The cached digest of a file in this state."""
    try:
        *numbers, digest = entry.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return digest if numbers == [str(number) for number in state] else None
