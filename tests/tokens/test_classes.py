"""Token classes: what a rule takes, and that a full set takes everything exactly once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscope.errors import InputError
from attnscope.tokens import (
    DEFAULT,
    ClassSet,
    Prompt,
    TokenClass,
    load_classes,
    read_vocabulary,
    tokenize,
)
from attnscope.tokens.class_sets import class_set
from made_tokenizers import KINDS, made
from made_tokenizers import byte_level as make_byte_level
from support_errors import raises

OTHER = TokenClass(name="other", every="token")


def class_of(text: str, classes: ClassSet = DEFAULT) -> str:
    for token_class in classes:
        if token_class.every == "token" or (token_class.every is None and token_class.takes(text)):
            return token_class.name
    raise AssertionError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("#", "hash"),
        ("##", "hash"),
        (" #", "hash"),
        ("#\n", "hash"),
        (" *", "star"),
        ("**", "star"),
        ("//", "slash"),
        (" ", "whitespace"),
        ("\t  ", "whitespace"),
        ("\u00a0", "whitespace"),
        ("\n", "newline"),
        ("\n   ", "newline"),
        ("  \r\n\n", "newline"),
        ("7", "digit"),
        (" 42", "digit"),
        ("٣", "digit"),
        ("+", "operator"),
        (" <=", "operator"),
        ("≤", "operator"),
        (" and", "conjunction"),
        ("But", "conjunction"),
        ("android", "word"),
        (".", "punctuation"),
        ("),*", "punctuation"),
        ("…", "punctuation"),
        (" hello", "word"),
        ("\\frac", "word"),
        ("日本", "word"),
        ("x2", "word"),
        ("", "other"),
        ("\ufffd", "other"),
        (" \ufffd", "other"),
        ("\u200b", "other"),
    ],
)
def test_the_default_set_by_example(text: str, name: str) -> None:
    assert class_of(text) == name


def test_judgements_of_a_token_of_several_characters() -> None:
    def star(**rule: Any) -> TokenClass:
        return TokenClass(name="star", characters="*", **rule)

    assert star().takes("**")
    assert not star().takes(" *")
    assert star(strip=True).takes(" *")
    assert star(judgement="contains").takes(" *x")
    assert not star(judgement="contains").takes(" x")
    assert star(judgement="fraction").marks(" **x").tolist() == [False, True, True, False]


def test_part_of_a_character_is_never_marked() -> None:
    anything = TokenClass(name="any", pattern="(?s).", judgement="contains")
    assert not anything.takes("\ufffd")
    assert anything.takes("a\ufffd")
    assert not TokenClass(name="any", pattern="(?s).").takes("a\ufffd")


def test_characters_are_taken_literally() -> None:
    for letter in "]^-\\[&~|":
        rule = TokenClass(name="mark", characters=f"a{letter}z")
        assert rule.takes(letter)
        assert not rule.takes("m")


def test_the_default_set_is_a_partition_of_every_vocabulary(tokenizer: Any) -> None:
    table = DEFAULT.table(tokenizer)
    assert DEFAULT.full
    assert len(table.classes) == len(tokenizer)
    assert (table.classes >= 0).all()
    special = np.flatnonzero(table.classes == DEFAULT.index("special"))
    assert set(special) == set(read_vocabulary(tokenizer).special)
    found = {DEFAULT.names[number] for number in table.classes}
    assert {"hash", "star", "digit", "word", "conjunction", "punctuation"} <= found


def test_classes_of_a_text(tokenizer: Any) -> None:
    ids = tokenizer("## = 7 apples *", add_special_tokens=False)["input_ids"]
    names = [DEFAULT.names[c] for c in DEFAULT.ids(ids, tokenizer)]
    visible = [name for name in names if name != "whitespace"]
    assert list(dict.fromkeys(visible)) == ["hash", "operator", "digit", "word", "star"]


rules = st.one_of(
    st.builds(
        dict,
        characters=st.text("#*/ ab1\n+.é日", min_size=1, max_size=4),
        judgement=st.sampled_from(["pure", "contains", "fraction"]),
    ),
    st.builds(
        dict,
        pattern=st.sampled_from([r"\p{L}+", r"\d", r"\s+", ".", "a|b", "(?s).+", "x*"]),
        judgement=st.sampled_from(["pure", "contains", "fraction"]),
    ),
    st.builds(dict, token_ids=st.frozensets(st.integers(0, 300), min_size=1)),
    st.just({"every": "special"}),
)
class_sets = st.lists(rules, max_size=5).map(
    lambda found: ClassSet(
        (*(TokenClass(name=f"class {n}", **rule) for n, rule in enumerate(found)), OTHER)
    )
)


@settings(max_examples=12, deadline=None)
@given(classes=class_sets)
def test_any_full_set_is_a_partition(tokenizer: Any, classes: ClassSet) -> None:
    every_id = np.arange(len(tokenizer))
    weights = classes.weights(every_id, tokenizer)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-6)
    if classes.table(tokenizer).weights is None:
        ids = classes.ids(every_id, tokenizer)
        assert (weights[every_id, ids] == 1).all()


@settings(max_examples=12, deadline=None)
@given(classes=class_sets, length=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
def test_masses_of_a_full_set_add_up_to_1(
    byte_level: Any, classes: ClassSet, length: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, len(byte_level), length)
    scores = np.exp(draw.normal(size=(length, length), scale=4)) * np.tri(length)
    attention = (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32)
    mass = attention.sum(axis=0) @ classes.weights(ids, byte_level) / length
    assert mass.sum() == pytest.approx(1, abs=1e-5)


def test_a_divided_token_counts_by_its_characters(byte_level: Any) -> None:
    classes = ClassSet(
        (
            TokenClass(name="hash", characters="#", judgement="fraction"),
            TokenClass(name="space", characters=" ", judgement="fraction"),
            OTHER,
        )
    )
    texts = read_vocabulary(byte_level).texts
    weights = classes.weights([texts.index(" ##"), texts.index(" ##*##")], byte_level)
    np.testing.assert_allclose(weights, [[2 / 3, 1 / 3, 0], [4 / 6, 1 / 6, 1 / 6]], atol=1e-6)
    with raises(InputError, "fraction-class", token_class="hash"):
        classes.ids([0], byte_level)


def test_padding_has_no_class(byte_level: Any) -> None:
    ids = np.array([[0, 0, 70, 71], [72, 73, 74, 75]])
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert (DEFAULT.ids(ids, byte_level, mask) == -1).tolist() == (mask == 0).tolist()
    assert (DEFAULT.weights(ids, byte_level, mask).sum(axis=-1) == mask).all()


def test_tensors_and_lists_are_alike(byte_level: Any) -> None:
    torch = pytest.importorskip("torch")
    ids = [[70, 71], [72, 73]]
    assert (DEFAULT.ids(torch.tensor(ids), byte_level) == DEFAULT.ids(ids, byte_level)).all()


def test_the_table_is_computed_once_and_again_when_the_vocabulary_grows() -> None:
    tokenizer = make_byte_level()
    table = DEFAULT.table(tokenizer)
    assert DEFAULT.table(tokenizer) is table
    assert DEFAULT.table(make_byte_level()) is table, "an equal vocabulary reads alike"
    assert ClassSet(DEFAULT.classes).table(tokenizer) is table, "an equal set is the same set"
    tokenizer.add_tokens(["~~~new~~~"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    grown = DEFAULT.table(tokenizer)
    names = [DEFAULT.names[c] for c in grown.classes[len(table.classes) :]]
    assert names == ["word", "special"]


def test_token_ids_of_ones_own(byte_level: Any) -> None:
    classes = ClassSet((TokenClass(name="mine", token_ids=frozenset({1, 70})), OTHER))
    assert classes.ids([1, 70, 71], byte_level).tolist() == [0, 0, 1]


def test_classes_from_yaml(tmp_path: Path, byte_level: Any) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "classes:\n"
        "  - hash\n"
        "  - {name: wave, characters: '~', judgement: contains}\n"
        "  - {name: number, pattern: '[0-9]+', strip: true}\n"
        "  - {name: begin, token_ids: [1]}\n"
        "  - {name: other, every: token}\n"
    )
    classes = load_classes(path)
    assert classes.names == ("hash", "wave", "number", "begin", "other")
    assert classes.classes[0] == DEFAULT.classes[0]
    assert class_of("a~", classes) == "wave"
    assert classes.ids([1], byte_level).tolist() == [3]
    assert load_classes("default") is DEFAULT


@pytest.mark.parametrize(
    ("yaml", "code", "values"),
    [
        ("classes: []", "bad-class-file", {}),
        ("- hash", "bad-class-file", {}),
        ("classes: [hsh]", "unknown-class", {"value": "hsh"}),
        ("classes: [{characters: a}]", "bad-class", {}),
        ("classes: [{name: a, chars: b}]", "unknown-field", {"token_class": "a", "value": "chars"}),
        ("classes: [{name: a, characters: 5}]", "bad-class-field", {"value": 5}),
        ("classes: [{name: a, token_ids: [x]}]", "bad-class-field", {"field": "token_ids"}),
        ("classes: [{name: a, pattern: '(b'}]", "bad-pattern", {"pattern": "(b"}),
        ("classes: [{name: a, every: thing}]", "unknown-every", {"value": "thing"}),
        ("classes: [hash, hash]", "duplicate-class", {"token_class": "hash"}),
    ],
)
def test_bad_yaml_is_refused(tmp_path: Path, yaml: str, code: str, values: dict[str, Any]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml)
    with pytest.raises(InputError) as error:
        load_classes(path)
    assert error.value.code == code
    assert values.items() <= error.value.values.items()
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ({}, "number-of-rules"),
        ({"characters": "a", "pattern": "b"}, "number-of-rules"),
        ({"characters": ""}, "empty-rule"),
        ({"pattern": "[a"}, "bad-pattern"),
        ({"characters": "a", "judgement": "pur"}, "unknown-judgement"),
        ({"token_ids": [-1]}, "bad-token-ids"),
        ({"characters": "a", "judgement": "fraction", "strip": True}, "strip-with-fraction"),
    ],
)
def test_bad_rules_are_refused(rule: dict[str, Any], code: str) -> None:
    with raises(InputError, code, token_class="mine"):
        TokenClass(name="mine", **rule)


def test_sets_that_leave_nothing(byte_level: Any) -> None:
    with raises(InputError, "empty-class-set"):
        ClassSet(())
    nowhere = ClassSet((TokenClass(name="runes", pattern=r"\p{Runic}"),))
    with raises(InputError, "no-token-in-classes", classes=("runes",)):
        nowhere.ids([1, 2], byte_level)
    with raises(InputError, "unreachable-class", token_class="hash", after="other"):
        ClassSet((OTHER, DEFAULT.classes[0]))
    with raises(InputError, "unknown-class-set", value="defualt"):
        load_classes("defualt")


def test_ids_of_another_vocabulary_are_refused(byte_level: Any) -> None:
    with raises(InputError, "unknown-token-id", value=99999):
        DEFAULT.ids([1, 99999], byte_level)
    with raises(InputError, "bad-token-ids", dtype="float64"):
        DEFAULT.ids([0.5], byte_level)


@pytest.mark.parametrize("mask", [[1], [[1, 1]], [1, 1, 1], []])
def test_a_mask_of_another_shape_is_refused(mask):
    """It was spread over the ids, or ended in numpy's own error."""
    tokenizer = make_byte_level()
    for read in (DEFAULT.ids, DEFAULT.weights):
        with raises(InputError, "mask-shape", ids=(2,)):
            read([5, 6], tokenizer, mask)


