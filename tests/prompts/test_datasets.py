"""Prompts from files: the fields become regions, and whatever is wrong is named by its line."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attnscope.errors import AttnscopeWarning, InputError
from attnscope.prompts.datasets import Layout, from_hub, from_records, read

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
    with pytest.raises(InputError, match="no answer to write"):
        samples[0].answered()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"question": "x"}\n{"question": \n', "line 2: broken JSON"),
        ("a.jsonl", b'{"question": "x"}\n[1]\n', r"line 2: expected an object in braces, not '\[1"),
        ("a.jsonl", b'{"problem": "x", "level": 1}\n', "line 1: .*fields are problem, level"),
        ("a.jsonl", b'{"question": "x"}\n{"question": "  "}\n', "line 2: the prompt is empty"),
        ("a.jsonl", b'{"question": null}\n', "line 1: the field 'question' for .* has no value"),
        ("a.jsonl", b'{"question": "x"}\n\xff\n', "line 2: not UTF-8"),
        ("a.jsonl", b'{"question": "\\ud800"}\n', "line 1: .*lone surrogate"),
        ("a.csv", b"question,level\nx,1\ny\n", r"line 3: 1 values for 2 fields \(question, level"),
        ("a.csv", b'question,level\n"x"y,1\n', "line 2: broken CSV"),
        ("a.csv", b"problem\nx\n", "line 2: there is no field 'question'.*fields are problem"),
        ("a.parquet", b"nonsense", "a.parquet: not a readable Parquet file"),
        ("a.txt", b"fine\n\xe2\x82\n", "line 2: not UTF-8"),
        ("a.xml", b"<a/>", r"unknown kind of file, a.xml: '.xml'; known: .jsonl"),
    ],
)
def test_a_broken_file_says_where(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(read(path))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"template": "no slot"}, "has no slot"),
        ({"template": "{question"}, "is broken"),
        ({"template": "{0}"}, "slot '0' that is not a plain name"),
        ({"template": "{question!r}"}, "not a plain name"),
        ({"fields": {"problem": "question"}}, "unknown slot in the field mapping: 'problem'"),
    ],
)
def test_a_bad_layout_says_what_is_wrong(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Layout(**layout)


def test_a_missing_file_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        read(tmp_path / "none.jsonl")


def test_anything_that_yields_mappings() -> None:
    samples = list(from_records(RECORDS, fields={"question": "problem", "answer": "level"}))
    assert [sample.answer for sample in samples] == ["1", "2"]
    with pytest.raises(InputError, match="record 0: there is no field 'question'"):
        list(from_records(RECORDS))


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((arguments, options))
        return RECORDS

    package = ModuleType("datasets")
    package.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    samples = list(from_hub("some/set", split="test", fields={"question": "problem"}))
    assert asked == [(("some/set", None), {"split": "test"})]
    assert len(samples) == 2


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'attnscope\[data\]'"):
        from_hub("some/set", split="test")


@pytest.mark.parametrize("value", ["1" * 5_000, "[" * 100_000 + "]" * 100_000])
def test_json_that_python_cannot_hold(tmp_path: Path, value: str) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text('{"question": "x"}\n{"question": "x", "n": ' + value + "}\n")
    with pytest.raises(InputError, match="line 2: broken JSON"):
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
        with pytest.raises(InputError) as error:
            list(marked)
        assert error.value.code == "mark-not-found"
        assert error.value.values == {"region": "ctl", "words": words}
        return
    (sample,) = marked
    assert [r.start for r in sample.prompt.spans("ctl")] == [start]


def test_a_mark_with_several_places_is_told_once_for_a_file() -> None:
    records = [{"question": text, "word": "now"} for text in ("now", "now and now", "now, now")]
    with pytest.warns(AttnscopeWarning) as warned:
        samples = list(from_records(records, mark={"ctl": "word"}))
    assert len(warned) == 1
    assert [s.prompt.spans("ctl")[0].start for s in samples] == [0, 0, 0]
