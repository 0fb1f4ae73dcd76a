"""Prompts from files: the fields become regions, and whatever is wrong is named by its line."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import polars as pl
import pytest

from attnscope.errors import AttnscopeWarning, InputError
from attnscope.prompts.datasets import Layout, from_hub, from_records, hub_records, read
from support_errors import raises

RECORDS = [
    {"problem": "What is 2 + 2?", "answer": "4", "level": 1},
    {"problem": 'Say "hi",\nthen é {x}.', "answer": "hi", "level": 2},
]


def write_jsonl(path: Path) -> None:
    path.write_text("\n".join(json.dumps(record) for record in RECORDS) + "\n\n", "utf-8")


def write_csv(path: Path) -> None:
    path.write_text(
        'problem,answer,level\nWhat is 2 + 2?,4,1\n\n"Say ""hi"",\nthen é {x}.",hi,2\n', "utf-8-sig"
    )


def write_parquet(path: Path) -> None:
    pytest.importorskip("polars").DataFrame(RECORDS).write_parquet(path)


@pytest.mark.parametrize(
    ("ending", "write"),
    [
        ("jsonl", write_jsonl),
        ("ndjson", write_jsonl),
        ("csv", write_csv),
        ("parquet", write_parquet),
    ],
)
def test_records_become_prompts(tmp_path: Path, ending: str, write: Callable[[Path], None]) -> None:
    path = tmp_path / f"some.{ending}"
    write(path)
    samples = list(
        read(
            path,
            template="Level {level}. {question}\nAnswer in {{braces}}.",
            fields={"question": "problem"},
            system="Be exact.",
        )
    )
    assert [sample.answer for sample in samples] == ["4", "hi"]
    for sample, record in zip(samples, RECORDS, strict=True):
        assert sample.prompt.names == ("system", "level", "question")
        assert sample.prompt.read("question") == record["problem"]
        assert sample.prompt.read("level") == str(record["level"])
        assert sample.metadata["problem"] == record["problem"]
        assert sample.prompt.text.startswith("Be exact.\n\nLevel ")
        assert sample.prompt.text.endswith("\nAnswer in {braces}.")


def test_plain_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("\ufeffHow?\r\n\n  Why?\n", "utf-8")
    samples = list(read(path))
    assert [sample.prompt.read("question") for sample in samples] == ["How?", "  Why?"]
    assert samples[0].answer is None
    with raises(InputError, "no-answer"):
        samples[0].answered()


@pytest.mark.parametrize(
    ("name", "content", "code", "line"),
    [
        ("a.jsonl", b'{"question": "x"}\n{"question": \n', "broken-file", 2),
        ("a.jsonl", b'{"question": "x"}\n[1]\n', "broken-file", 2),
        ("a.jsonl", b'{"problem": "x", "level": 1}\n', "unknown-field", 1),
        ("a.jsonl", b'{"question": "x"}\n{"question": "  "}\n', "empty-prompt", 2),
        ("a.jsonl", b'{"question": null}\n', "empty-field", 1),
        ("a.jsonl", b'{"question": "x"}\n\xff\n', "not-utf8", 2),
        ("a.jsonl", b'{"question": "\\ud800"}\n', "lone-surrogate", 1),
        ("a.csv", b"question,level\nx,1\ny\n", "broken-file", 3),
        ("a.csv", b'question,level\n"x"y,1\n', "broken-file", 2),
        ("a.csv", b"problem\nx\n", "unknown-field", 2),
        ("a.txt", b"fine\n\xe2\x82\n", "not-utf8", 2),
    ],
)
def test_an_error_in_a_file_has_its_line(
    tmp_path: Path, name: str, content: bytes, code: str, line: int
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with raises(InputError, code, where=f"{path}, line {line}"):
        list(read(path))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"nonsense")
    with raises(InputError, "broken-file", where=str(path)):
        list(read(path))
    with raises(InputError, "unknown-kind-of-file", value=".xml"):
        list(read(tmp_path / "a.xml"))


@pytest.mark.parametrize(
    ("layout", "code"),
    [
        ({"template": "no slot"}, "bad-template"),
        ({"template": "{question"}, "bad-template"),
        ({"template": "{0}"}, "bad-template"),
        ({"template": "{question!r}"}, "bad-template"),
        ({"fields": {"problem": "question"}}, "unknown-slot"),
    ],
)
def test_a_bad_layout_is_refused(layout: dict[str, Any], code: str) -> None:
    with raises(InputError, code):
        Layout(**layout)


def test_a_missing_file_is_an_error_at_once(tmp_path: Path) -> None:
    with raises(InputError, "file-missing"):
        read(tmp_path / "none.jsonl")


def test_anything_that_yields_mappings() -> None:
    samples = list(from_records(RECORDS, fields={"question": "problem", "answer": "level"}))
    assert [sample.answer for sample in samples] == ["1", "2"]
    with raises(InputError, "unknown-field", value="question", where="record 0"):
        list(from_records(RECORDS))


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((arguments, options))
        return RECORDS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    samples = list(from_hub("some/set", split="test", fields={"question": "problem"}))
    assert asked == [(("some/set", None), {"split": "test", "revision": None})]
    assert len(samples) == 2


def test_a_folder_in_the_form_of_the_hub(tmp_path: Path) -> None:
    """Read by `datasets` itself, without a network."""
    rows = [{"text": f"Text {n}", "label": n, "picture": b"\x00"} for n in range(5)]
    frame = pl.DataFrame(rows)
    (tmp_path / "data").mkdir()
    frame.write_parquet(tmp_path / "data" / "test-00000.parquet")
    records = list(hub_records(str(tmp_path), "test[:3]"))
    assert records == [{"text": f"Text {n}", "label": n} for n in range(3)]  # no bytes
    samples = list(from_hub(str(tmp_path), split="test", template="{text}"))
    assert [sample.prompt.text for sample in samples] == [f"Text {n}" for n in range(5)]
    for name, split in ((str(tmp_path), "train"), ("not/there", "test")):
        with raises(InputError, "unreadable-dataset", name=name, split=split):
            hub_records(name, split)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises(InputError, "missing-package", package="datasets"):
        from_hub("some/set", split="test")


@pytest.mark.parametrize("value", ["1" * 5_000, "[" * 100_000 + "]" * 100_000])
def test_json_that_python_cannot_hold(tmp_path: Path, value: str) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text('{"question": "x"}\n{"question": "x", "n": ' + value + "}\n")
    with raises(InputError, "broken-file", where=f"{file}, line 2"):
        list(read(file))


@pytest.mark.parametrize(
    ("text", "words", "start"),
    [
        ("I do not know, but now I ask.", "now", 19),
        ("nowhere now", "now", 8),
        ("It is £5 now", "£5", 6),
        ("The code is 7. What?", "The code is 7.", 0),
        ("know-how, snow; now", "now", 16),
        ("我不知道", "不", 1),  # written without blanks: no word has an edge
        ("naïve now", "na", None),
        ("I know", "now", None),
        ("17 and 177", "7", None),
    ],
)
def test_a_mark_is_of_whole_words(text: str, words: str, start: int | None) -> None:
    records = [{"question": text, "control": words}]
    marked = from_records(records, mark={"ctl": "control"})
    if start is None:
        with raises(InputError, "mark-not-found", region="ctl", words=words):
            list(marked)
        return
    (sample,) = marked
    assert [r.start for r in sample.prompt.spans("ctl")] == [start]


def test_a_mark_with_several_places_warns_once_for_a_file() -> None:
    records = [{"question": text, "word": "now"} for text in ("now", "now and now", "now, now")]
    with pytest.warns(AttnscopeWarning) as warned:
        samples = list(from_records(records, mark={"ctl": "word"}))
    assert len(warned) == 1
    assert [s.prompt.spans("ctl")[0].start for s in samples] == [0, 0, 0]
