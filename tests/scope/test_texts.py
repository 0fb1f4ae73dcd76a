"""Words, class sets and matrices of a scope: what can be read without positions or class ids."""

import pickle
from typing import Any

import pytest
import torch
import transformers as hf

import attnscope
from attnscope.errors import InputError, ScopeError
from attnscope.scope import per_query
from attnscope.tokens import DEFAULT
from attnscope.tokens.class_sets import MAPS
from support_errors import raises

TEXTS = ["The ball is left of the box.", "The box and the ball are red, not the balls."]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return attnscope.load("zoo:spatial-phys")


@torch.no_grad()
def watched(loaded: tuple[Any, Any], side: str = "right", **options: Any) -> tuple[Any, Any, Any]:
    model, tokenizer = loaded
    tokenizer.padding_side = side
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with attnscope.watch(model, layers=[0, 1], **options) as scope:
        model(**inputs)
    return scope, tokenizer, inputs


@pytest.mark.parametrize("side", ["left", "right"])
def test_words_are_found_as_whole_words(loaded: tuple[Any, Any], side: str) -> None:
    scope, tokenizer, inputs = watched(loaded, side)
    found = scope.find("ball")
    assert found.dtype == torch.bool
    assert found.shape == inputs["input_ids"].shape
    texts = [tokenizer.decode(row[mask]) for row, mask in zip(scope.tokens, found, strict=True)]
    assert [text.strip() for text in texts] == ["ball", "ball"]  # "balls" is another word
    with raises(InputError, "text-not-found", sequence=0, text="red"):
        scope.find("red")
    with raises(InputError, "needs-tokenizer"):
        pickle.loads(pickle.dumps(scope)).find("ball")
    assert torch.equal(pickle.loads(pickle.dumps(scope)).find("ball", tokenizer), found)


@pytest.mark.parametrize("queries", ["all", "last"])
def test_a_class_set_stands_for_ids_and_their_number(loaded: tuple[Any, Any], queries: str) -> None:
    scope, tokenizer, inputs = watched(loaded, keep=True, queries=queries)
    ids = DEFAULT.ids(inputs["input_ids"], tokenizer, inputs["attention_mask"])
    for read in (scope.mass, scope.lift, scope.rows, scope.mass_error):
        want = read(1, ids, len(DEFAULT))
        for got in (read(1, DEFAULT), read(1, DEFAULT, tokenizer), read(1, DEFAULT, n=tokenizer)):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-7, equal_nan=True)
    assert scope.mass(1, ids).shape[-1] == ids.max() + 1
    shares = MAPS.weights(inputs["input_ids"], tokenizer, inputs["attention_mask"])
    torch.testing.assert_close(scope.mass(0, MAPS), scope.mass(0, shares, len(MAPS)))
    ball = scope.find("ball")
    want = (scope.received(0) * ball[:, None]).sum(-1) / scope.count(0)[:, None]
    torch.testing.assert_close(scope.mass(0, ball)[..., 0], want, rtol=0, atol=1e-6)
    with raises(InputError, "bad-number", argument="n"):
        scope.mass(0, ids, tokenizer)
    with raises(InputError, "wrong-shape", argument="class_ids"):
        scope.mass(0, ids[:, :-1])


