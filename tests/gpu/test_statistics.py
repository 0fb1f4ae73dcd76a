"""Statistics on a GPU beside a dense float64 computation on the same queries and keys, under every
intervention, mask, choice of queries and type. A table of the largest deviations is printed last.

PYTHONPATH=src python -m pytest tests/gpu -m gpu -q
"""

from collections.abc import Iterator

import pytest
import torch

import attnscope
from dense_statistics import INTERVENTIONS, MASKS, Case, combinations, worst

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The tiles of 16 bits are 64 × 128: what goes wrong between tiles begins beyond 128 keys.
TOKENS = 300
DTYPES = {torch.float32: 5e-5, torch.bfloat16: 2e-3, torch.float16: 2e-3}
DEVIATIONS: dict[tuple[str, str], float] = {}


@pytest.fixture(autouse=True, scope="module")
def _table(request: pytest.FixtureRequest) -> Iterator[None]:
    """One line for each intervention and type, when all tests of this file are over."""
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n\n| intervention | dtype | largest deviation |\n| --- | --- | ---: |")
        for (intervention, dtype), off in DEVIATIONS.items():
            print(f"| {intervention} | {dtype} | {off:.1e} |")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("intervention", INTERVENTIONS)
def test_statistics_against_float64(intervention: str, dtype: torch.dtype) -> None:
    found = {}
    for mask in MASKS:
        if queries := combinations(intervention, mask):
            given = {"tokens": TOKENS, "backend": "auto"}
            found[mask] = worst(intervention, mask, queries, "cuda", dtype, **given)
    name = str(dtype).removeprefix("torch.")
    DEVIATIONS[intervention, name] = max(found.values())
    assert max(found.values()) < DTYPES[dtype], found


@pytest.mark.parametrize("intervention", ["none", "knockout all"])
@torch.no_grad()
def test_a_sample_is_as_far_off_as_it_states(intervention: str) -> None:
    """Beyond 512 queries far keys are sampled; keys that are cut receive exactly nothing."""
    case = Case("none", 1500, "cuda", torch.bfloat16, False)
    scopes = []
    for queries in ("all", "sample:64"):
        with case.changed(intervention), attnscope.watch(case.model, queries=queries) as scope:
            case.run()
        scopes.append(scope)
    exact, sample = scopes
    for layer in exact.layers:
        received = exact.received(layer)
        off = (sample.received(layer) - received).abs()
        allowed = 3 * sample.received_error(layer) + 1e-3 * received
        assert (off <= allowed).float().mean() > 0.95
        if intervention != "none":
            for scope in scopes:
                cut = case.keys.to("cuda")[:, None].expand_as(received)
                assert not bool(scope.received(layer)[cut].any())
