from typing import Any

import pytest

from attnscope.spec.experiment import Experiment, make_experiment
from made_models import save_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a chat template."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def small(folder: str) -> Any:
    """Makes small experiments: six prompts, a filler, a few measures; keys as given."""

    def make(**keys: Any) -> Experiment:
        asked = {
            "name": "small",
            "models": {"tiny": folder},
            "prompts": {"source": "math", "count": 6, "level": 1},
            "conditions": {"base": {}, "filler": {"insert": {"count": 9}}},
            "measures": ["mass", "lambda", "profile"],
            "batch_tokens": 256,
        }
        return make_experiment(**{**asked, **keys})

    return make
