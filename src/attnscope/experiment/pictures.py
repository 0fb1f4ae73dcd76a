"""The pictures of an experiment: read from records, named by their digests, changed by conditions.

A run keeps each file as `images/DIGEST.png`. The records of the run name these files, so nothing
in it points outside.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import InputError
from attnscope.prompts import Sample
from attnscope.spec.conditions import WITHOUT_FILE
from attnscope.spec.experiment import Experiment
from attnscope.spec.prompt_sources import InlinePrompts, RecordPrompts
from attnscope.tokens.modalities import IMAGE_MARK
from attnscope.vision.pictures import blank_picture, decode, is_path, picture_bytes, suffix_of

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = "images"
"""Of a run: the files of its pictures."""


@dataclass(frozen=True, eq=False)
class PictureFile:
    """A picture of an experiment."""

    name: str
    """In the run: the folder, the digest and the ending of the file."""
    where: str
    """For messages."""
    source: bytes | Path
    """The file, or where it is."""

    def content(self) -> bytes:
        """The bytes of the file; an error if they have changed since the plan was made."""
        data = self.source if isinstance(self.source, bytes) else picture_bytes(self.source)[0]
        if _digest(data) not in self.name:
            raise InputError(
                f"the picture {self.where} has changed since the run was planned; start again",
                code="file-changed",
                path=self.where,
            )
        return data

    def open(self) -> Image:
        """The picture, in RGB."""
        return decode(self.content(), self.where)


@dataclass(frozen=True, eq=False, kw_only=True)
class PromptPictures:
    """Which pictures every prompt has under each condition."""

    files: Mapping[str, PictureFile]
    """By name."""
    prompts: tuple[tuple[str, ...], ...]
    """The names of the pictures of each prompt of the source; repeats have the same."""
    changes: Mapping[str, str | None]
    """By condition: blank, next, the name of a file, or None."""

    def names(self, prompt: int, condition: str) -> tuple[str, ...]:
        """The names of the pictures of a prompt under a condition; blank ones end with `#blank`."""
        change = self.changes[condition]
        names = self.prompts[prompt % len(self.prompts)]
        if change == "blank":
            return tuple(f"{name}#blank" for name in names)
        if change == "next":
            return self.prompts[(prompt + 1) % len(self.prompts)]
        return names if change is None else (change,) * len(names)

    def images(self, prompt: int, condition: str) -> list[Image]:
        """The pictures of a prompt under a condition, decoded."""
        pictures = []
        for name in self.names(prompt, condition):
            file, _, blank = name.partition("#")
            picture = self.files[file].open()
            pictures.append(blank_picture(picture) if blank else picture)
        return pictures


@dataclass(frozen=True, eq=False)
class Gathered:
    """An experiment whose pictures are found."""

    experiment: Experiment
    """With the names of files in place of paths."""
    samples: list[Sample]
    pictures: PromptPictures | None
    """None without pictures."""
    content: bytes | None
    """The prompt file that the run keeps, if it is not the one that was given."""


def gather(experiment: Experiment, samples: list[Sample], content: bytes | None) -> Gathered:
    """Read the pictures of all prompts and conditions. Every file is decoded once, so that a broken
    one is an error before anything is measured."""
    changes = {name: condition.image for name, condition in experiment.conditions.items()}
    if not any(sample.images for sample in samples):
        for name, change in changes.items():
            if change is not None:
                raise InputError(
                    f"condition {name!r} changes pictures (image: {change}), and the prompts have "
                    f"none; give each record the field 'image', and {IMAGE_MARK} in its text",
                    code="no-images",
                    condition=name,
                )
        return Gathered(experiment, samples, None, content)
    prompts = experiment.prompts
    assert isinstance(prompts, RecordPrompts)
    files: dict[str, PictureFile] = {}
    file = getattr(prompts, "path", None)
    base = None if file is None else Path(file).parent
    unique = samples[: len(samples) // experiment.repeats]
    names = [tuple(_named(s.images, base, files, f"prompt {n}")) for n, s in enumerate(unique)]
    for name, change in changes.items():
        if change is not None and change not in WITHOUT_FILE:
            (changes[name],) = _named((change,), None, files, f"condition {name!r}")
    _check_next(changes, names)
    settled = [_settled(s, prompts.image, of) for s, of in zip(unique, names, strict=True)]
    keys: dict[str, Any] = {}
    if changes != {name: one.image for name, one in experiment.conditions.items()}:
        dumped = {name: one.model_dump() for name, one in experiment.conditions.items()}
        keys["conditions"] = {name: one | {"image": changes[name]} for name, one in dumped.items()}
    if isinstance(prompts, InlinePrompts):
        records = [_record(record, s) for record, s in zip(prompts.records, settled, strict=False)]
        records += prompts.records[len(settled) :]
        keys["prompts"] = prompts.model_dump() | {"records": records}
        content = None
    else:
        lines = [json.dumps(dict(s.metadata), ensure_ascii=False, default=str) for s in settled]
        content = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
    pictures = PromptPictures(files=files, prompts=tuple(names), changes=changes)
    return Gathered(
        experiment.with_keys(**keys) if keys else experiment,
        settled * experiment.repeats,
        pictures,
        content,
    )


def _named(
    sources: Sequence[Any], base: Path | None, files: dict[str, PictureFile], where: str
) -> Iterator[str]:
    """The names of pictures, which are added to `files`."""
    for number, source in enumerate(sources, start=1):
        try:
            file = _file(source, base)
            if file.name not in files:
                file.open()
        except InputError as error:
            message = f"{where}, picture {number}: {error}"
            raise InputError(message, code=error.code, **error.values) from error
        files.setdefault(file.name, file)
        yield file.name


def _file(source: Any, base: Path | None) -> PictureFile:
    """The file of a picture as a record has it. Paths in a prompt file stay in its folder."""
    if isinstance(source, Mapping):  # as `datasets` and its Parquet files have pictures
        source = source.get("bytes") or source.get("path")
    if not isinstance(source, str | bytes | Path) or not source:
        raise InputError(
            f"{source!r:.60} is no picture; give a path, or a file in base64",
            code="bad-image",
            got=type(source).__name__,
        )
    if base is not None and is_path(source):
        _check_inside(str(source), base)
    data, where = picture_bytes(source, base)
    name = f"{FOLDER}/{_digest(data)}{suffix_of(data)}"
    kept = (base or Path()) / str(source) if is_path(source) else data
    return PictureFile(name, where, kept.expanduser() if isinstance(kept, Path) else kept)


def _check_inside(name: str, base: Path) -> None:
    try:
        inside = (base / name).resolve().is_relative_to(base.resolve())
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise InputError(
            f"the picture {name!r} is outside the folder of the prompt file ({base}); move it "
            "there, and give its path from there",
            code="path-outside-folder",
            value=name,
        )


def _check_next(changes: Mapping[str, str | None], names: list[tuple[str, ...]]) -> None:
    """Refuse to exchange pictures between prompts with different numbers of them."""
    if "next" not in changes.values():
        return
    counts = {len(of) for of in names}
    if len(names) < 2 or len(counts) > 1:
        raise InputError(
            "image: next takes the pictures of the next prompt; it needs two or more prompts with "
            f"the same number of pictures, and {len(names)} prompts have {sorted(counts)}",
            code="no-next-image",
            prompts=len(names),
        )


def _settled(sample: Sample, field: str | None, names: tuple[str, ...]) -> Sample:
    """The sample with the names of its files in place of its pictures."""
    if not names or field is None:
        return sample
    several = isinstance(sample.metadata[field], list | tuple)
    named = list(names) if several else names[0]
    return replace(sample, metadata={**sample.metadata, field: named}, images=names)


def _record(record: Any, sample: Sample) -> Any:
    return record if isinstance(record, str) else dict(sample.metadata)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
