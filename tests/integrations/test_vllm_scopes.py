"""Scopes of requests, from what recorders on paged keys send; no vLLM needed."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import attnscope
from attnscope.errors import ConservationError, InputError, ScopeError
from attnscope.integrations.vllm import wire
from attnscope.integrations.vllm.answer import answer
from attnscope.integrations.vllm.pending_queries import RecorderOptions
from attnscope.integrations.vllm.recorder import Recorder
from attnscope.integrations.vllm.requests import RequestOptions
from attnscope.integrations.vllm.scopes import build_scope, join_workers
from attnscope.kernels import AttentionSums
from attnscope.scope.queries import Queries
from attnscope.scope.scope import Scope
from paged_engine import Model, PagedEngine, Sequence
from support_errors import raises

SPECS: list[dict[str, Any]] = [{}, {"window": 5}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}]


def run(options: Any = None, **recorder: Any) -> tuple[PagedEngine, list[Sequence]]:
    """Two sequences of different lengths, with their results."""
    model = Model.of(SPECS)
    chosen = RecorderOptions(
        default=RequestOptions(), backend="streaming", memory=1 << 30, **recorder
    )
    engine = PagedEngine(model, Recorder(model.layers, chosen))
    sequences = [
        engine.add("0_a", 7, 12, seed=1, options=options),
        engine.add("1_a", 7, 9, seed=2, options=options),
    ]
    engine.step({"0_a": 7, "1_a": 7})
    engine.step({"0_a": 1, "1_a": 1})
    engine.step({"0_a": 1})
    return engine, sequences


def results(engine: PagedEngine, **ranks: int) -> dict[str, dict[str, Any]]:
    """As a client gets them."""
    sent = wire.encode(engine.recorder.collect({"0_a": None, "1_a": None}))
    known = {"tensor_rank": 0, "pipeline_rank": 0} | ranks
    return {name: result | known for name, result in wire.decode(sent).items()}


def scope_of(parts: list[list[dict[str, Any]]], queries: str = "all") -> Scope:
    return build_scope(
        [join_workers(each) for each in parts],
        queries=Queries(queries),
        backend="streaming",
        dtype=torch.float32,
    )


def dense(sequence: Sequence, layer: int, length: int, **spec: Any) -> Scope:
    q, k = (each[layer, :length].transpose(0, 1)[None] for each in (sequence.q, sequence.k))
    return attnscope.from_tensors(q, k, **spec)


def test_a_scope_has_a_sequence_for_each_completion() -> None:
    engine, sequences = run()
    scope = scope_of([[each] for each in results(engine).values()])
    assert scope.layers == [0, 1, 2]
    assert scope.count(0).tolist() == [9, 8]
    for b, (sequence, length) in enumerate(zip(sequences, (9, 8), strict=True)):
        assert scope.tokens is not None
        assert scope.tokens[b, :length].tolist() == sequence.ids[:length]
        for layer, spec in enumerate(SPECS):
            other = dense(sequence, layer, length, **spec)
            for name in ("received", "average", "uniform"):
                value = getattr(scope, name)(layer)[b, ..., :length]
                torch.testing.assert_close(
                    value, getattr(other, name)(0)[0], rtol=1e-4, atol=1e-4, equal_nan=True
                )
            for name in ("entropy", "first_token", "self_mass", "distance", "learned_sink_mass"):
                value = getattr(scope, name)(layer)[b]
                torch.testing.assert_close(value, getattr(other, name)(0)[0], rtol=1e-4, atol=1e-4)
    assert not bool(scope.received(0)[1, :, 8:].any())


def test_heads_and_layers_of_several_workers_are_joined() -> None:
    engine, _ = run()
    whole = results(engine)["0_a"]

    def part(heads: slice, groups: list[int], **ranks: int) -> dict[str, Any]:
        chosen = []
        for g in groups:
            sums = whole["groups"][g]["sums"]
            halves = {
                each.name: None if (v := getattr(sums, each.name)) is None else v[:, heads]
                for each in fields(AttentionSums)
            }
            chosen.append(whole["groups"][g] | {"sums": AttentionSums(**halves)})
        return whole | {"groups": chosen} | ranks

    low, high = slice(0, 2), slice(2, 4)
    parts = [
        part(high, [2], tensor_rank=1, pipeline_rank=1),
        part(low, [0, 1], tensor_rank=0, pipeline_rank=0),
        part(low, [2], tensor_rank=0, pipeline_rank=1),
        part(high, [0, 1], tensor_rank=1, pipeline_rank=0),
    ]
    joined, alone = scope_of([parts]), scope_of([[whole]])
    assert joined.layers == alone.layers
    for layer in alone.layers:
        assert torch.equal(joined.received(layer), alone.received(layer))
        assert torch.equal(joined.learned_sink_mass(layer), alone.learned_sink_mass(layer))


def test_sums_that_do_not_add_up_are_an_error() -> None:
    engine, _ = run()
    result = results(engine)["0_a"]
    sums = result["groups"][0]["sums"]
    result["groups"][0]["sums"] = replace(sums, mass=sums.mass * 1.01)
    with raises(ConservationError, "conservation"):
        scope_of([[result]]).received(0)


def test_errors_travel_with_their_code_and_values() -> None:
    error = wire.decode(wire.encode(InputError("text", code="unknown-layer", value=4)))
    assert isinstance(error, InputError)
    assert (error.code, error.values["value"], str(error)) == ("unknown-layer", 4, "text")
    unknown = wire.decode(wire.encode(error) | {"class": "KeyboardInterrupt"})
    assert type(unknown).__name__ == "AttnscopeError"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_travel_as_bytes(dtype: torch.dtype) -> None:
    tensor = (torch.arange(6).view(2, 3) % 2).to(dtype)
    assert torch.equal(wire.decode(wire.encode(tensor)), tensor)
    assert wire.decode(wire.encode(tensor[:0])).shape == (0, 3)


class Server:
    """What the answer reads of an engine."""

    model_config = None


def test_the_answer_of_a_server() -> None:
    shares = torch.nn.functional.one_hot(torch.arange(50) % 12, 12).float()
    options = {"measures": ["mass", "entropy", "first_token", "rows"], "queries": [3, 6]}
    engine, sequences = run(options, class_sets={"default": shares})
    results_of = engine.recorder.collect({"0_a": None, "1_a": None})
    part = {"results": wire.encode(results_of), "tensor_rank": 0, "pipeline_rank": 0}
    found = answer("a", [part], Server())
    assert found["counted_queries"] == [2, 2]
    assert (found["prompt_tokens"], found["tokens"]) == ([7, 7], [9, 8])
    for b, (sequence, length) in enumerate(zip(sequences, (9, 8), strict=True)):
        mask = torch.zeros(1, length, dtype=torch.bool)
        mask[0, [3, 6]] = True
        for layer, spec in enumerate(SPECS):
            other = dense(sequence, layer, length, queries=mask, **spec)
            classes = (torch.tensor(sequence.ids[:length]) % 12)[None]
            expected = {
                "mass": other.mass(0, classes, 12),
                "entropy": other.entropy(0),
                "first_token": other.first_token(0),
            }
            for name, value in expected.items():
                got = torch.tensor(found["measures"][name][b][layer])
                torch.testing.assert_close(got, value[0], rtol=1e-4, atol=1e-5)
            rows = found["rows"][b]
            assert rows["positions"] == [3, 6]
            got = torch.tensor(rows["weights"][layer])
            torch.testing.assert_close(got[:, 0], other.row(0, 3), rtol=1e-4, atol=1e-5)


def test_a_request_that_failed_is_the_answer_s_error() -> None:
    engine, _ = run({"measures": ["nothing"]})
    sent = wire.encode(engine.recorder.collect({"0_a": None, "1_a": None}))
    part = {"results": sent, "tensor_rank": 0, "pipeline_rank": 0}
    with raises(InputError, "unknown-measure"):
        answer("a", [part], Server())


def test_queries_that_did_not_run_are_an_error() -> None:
    engine, _ = run()
    result = results(engine)["0_a"] | {"missing": [0, 1]}
    with raises(ScopeError, "prefix-cached"):
        scope_of([[result]])


@pytest.mark.parametrize("option", ["max_logit", "vision"])
def test_options_that_an_engine_does_not_have(option: str) -> None:
    engine = type("LLM", (), {"__module__": "vllm.entrypoints.llm"})()
    with raises(InputError, f"{option.replace('_', '-')}-in-vllm"):
        attnscope.watch(engine, **{option: True})