@pytest.mark.parametrize(
    "pattern", ["(?i)(no|not|never)", "(?i)no|not|never", "(?i)(never|not|no)"]
)
def test_an_alternative_hides_no_longer_one(pattern: str) -> None:
    negation = TokenClass(name="negation", pattern=pattern, strip=True)
    assert all(negation.takes(text) for text in ("no", " not", "Never", " NO "))
    assert not any(negation.takes(text) for text in ("now", " know", "knot", "", " "))


def test_a_row_of_matches_is_pure() -> None:
    digit = TokenClass(name="digit", pattern=r"\d")
    assert digit.takes("123")
    assert not digit.takes("12a")
    assert not digit.takes("1\ufffd")
    assert not TokenClass(name="any", pattern=".*").takes("1\ufffd")


NEGATION = TokenClass(name="negation", words=["no", "Not", "never", "by no means", "nevermore"])


def found(text: str, tokenizer: Any, *classes: TokenClass) -> str:
    """The text of the tokens of the first class."""
    tokens = tokenize(Prompt(text), tokenizer)
    ids = ClassSet((*classes, OTHER)).ids(tokens.ids, tokenizer)
    kept = [" "] * len(text)
    for (start, end), number in zip(tokens.offsets.tolist(), ids, strict=True):
        if number == 0:
            kept[start:end] = text[start:end]
    return " ".join("".join(kept).split())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I do not know, no never now.", "not no never"),
        ("NO! It is by  no means\nNot known: knot", "NO by no means Not"),
        ("Quoth the raven: nevermore and nothing, no.", "nevermore no"),
    ],
)
def test_words_of_any_number_of_tokens(kind: str, text: str, expected: str) -> None:
    """Trained on little text, these tokenizers divide most words."""
    if kind == "wordpiece":  # it has no capital letters
        text = text.lower()
    result = found(text, made(kind), NEGATION).lower()
    # A token may hold a mark beside its word.
    assert [word.strip("!,.:") for word in result.split()] == expected.lower().split()


