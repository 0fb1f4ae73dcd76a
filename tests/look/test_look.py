"""A look at a text: its numbers against the model's own attention matrix, and how it shows."""

import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import attnscope
from attnscope.cli import main
from attnscope.errors import InputError
from attnscope.look import Look, look
from attnscope.look.colours import back_colours
from attnscope.look.text_measures import PART
from attnscope.tokens import DEFAULT, ClassSet, Prompt, TokenClass, pad, tokenize
from attnscope.tokens.visible import visible_text
from made_tokenizers import CHATML
from support_errors import raises

TEXT = "Tom has 12 apples and\n  ## ** gives 5 away."


def tiny(vocabulary: int, **more: Any) -> Any:
    config = hf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        bos_token_id=None,
        **more,
    )
    return hf.LlamaForCausalLM(config).eval()


@pytest.fixture
def model(byte_level: Any) -> Any:
    return tiny(len(byte_level))


def dense(model: Any, tokenizer: Any, text: str) -> np.ndarray:
    """[layers, heads, queries, keys] as eager attention returns it."""
    kept = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            found = model(**tokenizer(text, return_tensors="pt"), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(kept)
    return torch.stack(found)[:, 0].double().numpy()


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("head", [None, 3])
@pytest.mark.parametrize("query", [None, 7])
def test_the_numbers_are_those_of_the_attention_matrix(
    model: Any, byte_level: Any, layer: int | None, head: int | None, query: int | None
) -> None:
    A = dense(model, byte_level, TEXT)
    A = A if layer is None else A[layer : layer + 1]
    A = A if head is None else A[:, head : head + 1]
    rows = A.mean(axis=(0, 1))
    even = np.tri(len(rows)) / np.arange(1, len(rows) + 1)[:, None]
    if query is not None:
        rows, even = rows[query : query + 1], even[query : query + 1]

    seen = look(model, byte_level, TEXT, layer=layer, head=head, query=query)
    np.testing.assert_allclose(seen.weights, rows.mean(axis=0), atol=1e-5)
    assert "".join(seen.tokens) == TEXT
    assert sum(row.mass for row in seen.rows) == pytest.approx(1, abs=1e-5)
    names = np.array(seen.classes)
    for row in seen.rows:
        assert row.mass == pytest.approx(rows.mean(axis=0)[names == row.name].sum(), abs=1e-5)
        expected = row.mass / even.mean(axis=0)[names == row.name].sum()
        assert row.lift == pytest.approx(expected, rel=1e-4)
        seeable = names[: query + 1] if query is not None else names
        assert row.tokens == (seeable == row.name).sum()


@settings(max_examples=8, deadline=None)
@given(texts=st.lists(st.text("ab #*/7\né日", min_size=1, max_size=30), min_size=1, max_size=3))
def test_masses_of_a_full_set_add_up_to_1_in_a_model(tokenizer: Any, texts: list[str]) -> None:
    batch = pad([tokenize(Prompt(text + "."), tokenizer) for text in texts], side="left")
    model = tiny(len(tokenizer))
    with torch.no_grad(), attnscope.watch(model) as scope:
        model(**batch.inputs)
    ids = DEFAULT.ids(batch.input_ids, tokenizer, batch.attention_mask)
    for layer in scope.layers:
        mass = scope.mass(layer, ids, len(DEFAULT))
        torch.testing.assert_close(mass.sum(-1), torch.ones(mass.shape[:2]), atol=1e-5, rtol=0)


def test_a_query_by_its_text(model: Any, byte_level: Any) -> None:
    by_text = look(model, byte_level, "# the * # the", query="#")
    assert by_text.tokens == ("#", " the", " *", " #", " the")
    assert by_text.query == 3
    assert "query 3 ' #'" in by_text.title
    assert by_text.visible.tolist() == [True, True, True, True, False]
    assert len(by_text.notes) == 1 + (by_text.weights[0] >= 0.2)  # the text has two of them
    assert look(model, byte_level, "# the * # the", query=-1).query == 4
    assert look(model, byte_level, "# the * # the", query="1").query == 1


def test_divided_tokens_count_by_their_shares(model: Any, byte_level: Any) -> None:
    classes = ClassSet(
        (
            TokenClass(name="space", characters=" ", judgement="fraction"),
            TokenClass(name="other", every="token"),
        )
    )
    seen = look(model, byte_level, TEXT, classes=classes)
    assert sum(row.tokens for row in seen.rows) == pytest.approx(len(seen.tokens))
    assert sum(row.mass for row in seen.rows) == pytest.approx(1, abs=1e-5)


def shown(seen: Look, **console: Any) -> str:
    written = io.StringIO()
    Console(width=200, file=written, **console).print(seen)
    return written.getvalue()


def test_in_the_terminal(model: Any, byte_level: Any) -> None:
    seen = look(model, byte_level, TEXT)
    text = shown(seen)
    for row in seen.rows:
        assert row.name in text
        assert f"{row.mass:.4f}" in text
    assert "mean over layers" in text
    assert "1.0000" in text
    assert "largest weights" in text
    coloured = shown(seen, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    by_attention = look(model, byte_level, TEXT, colour="attention")
    assert "full colour" in shown(by_attention)


def test_text_is_shown_never_obeyed(model: Any, byte_level: Any) -> None:
    seen = look(model, byte_level, "a\x1b[31mred\u202e<script>alert(1)</script>\x07&")
    assert "\x1b" not in shown(seen)
    assert "\u202e" not in shown(seen)
    html = seen._repr_html_()
    assert "<script" not in html
    assert "\x1b" not in html
    assert "&lt;" in html
    assert "&amp;" in html


def test_what_cannot_be_seen_gets_a_sign() -> None:
    assert visible_text("a\n\t\x1b\x7f\u202e\u200bé") == "a↵\n→\t␛␡‹202e›‹200b›é"


def test_families_of_emoji_stay_together() -> None:
    family = "\U0001f468\u200d\U0001f467"
    assert visible_text(family) == family
    assert visible_text("\u200d") == "‹200d›"


@pytest.mark.parametrize("text", ["你好，世界", "a 😀👍🏽 b", "naïve Ω ﬁ", TEXT])
def test_characters_are_shown_whole(tokenizer: Any, text: str) -> None:
    """Whatever the tokens are: pieces of characters, words without their spaces."""
    seen = look(tiny(len(tokenizer)), tokenizer, text)
    shown = [
        name for name, kind in zip(seen.tokens, seen.classes, strict=True) if kind != "special"
    ]
    if tokenizer.unk_token is None or not any(tokenizer.unk_token in name for name in seen.tokens):
        assert "".join(shown).replace(PART, "").strip() == text


def test_parts_of_a_character_are_named_by_it(byte_level: Any, model: Any) -> None:
    seen = look(model, byte_level, "好🍎")
    console = Console(file=io.StringIO(), width=1000)
    console.print(seen)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in lines]
    for n, name in enumerate(seen.tokens):
        whole = "好" if n < seen.tokens.index("🍎") else "🍎"
        assert [f"{PART} of {whole!r}" if name == PART else repr(name), str(n)] in cells
    assert PART in seen.tokens
    assert "\ufffd" not in shown(seen)
    assert "\ufffd" not in seen._repr_html_()


def test_black_text_can_be_read_on_every_class(model: Any, byte_level: Any) -> None:
    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    colours = back_colours(look(model, byte_level, TEXT))
    assert min((light(colour) + 0.05) / 0.05 for colour in colours.values()) > 7
    assert len(set(colours.values())) == len(colours)


def test_a_system_prompt_goes_into_the_template(model: Any, byte_level: Any) -> None:
    byte_level.chat_template = CHATML
    shown = "".join(look(model, byte_level, "How?", system="Be brief.").tokens)
    assert (
        shown.index("system") < shown.index("Be brief.") < shown.index("user") < shown.index("How?")
    )
    with raises(InputError, "conflicting-arguments"):
        look(model, byte_level, Prompt("How?"), system="Be brief.")


def test_a_text_longer_than_the_model_is_made_for(byte_level: Any) -> None:
    short = tiny(len(byte_level), max_position_embeddings=8)
    with raises(InputError, "too-many-tokens", positions=8):
        look(short, byte_level, TEXT)
    assert len(look(short, byte_level, TEXT, beyond_positions=True).tokens) > 8
    learned = hf.BertConfig(vocab_size=len(byte_level), max_position_embeddings=8, **BERT)
    with raises(InputError, "too-many-tokens", positions=8):
        look(hf.BertModel(learned).eval(), byte_level, TEXT, beyond_positions=True)


BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def test_in_a_notebook(model: Any, byte_level: Any) -> None:
    html = look(model, byte_level, TEXT, query=4, colour="attention")._repr_html_()
    assert html.count("<span") == html.count("</span>") == len(look(model, byte_level, TEXT).tokens)
    assert html.count("outline") == 1
    assert "<td>total</td>" in html


def test_through_the_chat_template(model: Any, byte_level: Any) -> None:
    byte_level.chat_template = CHATML
    seen = look(model, byte_level, "How?", chat=True)
    assert seen.tokens[0] == "<|im_start|>"
    assert seen.classes[0] == "special"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"layer": 9}, "unknown-layer"),
        ({"head": 4}, "unknown-head"),
        ({"query": 999}, "unknown-token"),
        ({"query": "pears"}, "unknown-token"),
        ({"colour": "mood"}, "unknown-colour"),
        (
            {"classes": ClassSet((TokenClass(name="tilde", characters="~"),))},
            "no-classified-token",
        ),
    ],
)
def test_bad_input(model: Any, byte_level: Any, options: dict[str, Any], code: str) -> None:
    with raises(InputError, code):
        look(model, byte_level, TEXT, **options)