@torch.no_grad()
def test_class_ids_may_end_with_the_prompt_or_with_the_output(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    tokenizer.padding_side = "left"
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with attnscope.watch(model, layers=[0, 1], queries="predicts", keep=True) as scope:
        output = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    read = output[:, :-1]
    ids = DEFAULT.ids(inputs["input_ids"], tokenizer, inputs["attention_mask"])
    full = torch.full(read.shape, -1)
    full[:, : ids.shape[1]] = torch.as_tensor(ids)
    n = len(DEFAULT)
    for method in (scope.mass, scope.rows, scope.lift):
        torch.testing.assert_close(method(1, ids, n), method(1, full, n), equal_nan=True)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 5)], 1)
    whole = DEFAULT.ids(output, tokenizer, mask)
    torch.testing.assert_close(scope.mass(1, whole, n), scope.mass(1, whole[:, :-1], n))
    torch.testing.assert_close(scope.mass(1, whole, n), scope.mass(1, DEFAULT), rtol=0, atol=1e-7)
    shares = DEFAULT.weights(inputs["input_ids"], tokenizer, inputs["attention_mask"])
    torch.testing.assert_close(scope.mass(1, shares), scope.mass(1, ids, n), rtol=0, atol=1e-7)
    for wrong in (ids[:, :-1], torch.cat([torch.as_tensor(whole), torch.zeros(2, 1).long()], 1)):
        with raises(InputError, "wrong-shape", argument="class_ids"):
            scope.mass(1, wrong, n)
    with attnscope.watch(model, layers=0) as scope:
        model(**inputs)
    with raises(InputError, "wrong-shape", argument="class_ids"):
        scope.mass(0, ids[:, :-1], n)  # no completion, so ids have the length of the text


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("backend", ["streaming", "eager-fallback"])
@torch.no_grad()
def test_the_matrix_is_that_of_eager_attention(
    loaded: tuple[Any, Any], side: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope, _, inputs = watched(loaded, side, keep=True, backend=backend)
    model = loaded[0]
    model.set_attn_implementation("eager")
    dense = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    for sequence in (0, 1):
        real = inputs["attention_mask"][sequence].bool()
        got = scope.matrix(1, 3, sequence)
        assert got.shape == (int(real.sum()), len(real))
        torch.testing.assert_close(got, dense[1][sequence, 3][real], rtol=0, atol=1e-5)
    with raises(InputError, "unknown-head", value=12):
        scope.matrix(1, 12)
    with raises(InputError, "unknown-sequence", value=2):
        scope.matrix(1, 0, 2)
    monkeypatch.setattr(per_query, "MATRIX_KEYS", 8)
    with raises(ScopeError, "matrix-too-large", most=8):
        scope.matrix(1, 0)


@torch.no_grad()
def test_the_matrix_has_the_rows_of_a_completion(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    with attnscope.watch(model, layers=[2], queries="predicts", keep=True) as scope:
        model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    matrix = scope.matrix(2, 0)
    for row, query in zip(matrix, scope.query_positions(2)[0].tolist(), strict=True):
        torch.testing.assert_close(row, scope.row(2, query)[0], rtol=0, atol=1e-6)
    with raises(ScopeError, "queries-not-kept"):
        watched(loaded)[0].matrix(0, 0)


@torch.no_grad()
def test_the_repr_names_the_last_text(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    with attnscope.watch(model, layers=0) as scope:
        for text in TEXTS:
            model(**tokenizer(text, return_tensors="pt"))
    assert repr(scope).endswith("1 sequence of 13 keys, 13 queries counted, the last of 2 texts>")


@torch.no_grad()
def test_words_of_an_encoder_in_its_own_case_and_spaces() -> None:
    """WordPiece writes no spaces, lower case, and punctuation apart."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "apple", "##s", ".", "good"]
    tokenizer = hf.BertTokenizer(vocab={word: n for n, word in enumerate(words)})
    config = hf.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    model = hf.BertModel(config).eval()
    inputs = tokenizer("Good Red Apples.", return_tensors="pt")
    with attnscope.watch(model) as scope:
        model(**inputs)
    found = {text: scope.find(text, tokenizer)[0].nonzero()[:, 0].tolist() for text in
             ("Red Apples", "red apples.", "Apples", "good", "[SEP]")}  # fmt: skip
    assert found == {
        "Red Apples": [2, 3, 4],
        "red apples.": [2, 3, 4, 5],
        "Apples": [3, 4],
        "good": [1],
        "[SEP]": [6],
    }
    with raises(InputError, "text-not-found"):
        scope.find("apple", tokenizer)