def test_words_are_divided_here() -> None:
    tokenizer = made("byte-level")
    assert len(tokenize(Prompt(" nevermore"), tokenizer)) > 1
    assert found("A nevermore", tokenizer, NEGATION) == "nevermore"
    parts = TokenClass(name="word", words=["never"])
    assert found("A nevermore", tokenizer, parts) == ""


def test_words_beside_special_tokens_and_padding() -> None:
    tokenizer = made("byte-level")
    word = tokenize(Prompt("not"), tokenizer).ids.tolist()
    (special,) = {tokenizer.pad_token_id}
    ids = np.array([[*word, special, *word], [*word, *word, special]])
    of_set = ClassSet((NEGATION,)).ids(ids, tokenizer)
    assert of_set[0].tolist() == [*[0] * len(word), -1, *[0] * len(word)]
    assert (of_set[1] == -1).all(), "notnot is another word"
    real = np.ones_like(ids)
    real[1, : len(word)] = 0
    of_set = ClassSet((NEGATION,)).ids(ids, tokenizer, real)
    assert of_set[1].tolist() == [*[-1] * len(word), *[0] * len(word), -1]


def test_the_first_class_takes_a_word() -> None:
    tokenizer = made("byte-level")
    text = "I do not know"
    letters = TokenClass(name="letters", pattern=r"\p{L}+", strip=True)
    share = TokenClass(name="o", characters="o", judgement="fraction")
    tokens = tokenize(Prompt(text), tokenizer)
    first = ClassSet((NEGATION, letters, OTHER))
    second = ClassSet((letters, NEGATION, OTHER))
    places = tokens.offsets.tolist()
    inside = np.array([a < 8 and b > 5 and text[a:b].strip() != "" for a, b in places])
    assert (first.ids(tokens.ids, tokenizer)[inside] == 0).all()
    assert (second.ids(tokens.ids, tokenizer)[inside] == 0).all()
    weights = ClassSet((share, NEGATION, OTHER)).weights(tokens.ids, tokenizer)
    assert np.allclose(weights.sum(-1), 1)
    assert np.allclose(weights[inside, 0] + weights[inside, 1], 1)
    assert (weights[~inside, 1] == 0).all()


