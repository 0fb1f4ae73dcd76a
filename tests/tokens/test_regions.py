"""A prompt is text with named spans, and spans stay on their text whatever is put in."""

from hypothesis import given
from hypothesis import strategies as st

from attnscope.errors import InputError
from attnscope.tokens import Prompt, Region, join
from support_errors import raises


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


def test_bad_prompts_are_refused() -> None:
    with raises(InputError, "empty-prompt"):
        Prompt("")
    with raises(InputError, "region-outside-prompt", region="q", end=9, length=3):
        Prompt("abc", (Region(0, 9, "q"),))
    with raises(InputError, "bad-region", start=3, end=2):
        Region(3, 2, "q")
    with raises(InputError, "missing-name"):
        Region(0, 1, "")
    with raises(InputError, "unknown-region", value="qestion", known=["system", "question"]):
        join([("system", "a"), ("question", "b")]).spans("qestion")
    with raises(InputError, "unknown-region", value="system"):
        Prompt("abc").read("system")
    with raises(InputError, "position-outside-prompt", position=4, length=3):
        Prompt("abc").inserted(4, "x")
    with raises(InputError, "lone-surrogate", position=1):
        Prompt("a\ud800")
