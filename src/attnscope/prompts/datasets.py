"""Prompts from files and data sets: JSONL, CSV, Parquet, plain text, Hugging Face `datasets`.

A record becomes a prompt through a template: text with slots in braces. Each slot is filled from
the field it is mapped to and becomes a region of that name, so

    read("math500.jsonl", template="{question}", fields={"question": "problem"})

makes prompts with a region `question`. Without a template the prompt is the `question` alone.
"""

import csv
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

from attnscope.errors import AttnscopeWarning, InputError, missing_package, unknown
from attnscope.prompts.sample import Sample, compose
from attnscope.tokens.modalities import IMAGE_MARK
from attnscope.tokens.regions import Prompt, Region, join
from attnscope.tokens.whole_words import WholeWords

Record = Mapping[str, Any]


LONGEST = 8_000_000
"""Characters of a prompt: beyond what any model reads."""
LONGEST_LINE = 64 * 2**20
"""Bytes of a line: more would be read at once before anything is known of it."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a record becomes a prompt."""

    template: str = "{question}"
    """Text with slots in braces; `{{` and `}}` are braces themselves."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Slot to field of the record, where they are not called the same. The slot `answer` says
    where the answer is."""
    system: str | None = None
    """A system prompt to put above every prompt, as the region `system`."""
    image: str | None = "image"
    """The field with the picture, or with a list of them; None if records have no pictures. Each
    picture needs one `<image>` in the text."""
    mark: Mapping[str, str] = field(default_factory=dict)
    """Region to field of the record: the first place where the prompt has the field's text as
    whole words, such as a needle. It has to be there; several places are a warning."""

    def __post_init__(self) -> None:
        slots = self.slots
        if not slots:
            raise InputError(
                f"the template {self.template!r} has no slot; write one in braces: '{{question}}'",
                code="bad-template",
                template=self.template,
            )
        stray = [slot for slot in self.fields if slot not in (*slots, "answer")]
        if stray:
            raise unknown("slot", stray[0], (*slots, "answer"))

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the slots, in order."""
        return tuple(name for _, name in self.parts if name is not None)

    @property
    def parts(self) -> list[tuple[str, str | None]]:
        """Literal text and the slot behind it, one after the other."""
        try:
            parsed = list(Formatter().parse(self.template))
        except ValueError as error:
            raise InputError(
                f"the template {self.template!r} is broken: {error}",
                code="bad-template",
                template=self.template,
            ) from error
        for _, name, details, conversion in parsed:
            if name is not None and (not name.isidentifier() or details or conversion):
                raise InputError(
                    f"the template {self.template!r} has a slot {name!r} that is not a plain name; "
                    "write '{question}', and literal braces as '{{' and '}}'",
                    code="bad-template",
                    template=self.template,
                    slot=name,
                )
        return [(text, name) for text, name, _, _ in parsed]


def read(path: str | Path, **layout: Any) -> Iterator[Sample]:
    """The samples of a file, by its ending; the keywords are those of `Layout`.

    `.jsonl` and `.ndjson` have one object a line, `.csv` a header line, `.parquet` columns, and
    `.txt` one prompt a line (empty lines are passed over), in a field called `question`.
    """
    return _samples(records_of(path), Layout(**layout))


def records_of(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Where each record of a file stands, and the record."""
    path = Path(path)
    if path.suffix not in _READERS:
        raise unknown("kind of file", path.suffix, _READERS)
    if not path.is_file():
        raise InputError(
            f"the prompt file {path} does not exist", code="file-missing", path=str(path)
        )
    return _READERS[path.suffix](path)


def from_records(records: Iterable[Record], **layout: Any) -> Iterator[Sample]:
    """The samples of anything that yields mappings: a list, a `datasets.Dataset`, a frame."""
    numbered = ((f"record {n}", record) for n, record in enumerate(records))
    return _samples(numbered, Layout(**layout))


def from_hub(
    name: str, *, split: str, config: str | None = None, revision: str | None = None, **layout: Any
) -> Iterator[Sample]:
    """The samples of a data set of the Hugging Face hub (needs the extra `attnscope[data]`)."""
    return from_records(hub_records(name, split, config, revision), **layout)


