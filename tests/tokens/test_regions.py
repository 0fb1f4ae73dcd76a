"""A prompt is text with named spans, and spans stay on their text whatever is put in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscope.errors import InputError
from attnscope.tokens import Prompt, Region, join


def test_parts_become_regions_nested_ones_too() -> None:
    maps = join([(None, "Target:\n"), ("target", "##\n"), (None, "Now:\n"), ("current", "**\n")])
    prompt = join([("system", "Turn it."), (None, "\n\n"), ("maps", maps), ("question", "How?")])
    assert prompt.names == ("system", "maps", "target", "current", "question")
    assert prompt.read("target") == "##\n"
    assert prompt.read("maps") == maps.text
    assert prompt.read("question") == "How?"


@given(
    text=st.text("abc \n", min_size=1, max_size=20),
    inserted=st.text("XYZ", max_size=5),
    data=st.data(),
)
def test_an_insertion_leaves_every_region_on_its_text(
    text: str, inserted: str, data: st.DataObject
) -> None:
    points = st.integers(0, len(text))
    spans = data.draw(st.lists(st.tuples(points, points), max_size=4))
    regions = tuple(Region(min(s), max(s), str(n)) for n, s in enumerate(spans))
    prompt = Prompt(text, regions)
    at = data.draw(points)
    grown = prompt.inserted(at, inserted, Region(at, at + len(inserted), "new"))
    assert grown.text.replace(inserted, "", 1) == text if inserted else grown.text == text
    assert grown.read("new") == inserted
    for region in regions:
        without = "".join(letter for letter in grown.read(region.name) if letter not in "XYZ")
        assert without == text[region.start : region.end]


def test_an_insertion_between_two_regions_is_part_of_neither() -> None:
    grown = join([("a", "1234"), ("b", "5678")]).inserted(4, "//")
    assert (grown.read("a"), grown.read("b")) == ("1234", "5678")
    assert join([("a", "1234")]).inserted(2, "//").read("a") == "12//34"


def test_a_cut_clips_regions() -> None:
    prompt = join([("a", "1234"), ("b", "5678")])
    assert prompt.cut(2, 6).read("a") == "34"
    assert prompt.cut(2, 6).read("b") == "56"
    assert prompt.cut(0, 4).names == ("a",)


def test_a_name_may_be_used_twice() -> None:
    prompt = join([("turn", "one "), (None, "- "), ("turn", "two")])
    assert [prompt.text[r.start : r.end] for r in prompt.spans("turn")] == ["one ", "two"]


def test_bad_prompts_say_what_is_wrong() -> None:
    with pytest.raises(InputError, match="prompt is empty"):
        Prompt("")
    with pytest.raises(InputError, match="'q' ends at character 9, but the prompt has 3"):
        Prompt("abc", (Region(0, 9, "q"),))
    with pytest.raises(InputError, match="from 3 to 2"):
        Region(3, 2, "q")
    with pytest.raises(InputError, match="needs a name"):
        Region(0, 1, "")
    with pytest.raises(InputError, match="unknown region 'qestion'; known: system, question"):
        join([("system", "a"), ("question", "b")]).spans("qestion")
    with pytest.raises(InputError, match="no regions"):
        Prompt("abc").read("system")
    with pytest.raises(InputError, match="cannot insert at character 4"):
        Prompt("abc").inserted(4, "x")
    with pytest.raises(InputError, match="lone surrogate"):
        Prompt("a\ud800")
