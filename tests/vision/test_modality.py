"""Token classes by modality, and processors that `attnscope.load` returns."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import attnscope
import made_processors
from attnscope.errors import InputError, ModelError
from attnscope.loading import load_processor, load_text_model
from attnscope.tokens import MODALITY
from made_tokenizers import byte_level
from support_errors import raises

SAVABLE = ["llava", "llava-next", "gemma3", "paligemma", "idefics3"]
"""Families whose processors have no video part."""


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", list(made_processors.FAMILIES))
def test_classes_are_those_of_the_processor(name: str) -> None:
    family = made_processors.made(name)
    inputs = made_processors.model_inputs(family, [f"{family.mark}A dog"], [picture()])
    ids = inputs["input_ids"]
    classes = MODALITY.ids(ids, family.processor)
    # Idefics 3 has a method of its own, which counts the marks between tiles as parts of the image.
    kinds = transformers.ProcessorMixin.create_mm_token_type_ids
    of_processor = np.array(kinds(family.processor, ids.tolist()))
    assert (of_processor == 1).any()
    np.testing.assert_array_equal(classes == MODALITY.index("image"), of_processor == 1)
    assert not (classes == MODALITY.index("video")).any()
    with torch.no_grad(), attnscope.watch(family.model) as scope:
        family.model(**inputs)
    mass = scope.mass(0, MODALITY, family.processor)
    torch.testing.assert_close(mass.sum(-1), torch.ones(mass.shape[:-1]), rtol=0, atol=1e-5)
    received = scope.received(0)[..., torch.from_numpy(of_processor[0] == 1)].sum(-1)
    image = mass[..., MODALITY.index("image")]
    torch.testing.assert_close(image, received / scope.count(0)[:, None], rtol=1e-5, atol=1e-6)


def test_a_tokenizer_of_text_has_no_images_and_another_needs_its_processor() -> None:
    tokenizer = byte_level(400)
    classes = MODALITY.ids(tokenizer("A dog")["input_ids"], tokenizer)
    assert set(classes.tolist()) == {MODALITY.index("text")}
    alone = made_processors.tokenizer()
    with raises(InputError, "needs-processor", token="<image>"):
        MODALITY.ids(alone("A dog")["input_ids"], alone)


def saved(name: str, folder: Path) -> Any:
    family = made_processors.made(name)
    family.model.save_pretrained(folder)
    family.processor.save_pretrained(folder)
    return family


@pytest.mark.filterwarnings("ignore::attnscope.errors.AttnscopeWarning")  # no <s> before the text
@pytest.mark.parametrize("name", SAVABLE)
def test_load_returns_the_processor(name: str, tmp_path: Path) -> None:
    family = saved(name, tmp_path)
    model, processor = attnscope.load(tmp_path, device="cpu")
    assert type(processor) is type(family.processor)
    loaded = made_processors.Family(processor, model, family.mark)
    inputs = made_processors.model_inputs(loaded, [f"{family.mark}A dog"], [picture()])
    with torch.no_grad(), attnscope.watch(model) as scope:
        logits = model(**inputs).logits
        torch.testing.assert_close(logits, family.model(**inputs).logits, rtol=0, atol=1e-5)
    image = scope.mass(0, MODALITY)[..., MODALITY.index("image")]  # without a processor
    assert (image > 0).all()
    assert scope.find("dog", processor).any()
    assert scope.to_frame(processor)["token"].null_count() == 0
    assert type(load_processor(tmp_path)) is type(family.processor)


def test_a_vision_tower_has_an_image_processor(tmp_path: Path) -> None:
    config = transformers.SiglipVisionConfig(**made_processors.TOWER)
    transformers.SiglipVisionModel(config).save_pretrained(tmp_path)
    made_processors.pil("siglip").save_pretrained(tmp_path)
    model, processor = attnscope.load(tmp_path, device="cpu")
    assert "pixel_values" in processor(picture(), return_tensors="pt")
    assert type(model).__name__ == "SiglipVisionModel"
    with raises(ModelError, "no-tokenizer", model=str(tmp_path)):
        load_text_model(tmp_path)
    with raises(ModelError, "no-processor", model=str(tmp_path)):
        load_processor(tmp_path)


@pytest.fixture
def with_video(tmp_path: Path) -> Path:
    """A model whose processor has a video part."""
    family = made_processors.made("qwen2-vl")
    family.model.save_pretrained(tmp_path)
    family.processor.tokenizer.save_pretrained(tmp_path)
    settings = {
        "processor_class": "Qwen2VLProcessor",
        "image_processor": json.loads(family.processor.image_processor.to_json_string()),
        "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor"},
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
)
def test_a_processor_that_needs_torchvision_says_so(with_video: Path) -> None:
    for load in (attnscope.load, load_processor):
        with raises(InputError, "missing-package", package="torchvision"):
            load(with_video)
    model, tokenizer = load_text_model(with_video, device="cpu")  # for text alone
    inputs = tokenizer("A dog", return_tensors="pt")
    with torch.no_grad(), attnscope.watch(model) as scope:
        model(**inputs)
    with raises(InputError, "missing-package", package="torchvision"):
        scope.mass(0, MODALITY)


def test_a_processor_that_needs_pillow_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("llava", tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "PIL" else find(name, *a)
    )

    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("LlavaImageProcessor requires the PIL library")

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", refuse)
    with raises(InputError, "missing-package", package="pillow"):
        attnscope.load(tmp_path)
