"""The prompts of an experiment, from their source: before any template, insertion or tokenizer."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from attnscope.errors import InputError
from attnscope.prompts import (
    Layout,
    Sample,
    document_samples,
    equation_samples,
    from_records,
    made_conversations,
    math_samples,
    needle_samples,
    read,
    read_conversations,
    spatial_samples,
    speech_samples,
)
from attnscope.prompts.datasets import hub_records
from attnscope.prompts.shapes import shape_records
from attnscope.run.layout import digest_of
from attnscope.run.schemas import REPEATS
from attnscope.spec.experiment import Experiment
from attnscope.spec.prompt_sources import (
    ConversationPrompts,
    FilePrompts,
    FolderPrompts,
    HarnessPrompts,
    HubPrompts,
    InlinePrompts,
    RecordPrompts,
    ShapesPrompts,
    TokenPrompts,
)
from attnscope.tokens import Prompt
from attnscope.vision.pictures import ENDINGS

BUILDERS: dict[str, Callable[..., Iterable[Sample]]] = {
    "spatial": spatial_samples,
    "math": math_samples,
    "equations": equation_samples,
    "needle": needle_samples,
    "documents": document_samples,
    "speech": speech_samples,
}
"""By source; each takes the number of prompts, and the source's own keys."""
CONVERSATIONS = 16
"""As many are made up, unless a number is given."""


def hub_file(experiment: Experiment) -> bytes | None:
    """The records that the prompts take from a hub or a folder of pictures, or that are made, as a
    JSONL file; None if there are none, or if a run has stored them."""
    prompts = experiment.prompts
    if not isinstance(prompts, HubPrompts | FolderPrompts | ShapesPrompts):
        return None
    if prompts.path is not None:
        return None
    every: Iterable[Mapping[str, Any]]
    if isinstance(prompts, FolderPrompts):
        every = picture_records(Path(prompts.folder).expanduser(), prompts.question)
    elif isinstance(prompts, ShapesPrompts):
        every = shape_records(prompts.seed, prompts.tasks)
    else:
        about = prompts.name, prompts.split, prompts.config, prompts.revision
        every = hub_records(*about, image=prompts.image)
    records = islice(every, prompts.count)
    lines = [json.dumps(one, ensure_ascii=False, default=_as_text) + "\n" for one in records]
    return "".join(lines).encode("utf-8", "backslashreplace")


