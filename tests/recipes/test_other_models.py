"""Recipes on models of other shapes than the published ones: their defaults fit, and say so."""

from pathlib import Path

import pytest

from attnscope.errors import AttnscopeWarning
from attnscope.recipes import RECIPES
from attnscope.recipes.filler_profile import filler_profile
from attnscope.recipes.recipe_models import label_of
from attnscope.recipes.token_types import token_types
from made_models import save_model


def test_published_layers_at_the_same_depth(tmp_path: Path) -> None:
    name = save_model(tmp_path / "shallow", layers=18)
    with pytest.warns(AttnscopeWarning, match=r"\b18\b.*0, 10, 13, 17"):
        assert token_types([name]).layers == (0, 10, 13, 17)
    assert token_types([name], layers=[1]).layers == (1,)
    assert token_types(RECIPES["token-types"].real).layers == (0, 16, 20, 27)


def test_published_heads_that_there_are(tmp_path: Path) -> None:
    name = save_model(tmp_path / "four", heads=4)
    with pytest.warns(AttnscopeWarning, match=r"four.*0, 1, 7"):
        assert filler_profile([name]).profiles.heads == {"four": (0, 1)}
    assert filler_profile().profiles.heads == {"math-qwen2": (0, 1, 7)}


def test_labels() -> None:
    assert label_of("zoo:chat-llama") == "chat-llama"
    assert label_of("some/where/model.gguf") == "model"
    assert label_of("owner/base@main+some/adapter/") == "adapter"
    assert label_of("owner/model@main") == "model@main"


def test_real_models_are_of_the_zoo() -> None:
    assert {name for recipe in RECIPES.values() for name in recipe.real} <= {
        "zoo:smollm2",
        "zoo:smollm2-phys",
        "zoo:whisper-tiny-en",
        "zoo:shapes-vlm",
    }
