"""The bundled models: what their cards say is so, and they are ordinary model folders."""

import json
import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnscope
from attnscope import zoo
from attnscope.prompts import math_samples, spatial_samples
from attnscope.tokens import apply_chat_template, tokenize

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
from cards import LOGS, steps_of
from evaluate import accuracy, fresh

NAMES = ("chat-gemma3", "chat-llama", "math-qwen2", "spatial-base", "spatial-phys")
QUICK_FIRST = [
    "math-qwen2",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("chat-llama", "chat-gemma3", "spatial-base", "spatial-phys")
    ),
]
"""Of the quickest model in every run; generating with the others takes seconds each."""
SEED = 31_415  # of fresh samples; neither the training's nor the cards'


@cache
def loaded(name: str) -> tuple[Any, Any]:
    return attnscope.load(f"zoo:{name}", device="cpu")


def test_five_text_models_that_fit_in_a_package() -> None:
    assert zoo.names() == tuple(sorted((*NAMES, "shapes-vlm")))  # test_shapes_vlm.py
    files = [path for name in NAMES for path in zoo.folder(name).iterdir()]
    assert max(path.stat().st_size for path in files) <= 20e6
    assert sum(path.stat().st_size for path in files) <= 45e6


@pytest.mark.parametrize("name", NAMES)
def test_the_card_says_how_long_it_was_trained(name: str) -> None:
    log = [json.loads(line) for line in (LOGS / f"{name}.jsonl").read_text().splitlines()]
    assert zoo.card(name).steps == steps_of(log)
    assert zoo.card(name).documents == log[0]["recipe"]["documents"]
    assert f"{zoo.card(name).steps:,} steps" in zoo.card(name).about


def test_names_of_folders() -> None:
    assert zoo.name_of(str(zoo.folder("zoo:chat-llama"))) == "zoo:chat-llama"
    assert zoo.name_of("some/chat-llama") is None


@pytest.mark.parametrize("name", NAMES)
def test_the_card_describes_the_model(name: str) -> None:
    model, _ = loaded(name)
    card = zoo.card(name)
    assert card.name == name
    assert card.architecture == type(model).__name__
    assert card.layers == model.config.num_hidden_layers
    assert card.heads == model.config.num_attention_heads
    assert card.kv_heads == model.config.num_key_value_heads
    assert card.parameters == sum(p.numel() for p in model.parameters())
    assert card.bytes == (zoo.folder(name) / "model.safetensors").stat().st_size
    assert card.fresh_samples == 1000
    assert "What it is not" in card.about


def test_the_shapes_the_figures_need() -> None:
    for name in ("spatial-base", "spatial-phys"):
        card = zoo.card(name)
        assert (card.architecture, card.layers, card.heads, card.kv_heads) == (
            "Qwen2ForCausalLM",
            28,
            12,
            2,
        )
    assert min(zoo.card(name).heads for name in NAMES) >= 8
    gemma = loaded("chat-gemma3")[0].config
    assert set(gemma.layer_types) == {"sliding_attention", "full_attention"}


COUNT = 120


@cache
def exact_match(name: str) -> float:
    """On other fresh samples than the card's: actions, or problems of level 5."""
    level = None if name.startswith("spatial") else 5
    return accuracy(name, *loaded(name), fresh(name, COUNT, level, SEED))


@pytest.mark.parametrize("name", QUICK_FIRST)
def test_exact_match_is_what_the_card_says(name: str) -> None:
    """Within four standard deviations of two such measurements."""
    shares = zoo.card(name).exact_match
    share = shares["single actions" if name.startswith("spatial") else "level 5"]
    spread = math.sqrt(max(share * (1 - share), 0.01) * (1 / COUNT + 1 / 1000))
    assert abs(exact_match(name) - share) <= 4 * spread


@pytest.mark.slow
def test_the_fine_tune_learned_what_its_base_cannot() -> None:
    assert exact_match("spatial-phys") >= 0.8
    assert exact_match("spatial-base") <= 0.2


@pytest.mark.parametrize("name", QUICK_FIRST[:3])
def test_an_intervention_can_help_or_hurt(name: str) -> None:
    assert 0.5 <= exact_match(name) <= 0.95


@pytest.mark.parametrize("name", NAMES)
def test_saved_again_plain_transformers_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    model, tokenizer = loaded(name)
    model.save_pretrained(tmp_path, max_shard_size="3MB")
    tokenizer.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = tokenizer("# One * two 12 / 3", return_tensors="pt")["input_ids"]
    same = AutoTokenizer.from_pretrained(tmp_path)
    assert same("# One * two 12 / 3")["input_ids"] == ids[0].tolist()
    assert same.chat_template == tokenizer.chat_template
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize("name", NAMES)
def test_watched_as_its_own_eager_attention(name: str) -> None:
    model, tokenizer = loaded(name)
    prompt = next(iter(math_samples(1, seed=SEED))).prompt
    ids = torch.tensor([tokenize(apply_chat_template(prompt, tokenizer), tokenizer).ids.tolist()])
    eager = AutoModelForCausalLM.from_pretrained(
        zoo.folder(name), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        weights = eager(ids, output_attentions=True).attentions
        with attnscope.watch(model) as scope:
            model(ids)
    for layer in scope.layers:
        torch.testing.assert_close(
            scope.received(layer), weights[layer].sum(2), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", NAMES)
def test_runs_merge_and_digits_stand_alone(name: str) -> None:
    _, tokenizer = loaded(name)

    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([n]) for n in tokenizer(text, add_special_tokens=False).input_ids]

    assert pieces("########") == ["########"]
    assert pieces("****") == ["****"]
    assert pieces("x:        y")[2] == "       "
    assert pieces("a 2024") == ["a", " ", "2", "0", "2", "4"]
    for text in ("naïve — 日本語 👍", "\t\n  * a\r\n", "<b>"):
        assert (
            "".join(pieces(text)) == text
            or tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
        )


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("math-qwen2", "<|im_start|>system\nSolve"),
        ("chat-llama", "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nSolve"),
        ("chat-gemma3", "<bos><start_of_turn>user\nSolve"),
        ("spatial-phys", "<|im_start|>system\nTurn"),
    ],
)
def test_chat_formats_keep_the_regions(name: str, opening: str) -> None:
    _, tokenizer = loaded(name)
    source = spatial_samples if name.startswith("spatial") else math_samples
    chat = apply_chat_template(next(iter(source(1, seed=SEED))).prompt, tokenizer)
    assert chat.text.startswith(opening)
    assert {"system", "question"} <= {region.name for region in chat.regions}
