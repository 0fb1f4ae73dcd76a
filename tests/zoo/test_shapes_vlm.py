"""The bundled vision-language model: what its card says is so, and every tool takes it."""

import builtins
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration
from typer.testing import CliRunner

import attnscope
from attnscope import zoo
from attnscope.cli import app
from attnscope.experiment.plan import make_plan
from attnscope.prompts.shapes import TASKS, PictureQuestion, picture_question
from attnscope.spec.experiment import make_experiment
from attnscope.tokens import load_classes
from attnscope.web.model_cache import ModelCache
from support_errors import raises

NAME = "shapes-vlm"
SEED = 31_415  # neither the training's nor the card's
LOG = Path(__file__).parents[2] / "training" / "logs" / f"{NAME}.jsonl"


@cache
def loaded() -> tuple[Any, Any]:
    return attnscope.load(f"zoo:{NAME}", device="cpu")


def text_of(one: PictureQuestion) -> str:
    parts = [{"type": "image"}, {"type": "text", "text": one.question}]
    system = {"role": "system", "content": "Answer questions about the picture."}
    turns = [system, {"role": "user", "content": parts}]
    return str(loaded()[1].apply_chat_template(turns, add_generation_prompt=True))


def inputs_of(some: list[PictureQuestion], **keys: Any) -> Any:
    images = [Image.fromarray(one.picture) for one in some]
    texts = [text_of(one) for one in some]
    return loaded()[1](text=texts, images=images, return_tensors="pt", **keys), images


def test_the_card_describes_the_model_and_its_training() -> None:
    model, processor = loaded()
    card, config = zoo.card(NAME), model.config.text_config
    log = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    assert type(processor).__name__ == "LlavaProcessor"
    assert card.architecture == type(model).__name__ == "LlavaForConditionalGeneration"
    assert (card.layers, card.heads, card.kv_heads) == (
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    assert card.parameters == sum(p.numel() for p in model.parameters()) == log[0]["parameters"]
    assert card.bytes == (zoo.folder(NAME) / "model.safetensors").stat().st_size
    assert sum(path.stat().st_size for path in zoo.folder(NAME).iterdir()) <= 12e6
    assert card.steps == sum(line["steps"] for line in log if "stage" in line)
    assert card.documents == sum(line["pictures"] for line in log if "stage" in line)
    assert card.fresh_samples == 1000
    assert card.constant_answer is not None
    assert tuple(card.exact_match) == tuple(card.constant_answer) == TASKS


QUICK = "color"
EACH = [task if task == QUICK else pytest.param(task, marks=pytest.mark.slow) for task in TASKS]


@pytest.mark.parametrize("task", EACH)
def test_exact_match_is_what_the_card_says(task: str) -> None:
    """Within four standard deviations, through the processor that users get, padding included."""
    count, share = 40, zoo.card(NAME).exact_match[task]
    model, processor = loaded()
    some = [picture_question(index, seed=SEED, task=task) for index in range(count)]
    inputs, _ = inputs_of(some, padding=True, padding_side="left")
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    new = out[:, inputs["input_ids"].shape[1] :]
    texts = processor.tokenizer.batch_decode(new, skip_special_tokens=True)
    right = sum(text.strip() == one.answer for text, one in zip(texts, some, strict=True))
    spread = math.sqrt(max(share * (1 - share), 0.01) * (1 / count + 1 / 1000))
    assert abs(right / count - share) <= 4 * spread


def test_maps_are_those_of_plain_eager_attention() -> None:
    model, processor = loaded()
    some = [
        picture_question(n, seed=SEED, task=task) for n, task in enumerate(("exists", "describe"))
    ]
    inputs, images = inputs_of(some, padding=True, padding_side="left")
    assert not inputs["attention_mask"].all()
    with attnscope.watch(model, keep=True) as scope, torch.no_grad():
        model(**inputs)
    placed = scope.place_images(processor, inputs, images)
    assert [picture.grid for picture in placed] == [(12, 12, (0.0, 0.0, 1.0, 1.0))] * 2
    eager = LlavaForConditionalGeneration.from_pretrained(
        zoo.folder(NAME), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        weights = eager(**inputs, output_attentions=True).attentions
    for layer in scope.layers:
        for n, picture in enumerate(placed):
            last = weights[layer][n, :, -1, picture.positions].reshape(-1, 12, 12)
            found = scope.image_map(layer, n, query=-1)
            torch.testing.assert_close(found, last, rtol=1e-4, atol=1e-5)
    modality = scope.mass(0, load_classes("modality")).sum(-1)
    torch.testing.assert_close(modality, torch.ones(2, 6))
    assert "data:image" in scope.show(processor)._repr_html_()


def test_prompts_of_experiments_are_those_of_the_training() -> None:
    """Token for token: image tokens, line breaks, chat format."""
    asked = make_experiment(
        name="x", models=[f"zoo:{NAME}"], prompts={"source": "shapes", "count": 2}
    )
    plan = make_plan(asked)
    for cell in plan.models[0].cells():
        one = picture_question(cell.prompt, seed=100, task=plan.metadata[cell.prompt]["task"])
        inputs, _ = inputs_of([one])
        assert cell.tokens.ids.tolist() == inputs["input_ids"][0].tolist()
        assert plan.models[0].info.bundled


def test_it_is_listed_and_offered() -> None:
    assert f"zoo:{NAME}" in CliRunner().invoke(app, ["models"], terminal_width=200).output
    cache = ModelCache(device="cpu")
    (offer,) = (one for one in cache.offers() if one.name == f"zoo:{NAME}")
    assert offer.kind == "tiny"
    model = cache.get(f"zoo:{NAME}")
    ids = model.tokenizer("What color is the star?", return_tensors="pt")
    with attnscope.watch(model.model) as scope, torch.no_grad():
        model.model(**ids)
    assert len(scope.layers) == 8
    shown = CliRunner().invoke(app, ["look", f"zoo:{NAME}", "What color is the star?"])
    assert shown.exit_code == 0, shown.output


def test_without_pillow_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **keys: Any) -> Any:
        if name.partition(".")[0] == "PIL":
            raise ImportError(name)
        return original(name, *rest, **keys)

    asked = make_experiment(
        name="x", models=[f"zoo:{NAME}"], prompts={"source": "shapes", "count": 1}
    )
    monkeypatch.setattr(builtins, "__import__", without)
    with raises(attnscope.errors.InputError, "missing-package", package="pillow"):
        make_plan(asked)


def test_the_picture_decides() -> None:
    """The same question about another picture has another answer."""
    model, _ = loaded()
    some = [picture_question(index, seed=SEED, task="color") for index in range(8)]
    inputs, _ = inputs_of(some, padding=True, padding_side="left")
    with torch.no_grad():
        shown = model(**inputs).logits[:, -1].argmax(-1)
        blank = {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}
        unseen = model(**blank).logits[:, -1].argmax(-1)
    assert (shown != unseen).sum() >= 4
