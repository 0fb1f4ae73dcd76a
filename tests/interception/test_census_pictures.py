"""A sample of the census of models with pictures."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "validation"


@pytest.fixture(scope="module")
def pictures() -> Any:
    """The script, whose neighbour `census` it imports by name."""
    spec = importlib.util.spec_from_file_location("census_pictures", FOLDER / "census_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        spec.loader.exec_module(made)
        sys.modules.pop("census")
    return made


# Patches in a grid, a zero projector, cross-attention to the picture beside padding, a picture
# before the text, towers by themselves.
SAMPLE = {
    "qwen2_vl": ("streamed", ["decoder"]),
    "gemma3": ("streamed", ["decoder", "window"]),
    "mllama": ("streamed", ["cross", "decoder"]),
    "git": ("fallback", ["encoder"]),
    "siglip_vision_model": ("streamed", ["encoder"]),
    "vit": ("streamed", ["encoder"]),
}


@pytest.mark.parametrize("kind", SAMPLE)
def test_exact(kind: str, pictures: Any) -> None:
    result = pictures.count(kind)
    assert result["outcome"] == "exact", result
    assert (result["backend"], result["kinds"]) == SAMPLE[kind]


@pytest.mark.parametrize(
    ("kind", "code"),
    [("swiftformer", "unsupported-weights-shape"), ("segformer", "more-than-one-stack")],
)
def test_refused(kind: str, code: str, pictures: Any) -> None:
    assert pictures.count(kind)["code"] == code


def test_a_model_that_ignores_its_picture_is_no_result(
    pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "pictures", lambda model, seed: iter([{}]))
    result = pictures.count("llava")
    assert result["outcome"] == "no model"
