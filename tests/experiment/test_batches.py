"""How prompts become batches, and how long they are estimated to take."""

import itertools
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from attnscope.errors import InputError, ModelError
from attnscope.experiment import estimate as estimating
from attnscope.experiment.batching import by_length
from attnscope.experiment.plan import make_plan
from attnscope.spec.experiment import make_experiment
from support_errors import raises

widths = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(widths=widths, budget=st.integers(1, 2000), padding=st.sampled_from([0.0, 0.1, 1e9]))
def test_batches_fit(widths: list[int], budget: int, padding: float) -> None:
    batches = list(by_length(widths, budget, padding))
    assert sorted(number for batch in batches for number in batch) == list(range(len(widths)))
    for batch in batches:
        padded = len(batch) * max(widths[n] for n in batch)
        assert len(batch) == 1 or padded <= budget
        assert len(batch) == 1 or padded <= (1 + padding) * sum(widths[n] for n in batch) + 1e-9


def test_on_a_cpu_short_prompts_do_not_wait_for_long_ones() -> None:
    lengths = [10] * 5 + [100] * 5
    assert list(by_length(lengths, 8192, 0.1)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert len(list(by_length(lengths, 8192, 1e9))) == 1


@pytest.mark.parametrize("more", [{}, {"queries": ["generated"]}, {"layers": [1]}])
def test_a_check_measures_one_batch_and_extrapolates_by_its_tokens(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that advances by a second with every reading: the rest is arithmetic."""
    monkeypatch.setattr(estimating.time, "perf_counter", itertools.count().__next__)
    plan = make_plan(
        make_experiment(
            name="some",
            models={"model": "zoo:math-qwen2"},
            prompts={"source": "math", "count": 5, "level": 1},
            conditions={"base": {}, "filler": {"insert": {"count": 3}}},
            measures=["mass", "lambda", "profile", "query_entropy"],
            batch_tokens=64,
            **more,
        )
    )
    (found,) = estimating.estimate(plan)
    sizes = sorted(
        sum(len(cells) * max(cells) for cells in batch.lengths())
        for batch in plan.models[0].batches
    )
    assert len(sizes) > 2
    assert found.seconds == pytest.approx(sum(sizes) / sizes[len(sizes) // 2])
    assert (found.cells, found.passes) == (10, 2 * len(sizes))
    assert found.parameters > 0


def test_a_check_names_the_prompt_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("attnscope.experiment.local.measure_batch", fail)
    plan = make_plan(
        make_experiment(
            name="some",
            models={"model": "zoo:math-qwen2"},
            prompts={"source": "math", "count": 1, "level": 1},
        )
    )
    with raises(ModelError, "check-failed", model="model", prompt=0):
        estimating.estimate(plan)


def test_a_plan_makes_cells_when_they_are_asked_for() -> None:
    (of,) = make_plan(
        make_experiment(
            name="some",
            models={"model": "zoo:math-qwen2"},
            prompts={"source": "math", "count": 7, "level": 1},
            conditions={"base": {}, "filler": {"insert": {"count": 3}}},
            batch_tokens=256,
        )
    ).models
    sizes = [(len(batch), batch.tokens) for batch in of.batches]
    assert not any("cells" in vars(batch) for batch in of.batches)
    assert sizes == [(len(list(b)), sum(len(c.tokens) for c in b)) for b in of.batches]
    batch = of.batches[0]
    head, tail = batch.halves()
    assert {cell.id for part in (head, *tail.halves()) for cell in part} == {c.id for c in batch}


def test_the_prompt_that_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("A long first line.\nA long second line.\nShort.\nLong again.")
    asked = make_experiment(
        name="some",
        models={"model": "zoo:math-qwen2"},
        prompts={"source": "file", "path": str(tmp_path / "p.txt")},
        conditions={"base": {}, "filler": {"insert": {"count": 3}, "position": 10}},
        chat=False,
    )
    with raises(InputError, "position-outside-prompt", prompt=2, position=10):
        make_plan(asked)


def test_a_prompt_that_cannot_be_rendered_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are rendered ahead of those that are tokenised; the error says which it was."""
    monkeypatch.setattr("attnscope.tokens.tokenized._BATCH", 2)
    monkeypatch.setattr("attnscope.tokens.chat._BATCH", 3)
    (tmp_path / "p.txt").write_text("One.\nTwo.\nThree.\nFour.\nFive \U0010fffd.\nSix.")
    prompts = {"source": "file", "path": str(tmp_path / "p.txt")}
    asked = make_experiment(name="some", models={"model": "zoo:math-qwen2"}, prompts=prompts)
    with raises(InputError, "no-unused-character", prompt=4):
        make_plan(asked)


def test_a_prompt_without_tokens_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def encoded(prompts: list[Any], tokenizer: Any) -> dict[bool, Any]:
        ids = [[] if "Three" in prompt.text else [5] for prompt in prompts]
        return {True: (prompts, ids, [[(0, 1)] * len(one) for one in ids])}

    monkeypatch.setattr("attnscope.tokens.tokenized._BATCH", 2)
    monkeypatch.setattr("attnscope.tokens.tokenized._encoded", encoded)
    (tmp_path / "p.txt").write_text("One.\nTwo.\nThree.\nFour.\nFive.\nSix.")
    prompts = {"source": "file", "path": str(tmp_path / "p.txt")}
    asked = make_experiment(name="some", models={"model": "zoo:math-qwen2"}, prompts=prompts)
    with raises(InputError, "no-tokens", prompt=2):
        make_plan(asked)
