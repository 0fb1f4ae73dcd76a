"""`attnscope card`: numbers beside plain eager attention, the page, and two cards compared."""

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import attnscope
from attnscope.card.compare import differs, distances_of, layers_of, numbers_table
from attnscope.card.experiments import card_experiments, digest_of_texts, texts
from attnscope.card.numbers import CLASSES, GENERATED, OTHERS, Card
from attnscope.card.page import card_page
from attnscope.card.store import check_comparable, read_card, write_card
from attnscope.cli import app
from attnscope.errors import InputError
from attnscope.zoo import folder as zoo_folder
from support_errors import raises

MODEL, LAYERS, HEADS = "zoo:math-qwen2", 6, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cards")
    done = CliRunner().invoke(app, ["card", MODEL, "--out", str(out), "--quiet"])
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture
def card(folder: Path) -> Card:
    return read_card(str(folder / "math-qwen2"))


def number(card: Card, name: str, group: str | None = None) -> dict[str, Any]:
    (found,) = (
        one
        for one in card["numbers"]
        if one["name"] == name and (group is None or one["group"] == group)
    )
    return found


def changed(card: Card, by: float, label: str = "other") -> Card:
    """The same card of another model, with other values on the first token."""
    other = json.loads(json.dumps(card)) | {"label": label}
    values = number(other, "mass on the first token")
    # Equal differences would have no variation, and no interval.
    values["values"] = [value + by * (1 + n / 100) for n, value in enumerate(values["values"])]
    values["value"] += by
    return other


def test_numbers_of_a_text_are_those_of_eager_attention(card: Card) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        zoo_folder("math-qwen2"), attn_implementation="eager", dtype=torch.float32
    ).eval()
    _, tokenizer = attnscope.load(MODEL)
    first, entropy, far = [], [], []
    for text in texts():
        inputs = tokenizer(text["start"] + text["rest"], return_tensors="pt")
        with torch.no_grad():
            weights = torch.stack(model(**inputs, output_attentions=True).attentions)[:, 0].double()
        n = weights.shape[-1]
        back = torch.arange(n)[:, None] - torch.arange(n)
        first.append(float(weights[..., 0].mean()))
        entropy.append(float(torch.special.entr(weights).sum(-1).mean()))
        far.append(float((weights * back).sum(-1).mean()))
    for name, wanted in (
        ("mass on the first token", first),
        ("entropy (nats)", entropy),
        ("distance (tokens)", far),
    ):
        assert number(card, name)["values"] == pytest.approx(wanted, rel=2e-4)
        assert number(card, name)["value"] == pytest.approx(sum(wanted) / len(wanted), rel=2e-4)


def test_the_parts_of_the_attention_add_up_to_one(card: Card) -> None:
    for table in ("classes", "generated"):
        rows = layers_of([card], table, "part")
        sums = rows.group_by("layer").agg(pl.col("value").sum())
        assert sums.height == LAYERS
        assert sums["value"].to_list() == pytest.approx([1.0] * LAYERS, abs=1e-4)
    first = number(card, "mass on the first token")["value"]
    classes = [one["value"] for one in card["numbers"] if one["group"] == CLASSES]
    assert first + sum(classes) == pytest.approx(1, abs=1e-4)
    generated = [one["value"] for one in card["numbers"] if one["group"] == GENERATED]
    assert sum(generated) == pytest.approx(1, abs=1e-4)


def test_a_card_has_every_head_and_every_text(card: Card) -> None:
    assert len(card["heads"]) == LAYERS * HEADS
    assert distances_of([card])["value"].null_count() == 0
    assert card["settings"]["texts"] == digest_of_texts()
    assert len(card["settings"]["tokens"]) == len(texts()) == 12
    for one in card["numbers"]:
        assert len(one["values"]) == 12
        assert one["n"] == 12 - one["values"].count(None)
        assert one["n"] == 12 or one["group"] == GENERATED  # an end token comes first
        assert one["low"] is None or one["low"] <= one["value"] <= one["high"]