def hub_records(
    name: str,
    split: str,
    config: str | None = None,
    revision: str | None = None,
    image: str | None = None,
) -> Iterable[Record]:
    """The records of a data set of the hub, or of a folder that `datasets` can read. Columns with
    sound, bytes or pictures are left out, except for the column `image`, which has files."""
    try:
        import datasets
    except ImportError as error:
        raise missing_package(f"reading {name!r}", "datasets", "data") from error
    quiet = datasets.are_progress_bars_disabled()
    try:
        datasets.disable_progress_bars()
        records = datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # of the network, of the name, of the split, of the files
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"the data set {name!r} (split {split!r}) cannot be loaded: {lines[0]}",
            code="unreadable-dataset",
            name=name,
            split=split,
        ) from error
    finally:
        if not quiet:
            datasets.enable_progress_bars()
    features = getattr(records, "features", None) or {}
    unreadable = [
        column
        for column, feature in features.items()
        if not _is_plain(feature) and not (column == image and _has_pictures(feature))
    ]
    if image in features and _has_pictures(features[image]):
        records = records.cast_column(image, _as_files(features[image], datasets.Image))
    plain: Iterable[Record] = records.remove_columns(unreadable) if unreadable else records
    return plain


def _has_pictures(feature: Any) -> bool:
    """Whether a column has pictures, or lists of them."""
    return type(getattr(feature, "feature", feature)).__name__ == "Image"


def _as_files(feature: Any, image: Any) -> Any:
    """The type of a column of pictures that are not decoded."""
    single = image(decode=False)
    return type(feature)(single) if hasattr(feature, "feature") else single


def _is_plain(feature: Any) -> bool:
    """Whether a column has numbers, texts, or lists of them."""
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _is_plain(inner)
    return type(feature).__name__ in ("Value", "ClassLabel") and "binary" not in feature.dtype


def _samples(records: Iterable[tuple[str, Record]], layout: Layout) -> Iterator[Sample]:
    unclear = dict(layout.mark)
    for where, record in records:
        try:
            answer = None
            if "answer" in layout.fields or record.get("answer") is not None:
                answer = _value(record, "answer", layout.fields.get("answer", "answer"))
            prompt = _prompt(record, layout)
            images = _images(record, layout, prompt)
        except InputError as error:
            values = {**error.values, "where": where}
            raise InputError(f"{where}: {error}", code=error.code, **values) from error
        for name in [n for n in unclear if _several(prompt, n)]:
            del unclear[name]  # one warning for a file, not one for each record
            warnings.warn(
                f"{where}: the text has {prompt.read(name)!r:.80} at several places, and the first "
                f"is the region {name!r}; so it is in every record of this kind",
                AttnscopeWarning,
                stacklevel=2,
            )
        yield Sample(prompt, answer, dict(record), images)


def _images(record: Record, layout: Layout, prompt: Prompt) -> tuple[Any, ...]:
    """The pictures of a record, as it has them; an error unless each has its place in the text."""
    value = None if layout.image is None else record.get(layout.image)
    if value is None or (isinstance(value, str | list | tuple) and not value):
        return ()
    images = tuple(value) if isinstance(value, list | tuple) else (value,)
    marks = prompt.text.count(IMAGE_MARK)
    if marks == len(images):
        return images
    raise InputError(
        f"the field {layout.image!r} has {len(images)} pictures, and the prompt has {marks} places "
        f"for them; write {IMAGE_MARK} where a picture belongs, as in template: "
        f"'{IMAGE_MARK}{layout.template}', or 'image: null' if records have no pictures",
        code="no-image-mark" if marks == 0 else "image-count",
        images=len(images),
        marks=marks,
    )


def _several(prompt: Prompt, name: str) -> bool:
    return len(WholeWords([prompt.read(name)]).spans(prompt.text)) > 1