def _as_text(value: Any) -> str:
    """A value that JSON does not have; the bytes of a picture in base64."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def picture_records(folder: Path, question: str) -> Iterator[dict[str, Any]]:
    """The pictures of a folder and its subfolders, sorted by name."""
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {str(folder)!r}; give the folder of the pictures",
            code="file-missing",
            path=str(folder),
        )
    files = [path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS]
    for path in sorted(path for path in files if path.is_file()):
        inside = path.relative_to(folder)
        yield {
            "image": str(path.absolute()),
            "file": inside.as_posix(),
            "label": inside.parent.as_posix() if len(inside.parts) > 1 else None,
            "question": question,
        }


def file_digest(experiment: Experiment, content: bytes | None = None) -> str | None:
    """The digest of the file that the prompts come from, or of its `content`; None without one."""
    prompts = experiment.prompts
    if content is not None:
        return _checked(hashlib.sha256(content).hexdigest(), prompts, str(prompts.source))
    path_of_prompts = getattr(prompts, "path", None)
    if path_of_prompts is None:
        return None
    path = Path(path_of_prompts)
    if not path.is_file():
        raise InputError(
            f"the prompt file {path} does not exist", code="file-missing", path=str(path)
        )
    return _checked(digest_of(path), prompts, str(path))


def _checked(digest: str, prompts: Any, path: str) -> str:
    """The digest; an error if the experiment names another one."""
    expected = getattr(prompts, "digest", None)
    if expected not in (None, digest):
        raise InputError(
            f"{path} has other content than the experiment names: its SHA-256 starts with "
            f"{digest[:12]}, and prompts.digest starts with {str(expected)[:12]}; restore the "
            "file, or leave digest out",
            code="file-changed",
            path=path,
            digest=digest,
            expected=expected,
        )
    return digest


def prompt_metadata(experiment: Experiment, samples: list[Sample]) -> Iterator[dict[str, Any]]:
    """What a source knows, but not what is written in the prompt itself; and which prompts are
    one asked again, with the same pictures: repeats say less than others would, so readers make
    them one unit."""
    in_prompt: set[str] = set()
    if isinstance(experiment.prompts, RecordPrompts):
        layout = Layout(template=experiment.prompts.template, fields=experiment.prompts.fields)
        in_prompt = {layout.fields.get(slot, slot) for slot in layout.slots}
    texts = [(sample.prompt.text, repr(sample.images)) for sample in samples]
    first: dict[tuple[str, str], int] = {}
    for number, question in enumerate(texts):
        first.setdefault(question, number)
    for sample, question in zip(samples, texts, strict=True):
        again = {} if len(first) == len(samples) else {REPEATS: first[question]}
        yield again | {
            name: value for name, value in sample.metadata.items() if name not in in_prompt
        }


def samples_of(experiment: Experiment, content: bytes | None = None) -> list[Sample]:
    """The prompts of an experiment, before any template or insertion: all of them, then all again
    as often as they are repeated, so that repeats have other numbers, and so other seeds.

    `content` is that of `hub_file`, if it is known.
    """
    return _samples(experiment, content) * experiment.repeats


def _samples(experiment: Experiment, content: bytes | None) -> list[Sample]:
    prompts = experiment.prompts
    if isinstance(prompts, RecordPrompts):
        layout = prompts.model_dump(include={"template", "fields", "system", "image", "mark"})
        content = hub_file(experiment) if content is None else content
        return _first(_records(prompts, content, layout), prompts.count, _name_of(prompts))
    if isinstance(prompts, ConversationPrompts):
        if prompts.path is None:
            conversations = made_conversations(
                prompts.count or CONVERSATIONS, turns=prompts.turns, seed=prompts.seed
            )
            return list(conversations)
        return _first(read_conversations(prompts.path, prompts.field), prompts.count, prompts.path)
    if isinstance(prompts, HarnessPrompts):
        raise InputError(
            "prompts of the source lm-eval are written by lm-evaluation-harness: use attnscope "
            f"evaluate --task {prompts.task}",
            code="harness-prompts",
            task=prompts.task,
        )
    if isinstance(prompts, TokenPrompts):  # every tokenizer has its own
        return [Sample(Prompt(f"tokens {n}")) for n in range(prompts.count)]
    options = prompts.model_dump(exclude={"source", "count", "digest"})
    return list(BUILDERS[prompts.source](prompts.count, **options))


def _records(
    prompts: RecordPrompts, content: bytes | None, layout: Mapping[str, Any]
) -> Iterator[Sample]:
    if isinstance(prompts, InlinePrompts):
        records = ({"question": r} if isinstance(r, str) else r for r in prompts.records)
        return from_records(records, **layout)
    if content is not None:
        return from_records(map(json.loads, content.split(b"\n")[:-1]), **layout)
    assert isinstance(prompts, FilePrompts | HubPrompts | FolderPrompts | ShapesPrompts)
    return read(prompts.path or "", **layout)


def short_name(prompts: Any) -> dict[str, str]:
    """The name of a data set or of a folder of pictures, without the path."""
    if isinstance(prompts, FolderPrompts):
        return {"folder": Path(prompts.folder).name}
    if not isinstance(prompts, HubPrompts):
        return {}
    return {"name": Path(prompts.name).name if Path(prompts.name).exists() else prompts.name}


def _name_of(prompts: RecordPrompts) -> str:
    if isinstance(prompts, HubPrompts):
        return prompts.name
    if isinstance(prompts, FolderPrompts):
        return prompts.folder
    return prompts.path if isinstance(prompts, FilePrompts) else "the list of prompts"


def _first(samples_found: Iterable[Sample], count: int | None, path: str) -> list[Sample]:
    samples = list(islice(samples_found, count))
    if not samples or len(samples) < (count or 0):
        raise InputError(
            f"{path} has {len(samples)} prompts, and prompts.count is {count or 'all'}; "
            "give a smaller count, or leave it out",
            code="too-few-prompts",
            path=path,
            prompts=len(samples),
            count=count,
        )
    return samples
