"""A sample of the census (`make census`), and tests that it finds defects."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnscope
from attnscope.interception import dispatch
from attnscope.scope import reduce

SCRIPT = Path(__file__).parents[2] / "validation" / "census.py"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"

spec = importlib.util.spec_from_file_location("census", SCRIPT)
assert spec is not None
assert spec.loader is not None
census: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(census)

# One of each kind: streamed, biased, sparse with a fallback, looping, through softmax alone.
SAMPLE = {
    "qwen3": ("streamed", ["decoder"]),
    "umt5": ("streamed", ["bias", "cross", "decoder", "encoder"]),
    "deepseek_v32": ("fallback", ["decoder", "sparse"]),
    "albert": ("streamed", ["encoder"]),
    "hrm_text": ("streamed", ["decoder"]),
    "gpt_oss": ("streamed", ["decoder", "sinks", "window"]),
    "granite_swa": ("streamed", ["decoder", "sinks", "window"]),
    "gpt_neo": ("fallback", ["decoder", "window"]),
    "xlnet": ("fallback", ["decoder"]),
    "mvp": ("fallback", ["cross", "decoder", "encoder"]),
    "encoder-decoder": ("streamed", ["cross", "decoder", "encoder"]),
    "diffllama": ("streamed", ["decoder"]),
}


@pytest.mark.parametrize("kind", SAMPLE)
def test_exact(kind: str) -> None:
    result = census.count(kind)
    assert result["outcome"] == "exact", result
    assert (result["backend"], result["kinds"]) == SAMPLE[kind]


@pytest.mark.parametrize(
    ("kind", "outcome", "code"),
    [
        ("longformer", "refused", "unsupported-weights-shape"),
        ("prophetnet", "refused", "unsupported-weights-shape"),
        ("perceiver", "refused", "more-than-one-stack"),
        ("mamba", "no attention", None),
        ("rwkv", "no attention", None),
    ],
)
def test_refused(kind: str, outcome: str, code: str | None) -> None:
    result = census.count(kind)
    assert result["outcome"] == outcome, result
    assert result.get("code") == code


@torch.no_grad()
def test_the_fallback_includes_learned_sinks() -> None:
    """Granite's eager attention returns its weights without the learned sinks."""
    model = census.built("granite_swa")
    given = census.text(model)
    with attnscope.watch(model, backend="eager-fallback") as A:
        model(**given)
    assert A.backend == "eager-fallback"
    assert (A.learned_sink_mass(0) > 0).all()
    with attnscope.watch(model) as streamed:
        model(**given)
    for layer in A.layers:
        torch.testing.assert_close(A.received(layer), streamed.received(layer), rtol=0, atol=1e-5)


def test_a_changed_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dispatch.attend

    def off(call: Any, **more: Any) -> Any:
        out, lse = honest(call, **more)
        return out * 1.01, lse

    monkeypatch.setattr(dispatch, "attend", off)
    assert census.count("qwen2")["outcome"] == "changed"


def test_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = reduce.kernels.kernel

    def moved(name: str) -> Any:
        def reduce(rows: Any) -> Any:
            totals = honest(name)(rows)
            # Of the wrong head: a fault that no conservation check can find.
            return replace(totals, received=torch.roll(totals.received, 1, 1))

        return reduce

    monkeypatch.setattr(reduce.kernels, "kernel", moved)
    assert census.count("qwen2")["outcome"] == "wrong"


def test_the_page_lists_the_sample() -> None:
    assert "0 changed, 0 wrong, 0 crashed" in PAGE.read_text(encoding="utf-8")
    text = census.TABLES.read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    listed = {kind: row[:3] for row in rows if len(row) == 6 for kind in row[3].split(", ")}
    for kind, (measured, kinds) in SAMPLE.items():
        assert listed[kind] == ["exact", measured, ", ".join(kinds)]


def test_the_page_has_a_row_for_models_with_equal_results() -> None:
    streamed = {"outcome": "exact", "backend": "streamed", "kinds": ["decoder"], "received": 1e-6}
    results = {
        "a": streamed | {"output": 0.0},
        "b": streamed | {"output": 2e-7},
        "c": {"outcome": "wrong", "reason": "a|b", "backend": "fallback", "kinds": ["encoder"]},
        "d": {"outcome": "refused", "code": "no-such"},
        "e": {"outcome": "no model", "reason": "of its own"},
        "f": {"outcome": "no model", "reason": "another"},
    }
    measured, others = census.tables(results)
    assert measured == [
        "| exact | streamed | decoder | a, b | 2e-07 | 1e-06 |",
        "| wrong: a\\|b | fallback | encoder | c |  |  |",
    ]
    assert others == ["| no model | e, f |", "| refused: `no-such` | d |"]