@pytest.fixture
def command(
    model: Any, byte_level: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Run the program with arguments: its exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["attnscope", *arguments])
        loading = ModuleType("attnscope.loading")
        loading.load_text_model = lambda name, **options: (model, byte_level)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "attnscope.loading", loading)
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run


def test_on_the_command_line(command: Any) -> None:
    code, out, err = command("look", "some/model", TEXT, "--layer", "1", "--query", "apples")
    assert (code, err) == (0, "")
    assert "layer 1" in out
    assert "' apples'" in out
    assert "digit" in out
    assert "conjunction" not in out, "'and' comes after the query, which cannot see it"


def test_the_first_token_can_be_left_out(model: Any, byte_level: Any, command: Any) -> None:
    seen, without = (look(model, byte_level, TEXT, keys=keys) for keys in ("all", "not-first"))
    assert without.weights[0] == 0
    np.testing.assert_array_equal(seen.weights[1:], without.weights[1:])
    assert sum(row.tokens for row in without.rows) == len(seen.tokens) - 1
    assert without.totals[1] == pytest.approx(1 - seen.weights[0], abs=1e-5)
    code, out, _ = command("look", "m", TEXT, "--keys", "not-first", "--json")
    assert code == 0
    data = json.loads(out)
    assert [row["weight"] for row in data["tokens"]] == without.weights.tolist()
    assert [row["name"] for row in data["classes"]] == [row.name for row in without.rows]
    with raises(InputError, "unknown-keys", value="some"):
        look(model, byte_level, TEXT, keys="some")


def test_the_text_from_elsewhere(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    code, from_file, _ = command("look", "m", "--file", str(tmp_path / "text.txt"))
    assert code == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert command("look", "m", "-")[1] == from_file == command("look", "m", TEXT)[1]
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    assert command("look", "m", "--file", str(tmp_path / "text.txt"))[0] == 2


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["m", ""], ""),
        (["m"], "TEXT"),
        (["m", TEXT, "--file", "x"], "--file"),
        (["m", "--file", "nowhere.txt"], "'nowhere.txt'"),
        (["m", TEXT, "--layer", "7"], "7"),
        (["m", TEXT, "--head", "-1"], "-1"),
        (["m", TEXT, "--query", "zzz"], "'zzz'"),
        (["m", TEXT, "--classes", "none.yaml"], "'none.yaml'"),
        (["m", TEXT, "--layer", "two"], "--layer"),
        (["m", TEXT, "--colour", "mood"], "--color"),
        (["m", TEXT, "--color", "mood"], "--color"),
    ],
)
def test_bad_input_on_the_command_line(command: Any, arguments: list[str], value: str) -> None:
    code, out, err = command("look", *arguments)
    assert code == 2
    assert value in err
    assert "Traceback" not in err + out