def _prompt(record: Record, layout: Layout) -> Prompt:
    parts: list[tuple[str | None, str]] = []
    for text, slot in layout.parts:
        parts.append((None, text))
        if slot is not None:
            parts.append((slot, _value(record, slot, layout.fields.get(slot, slot))))
    if not any(text.strip() for name, text in parts if name is not None):
        raise InputError(
            f"the prompt is empty: the slots {', '.join(layout.slots)} have no text",
            code="empty-prompt",
            slots=layout.slots,
        )
    prompt = compose(layout.system, join(parts))
    if len(prompt.text) > LONGEST:
        raise InputError(
            f"the prompt has {len(prompt.text):,} characters; the limit is {LONGEST:,}",
            code="prompt-too-long",
            characters=len(prompt.text),
            limit=LONGEST,
        )
    for name, field_name in layout.mark.items():
        prompt = mark(prompt, name, _value(record, name, field_name))
    return prompt


def mark(prompt: Prompt, name: str, words: str) -> Prompt:
    """The prompt with the first place where it has `words`, as whole words, as a region."""
    spans = WholeWords([words]).spans(prompt.text)
    if not spans:
        inside = " as whole words, only inside others" if words and words in prompt.text else ""
        raise InputError(
            f"the {name} {words!r:.80} is not in the text{inside} ({prompt.text!r:.60} …)",
            code="mark-not-found",
            region=name,
            words=words,
        )
    region = Region(*spans[0], name)
    return Prompt(prompt.text, (*prompt.regions, region), prompt.complete)


def _value(record: Record, slot: str, field_name: str) -> str:
    if field_name not in record:
        raise InputError(
            f"there is no field {field_name!r} for {{{slot}}}; the fields are {', '.join(record)}",
            code="unknown-field",
            value=field_name,
            known=list(record),
        )
    value = record[field_name]
    if value is None:
        raise InputError(
            f"the field {field_name!r} for {{{slot}}} has no value",
            code="empty-field",
            value=field_name,
        )
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, decoded one by one so that a broken one can be named."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            if len(line) > LONGEST_LINE:
                raise InputError(
                    f"{path}, line {number}: more than {LONGEST_LINE:,} bytes long",
                    code="line-too-long",
                    where=f"{path}, line {number}",
                    limit=LONGEST_LINE,
                )
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}, line {number}: not UTF-8 text: {error}",
                    code="not-utf8",
                    where=f"{path}, line {number}",
                ) from error


def _read_jsonl(path: Path) -> Iterator[tuple[str, Record]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number of 5,000 digits
            raise InputError(
                f"{where}: broken JSON: {error}", code="broken-file", where=where
            ) from error
        if not isinstance(record, dict):
            raise InputError(
                f"{where}: expected an object in braces, not {line.strip()[:40]!r}",
                code="broken-file",
                where=where,
            )
        yield where, record


def _read_csv(path: Path) -> Iterator[tuple[str, Record]]:
    rows = csv.reader((line for _, line in _lines(path)), strict=True)
    header: list[str] = []
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise InputError(
                f"{path}, line {rows.line_num}: broken CSV: {error}",
                code="broken-file",
                where=f"{path}, line {rows.line_num}",
            ) from error
        if row is None:
            return
        if not row:
            continue
        if not header:
            header = row
        elif len(row) != len(header):
            raise InputError(
                f"{path}, line {rows.line_num}: {len(row)} values for {len(header)} fields "
                f"({', '.join(header)})",
                code="broken-file",
                where=f"{path}, line {rows.line_num}",
            )
        else:
            yield f"{path}, line {rows.line_num}", dict(zip(header, row, strict=True))


def _read_parquet(path: Path) -> Iterator[tuple[str, Record]]:
    import polars  # only where a Parquet file is read: the engine does without

    try:
        frame = polars.read_parquet(path)
    except polars.exceptions.PolarsError as error:
        raise InputError(
            f"{path}: not a readable Parquet file: {error}", code="broken-file", where=str(path)
        ) from error
    for number, record in enumerate(frame.iter_rows(named=True)):
        yield f"{path}, row {number}", record


def _read_text(path: Path) -> Iterator[tuple[str, Record]]:
    for number, line in _lines(path):
        if line.strip():
            yield f"{path}, line {number}", {"question": line.rstrip("\r\n")}


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Record]]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
