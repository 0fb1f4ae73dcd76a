"""Keeps finished reports, so that each state of a run is judged and drawn once.

Reports are stored in the cache folder of attnscope and not read from the run directory: a run may
come from other people, and their HTML is not checked.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnscope
from attnscope.errors import InputError
from attnscope.figures.export import write
from attnscope.loading.cache import home
from attnscope.report.build import build
from attnscope.run.layout import digest_of
from attnscope.spec.experiment_yaml import experiment_to_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnscope.figures import Drawing
    from attnscope.figures.verdict_cache import VerdictCache
    from attnscope.run.store import Run

KEPT = 64
"""Number of reports that are kept."""


def write_report(run: Run, path: str | Path, **options: Any) -> Path:
    """Write the report of a run atomically; `options` are those of `build`."""
    path = Path(path)
    write(path, report(run, **options).encode())
    return path


def report(
    run: Run,
    *,
    verdict_cache: VerdictCache | None = None,
    drawn: Mapping[str, Drawing] | None = None,
    **options: Any,
) -> str:
    """The report of a run, from the cache if the run, the options and attnscope are the same."""
    file = home() / "reports" / f"{_digest(run, options)}.html"
    with suppress(OSError, UnicodeDecodeError):
        text = file.read_text(encoding="utf-8")
        for batch in run.batches:
            batch.check(run.path, check_content=True)  # a damaged run has no report
        file.touch()
        return text
    text = build(run, verdict_cache=verdict_cache, drawn=drawn, **options)
    with suppress(InputError, OSError):  # without a cache, the next report takes as long again
        write(file, text.encode())
        for old in sorted(file.parent.glob("*.html"), key=lambda f: -f.stat().st_mtime)[KEPT:]:
            old.unlink()
    return text


def _digest(run: Run, options: dict[str, Any]) -> str:
    """Of everything that the report is made from; what the run has read is not read again."""
    state = hashlib.sha256(_program().encode())
    default = {name: option.default for name, option in signature(build).parameters.items()}
    chosen = {name: value for name, value in options.items() if value != default.get(name)}
    read = [chosen, run.environment, run.complete, experiment_to_yaml(run.experiment)]
    state.update(json.dumps(read, sort_keys=True, default=repr).encode())
    for name in ("metadata.jsonl", "claims.yaml"):
        path = run.path / name
        state.update((digest_of(path) if path.is_file() else "none").encode())
    for batch in run.batches:
        state.update(batch.id.encode() + batch.content())
    return state.hexdigest()


@cache
def _program() -> str:
    """The digest of the sources of attnscope."""
    folder = Path(attnscope.__file__).parent
    patterns = ("*.py", "*.html", "*.css", "*.js", "*.yaml")
    files = sorted(path for pattern in patterns for path in folder.rglob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
