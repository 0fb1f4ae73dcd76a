"""What tests in every room share."""

from typing import Any

import pytest

from made_tokenizers import CHAT_TEMPLATES, KINDS, made


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