def test_the_page_is_made_from_the_json_alone(folder: Path, card: Card, tmp_path: Path) -> None:
    page = (folder / "math-qwen2" / "card.html").read_text(encoding="utf-8")
    assert card_page([card]) == page
    write_card(card, tmp_path / "again" / "card.json")
    assert read_card(str(tmp_path / "again" / "card.json")) == card
    assert str(folder) not in page
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page.partition("<script>")[0])
    for text in texts():
        assert text["name"] in page


def test_the_first_sentence_has_the_numbers_of_the_table(card: Card) -> None:
    mass = number(card, "mass on the first token")["value"]
    share = number(card, "share of heads with more than 0.3 on it")["value"]
    sentence = f"{100 * mass:.0f} % of the attention goes to the first token; {100 * share:.0f} %"
    assert sentence in card_page([card])
    both = card_page([card, changed(card, 0.0)])
    heads = both.split('<section id="heads">')[1].split("</section>")[0]
    assert heads.count("<figure") == 3  # the types of both, and the distances


def test_a_finished_card_is_not_measured_again(folder: Path) -> None:
    before = (folder / "math-qwen2" / "runs" / "text" / "manifest.json").stat().st_mtime_ns
    done = CliRunner().invoke(app, ["card", MODEL, "--out", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    assert [one["label"] for one in json.loads(done.output)] == ["math-qwen2"]
    after = (folder / "math-qwen2" / "runs" / "text" / "manifest.json").stat().st_mtime_ns
    assert after == before


def test_a_card_does_not_differ_from_itself(card: Card) -> None:
    table = numbers_table([card, changed(card, 0.0)])
    assert {row["difference"] for row in table if row["name"] != OTHERS} == {0.0}
    assert {row["difference"] for row in table if row["name"] == OTHERS} <= {None}
    assert not any(differs(row) for row in table)


def test_a_difference_is_paired_by_text_and_signed(card: Card) -> None:
    other = changed(card, -0.05)
    rows = {row["name"]: row for row in numbers_table([card, other])}
    row = rows["mass on the first token"]
    assert row["difference"] == pytest.approx(-0.05 * 1.055)
    assert row["low"] < row["difference"] < row["high"] < 0
    assert differs(row)
    assert [name for name, one in rows.items() if differs(one)] == ["mass on the first token"]
    page = card_page([card, other])
    name, direction = "Mass on the first token", "other has less than math-qwen2"
    assert f"{name}: {direction}" in page


def test_two_cards_from_files(folder: Path, card: Card, tmp_path: Path) -> None:
    write_card(changed(card, 0.1), tmp_path / "card.json")
    here, there = str(folder / "math-qwen2" / "card.json"), str(tmp_path / "card.json")
    done = CliRunner().invoke(app, ["card", here, there, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "math-qwen2-other.html").is_file()


def test_cards_that_cannot_be_compared(card: Card, tmp_path: Path) -> None:
    with raises(InputError, "duplicate-name"):
        check_comparable(card, card)
    other = changed(card, 0.0)
    other["settings"] = other["settings"] | {"texts": "of another version"}
    with raises(InputError, "cards-differ", setting="texts"):
        check_comparable(card, other)
    for content in ("{", '{"format": "something else"}', "[]"):
        (tmp_path / "card.json").write_text(content, encoding="utf-8")
        with raises(InputError, "not-a-card"):
            read_card(str(tmp_path))


def test_experiments_of_a_card_use_the_texts_without_a_chat_template() -> None:
    for name in ("text", "completion"):
        experiment = card_experiments(MODEL)[name]
        assert experiment.chat is False
        assert len(experiment.prompts.records) == len(texts())


def test_a_model_in_a_folder_has_its_name_and_not_the_path(card: Card) -> None:
    page = card_page([{**card, "model": card["model"] | {"name": "/srv/models/tuned"}}])
    assert "/srv/models" not in page
    assert "attnscope card tuned" in page
