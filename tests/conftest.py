"""What every test can rely on: an empty home, no network, one thread, a fixed amount of memory.

Everything that a test could take from the machine is set here, before torch or huggingface_hub is
imported: both read the environment once.
"""

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

OWN_HOME = tempfile.TemporaryDirectory(prefix="attnscope-tests-", ignore_cleanup_errors=True)
"""Removed when the process ends. Processes that a test starts use it too."""

# Settings of libraries, of launchers of several processes, and of terminals and CI runners, for
# which help texts and tables are wrapped and coloured.
OTHERS_SETTINGS = (
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "ATTNSCOPE_", "ACCELERATE_", "RAY_", "AWS_"),
    *("NUMBA_", "TRITON_", "TORCH_", "PYTORCH_", "TORCHELASTIC_", "TYPER_", "_TYPER_"),
)
OTHERS_NAMES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "XDG_CACHE_HOME"),
}
for name in list(os.environ):
    if name.startswith(OTHERS_SETTINGS) or name.upper() in OTHERS_NAMES:
        del os.environ[name]
os.environ["HF_HOME"] = f"{OWN_HOME.name}/huggingface"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["ATTNSCOPE_HOME"] = f"{OWN_HOME.name}/attnscope"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

torch.set_num_threads(1)
# The Triton kernels run here through Triton's interpreter; a real GPU compiles them (tests/gpu).
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(Path(__file__).parent / "support"), str(Path(__file__).parent)]

import local_only
from chromium import CHROMIUM
from made_tokenizers import CHAT_TEMPLATES, KINDS, made

# The suite uses the same examples every time, so that failures can be repeated. For new ones:
# HYPOTHESIS_PROFILE=search.
# A machine with a GPU may lack hypothesis: tests/gpu does not need it.
with suppress(ImportError):
    import hypothesis

    hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
    hypothesis.settings.register_profile("search", deadline=None)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

FREE = 8 << 30
"""Bytes of memory that are free in every test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order",
        default="written",
        help="order of the tests: written (default), reversed, or random:SEED",
    )
    # A machine with a GPU may lack pytest-timeout, whose settings pytest would then refuse.
    for name in ("timeout", "timeout_method"):
        with suppress(ValueError):  # the plugin is there
            parser.addini(name, "of pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    local_only.install()


def pytest_report_header(config: pytest.Config) -> str:
    return f"order: {config.getoption('--order')}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one file stay together, so that its fixtures are made once."""
    order, _, seed = config.getoption("--order").partition(":")
    if order == "written":
        return
    if order not in ("reversed", "random") or (order == "random") != seed.isdecimal():
        raise pytest.UsageError("--order takes written, reversed or random:SEED")
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    if order == "reversed":
        items[:] = [item for group in reversed(groups) for item in reversed(group)]
        return
    shuffle = random.Random(int(seed)).shuffle
    shuffle(groups)
    for group in groups:
        shuffle(group)
    items[:] = [item for group in groups for item in group]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without Chromium, browser tests are skipped on a developer's machine and fail in CI."""
    if item.get_closest_marker("browser") and CHROMIUM is None:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail("CI is set and there is no Chromium: browser tests must run", pytrace=False)
        pytest.skip("needs Chromium: install chromium or google-chrome")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    ran = [
        report
        for outcome in ("passed", "failed", "error")
        for report in terminalreporter.stats.get(outcome, [])
        if hasattr(report, "keywords")
    ]
    for marker, needed in (
        ("gpu", " (they need `pytest -m gpu tests/gpu` on a CUDA device)"),
        ("browser", ""),
        ("vllm_engine", " (they need `make test-vllm`)"),
    ):
        if not any(marker in report.keywords for report in ran):
            terminalreporter.write_line(f"no {marker} tests ran{needed}")


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for each file of tests: nothing is left there by another."""
    before = os.environ["ATTNSCOPE_HOME"]
    os.environ["ATTNSCOPE_HOME"] = str(tmp_path_factory.mktemp("home"))
    yield
    os.environ["ATTNSCOPE_HOME"] = before


@pytest.fixture(autouse=True)
def _fixed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.memory.free", lambda device="cpu": FREE)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


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
