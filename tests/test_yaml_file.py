"""YAML is plain data: any file gives data or an error with its line."""

from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnscope.errors import InputError
from attnscope.yaml_file import parse_yaml

STRANGE = ["!!bool b", "!!timestamp x", "!!int", "!!float x", "!!null x", "!!str 5", "1:2", "-1:30",
           "1:2.5", "!!set {a}", "!!omap [a: 1]", "!!binary x", "!x 1", "0x_", "0b_", "2026-99-99",
           "!!python/name:os.system"]  # fmt: skip


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("where", ["a: {}", "a:\n- {}", "{}: 1", "{}"])
def test_unreadable_values_are_errors_with_a_line(value, where):
    with pytest.raises(InputError) as error:
        parse_yaml("# a comment\n" + where.replace("{}", value), "x.yaml")
    assert error.value.code in ("yaml-value", "yaml-key", "broken-yaml")


def test_the_error_has_the_line_and_the_value():
    with pytest.raises(InputError) as error:
        parse_yaml("a: 1\nb: !!bool b\n", "x.yaml")
    assert error.value.code == "yaml-value"
    assert error.value.line == 2
    assert error.value.value == "b"


def test_plain_values_stay_what_they_are():
    text = "a: [1, -2.5, 1e3, true, null, x, '1:2', \"!!bool b\", 0x1F, document:1]\nb: {c: d}"
    data, lines = parse_yaml(text, "x.yaml")
    values = [1, -2.5, "1e3", True, None, "x", "1:2", "!!bool b", 31, "document:1"]
    assert data == {"a": values, "b": {"c": "d"}}
    assert lines["b", "c"] == 2


WORDS = st.sampled_from(
    ["!!", "!", "bool", "int", "float", "null", "timestamp", "set", "omap", "pairs", "binary", "=",
     "<<", ": ", "- ", "? ", "\n", "  ", "[", "]", "{", "}", ",", "&a ", "*a", "|", ">", "'", '"',
     "0x", "0b", "0o", "_", ":", ".", "e", "inf", "nan", "~", "%YAML 9.9", "---", "...", "\t",
     "2026-01-01", "T", "Z", "+", "-", "1", "60", "true", "off", "\ufeff", "\x85", "\0", "#"]
)  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(WORDS | st.text(max_size=3), max_size=12).map("".join))
@example("!!bool b")
@example("? [a]\n: 1")
def test_any_small_text_is_data_or_an_error(text):
    with suppress(InputError):
        parse_yaml(text, "x.yaml")


def test_only_true_and_false_are_truth_values() -> None:
    """A list of words may contain `no` without quotes."""
    data, _ = parse_yaml("words: [no, not, yes, on, off, N]\nchat: false\nbos: True", "x.yaml")
    assert data == {
        "words": ["no", "not", "yes", "on", "off", "N"],
        "chat": False,
        "bos": True,
    }
