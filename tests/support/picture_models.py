"""Folders with tiny vision-language models, and picture files, for experiments."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import made_processors
from attnscope.experiment import plan as planning

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}MARK{% else %}{{ p['text'] | trim }}{% endif %}"
    "{% endfor %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def picture(seed: int, height: int = 50, width: int = 70) -> Image.Image:
    """A picture of random pixels."""
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8))


def model_folder(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, chat: bool = False
) -> Any:
    """A folder with the model of a family; its processor is loaded, or given where transformers
    would need torchvision to load it."""
    family = made_processors.made(name)
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        family.model.save_pretrained(folder)
        family.processor.tokenizer.save_pretrained(folder)
    template = TEMPLATE.replace("MARK", family.mark) if chat else None
    monkeypatch.setattr(family.processor, "chat_template", template, raising=False)
    monkeypatch.setattr(family.processor.tokenizer, "chat_template", template, raising=False)
    original = planning.load_processor

    def load_processor(name: str, **options: Any) -> Any:
        if str(name) != str(folder):
            return original(name, **options)
        from attnscope.tokens.modalities import tokenizer_in

        tokenizer_in(family.processor)
        return family.processor

    monkeypatch.setattr(planning, "load_processor", load_processor)
    return family


def write_prompts(folder: Path, records: list[dict[str, Any]]) -> Path:
    """A file of records."""
    folder.mkdir(exist_ok=True)
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path
