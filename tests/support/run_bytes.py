"""A run directory as bytes, to compare two of them."""

from pathlib import Path


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file of a run."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