def test_words_in_rules_and_files() -> None:
    kept = ClassSet((NEGATION, OTHER))
    again = class_set(kept.rules)
    assert again.fingerprint == kept.fingerprint
    tokens = tokenize(Prompt("no, not now"), made("byte-level"))
    numbers = kept.ids(tokens.ids, made("byte-level"))
    assert np.array_equal(again.ids(tokens.ids, made("byte-level")), numbers)
    assert 0 < (numbers == 0).sum() < len(tokens)


def test_sets_without_words_keep_their_fingerprint() -> None:
    """Cells of older runs are found by it."""
    assert DEFAULT.fingerprint.startswith("6bb3e5076d71e9c0")


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ({"words": []}, "bad-words"),
        ({"words": "not"}, "bad-words"),
        ({"words": ["no", False]}, "bad-words"),
        ({"words": ["no", " "]}, "bad-words"),
        ({"words": ["no"], "judgement": "contains"}, "bad-words"),
        ({"pattern": "((a{1000}){1000}){1000}"}, "pattern-too-large"),
    ],
)
def test_rules_that_are_refused(rule: dict[str, Any], code: str) -> None:
    with pytest.raises(InputError) as error:
        TokenClass(name="mine", **rule)
    assert error.value.code == code
    with pytest.raises(InputError) as error:
        class_set([{"name": "mine", **rule}])
    assert error.value.code == code


@pytest.mark.parametrize("judgement", ["pure", "contains", "fraction"])
def test_a_pattern_that_takes_too_long_is_refused(
    judgement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscope.tokens.token_class.SECONDS_PER_TOKEN", 0.05)
    slow = TokenClass(name="slow", pattern="(-|--)+=", judgement=judgement)
    with pytest.raises(InputError) as error:
        slow.marks("-" * 64) if judgement == "fraction" else slow.takes("-" * 64)
    assert error.value.code == "pattern-too-slow"
    assert error.value.values == {"token_class": "slow", "pattern": "(-|--)+="}


@pytest.mark.parametrize("judgement", ["pure", "fraction"])
def test_all_tokens_together_take_bounded_time(
    judgement: Any, byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscope.tokens.classes.SECONDS_PER_VOCABULARY", 0.0)
    slow = TokenClass(name="slow", pattern="[a-y]", judgement=judgement)
    with pytest.raises(InputError) as error:
        ClassSet((slow, OTHER)).table(byte_level)
    assert error.value.code == "pattern-too-slow"
    assert error.value.values["token_class"] == "slow"
