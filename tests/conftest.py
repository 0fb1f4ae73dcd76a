import os
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

# The Triton kernels run here through Triton's interpreter; a real GPU compiles them (tests/gpu).
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

from made_tokenizers import CHAT_TEMPLATES, KINDS, made

# The suite tries the same examples every time: what it finds, everybody finds. To look for more:
# HYPOTHESIS_PROFILE=search.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is read from the user's cache, and nothing is left in it."""
    os.environ["ATTNSCOPE_HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=KINDS, scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Each kind of tokenizer in turn."""
    return made(request.param)


@pytest.fixture(scope="session")
def byte_level() -> Any:
    """The kind most models have, where one kind is enough."""
    return made("byte-level")


@pytest.fixture(params=CHAT_TEMPLATES, scope="session")
def chat_template(request: pytest.FixtureRequest) -> str:
    return CHAT_TEMPLATES[request.param]
