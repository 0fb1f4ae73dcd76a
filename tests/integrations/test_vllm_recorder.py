"""The recorder of a vLLM worker on paged keys, compared with the definition; no vLLM needed."""

from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from attnscope.errors import InputError, ModelError
from attnscope.integrations.vllm import query_buffer, reduction
from attnscope.integrations.vllm import recorder as recorders
from attnscope.integrations.vllm.pages import learn_layout
from attnscope.integrations.vllm.pending_queries import RecorderOptions
from attnscope.integrations.vllm.recorder import Recorder
from attnscope.integrations.vllm.requests import RequestOptions
from paged_engine import WRITERS, Model, PagedEngine, Sequence, expected
from support_errors import raises

PLAIN: list[dict[str, Any]] = [{}, {}, {}]


def make(
    specs: list[dict[str, Any]] = PLAIN,
    *,
    queries: Any = "all",
    keep: bool = False,
    late_steps: int = 0,
    class_of: torch.Tensor | None = None,
    memory: int = 1 << 30,
    stop_strings_late: bool = False,
    backend: str = "streaming",
    class_sets: dict[str, torch.Tensor] | None = None,
    most_finished: int | None = None,
    **model: Any,
) -> PagedEngine:
    torch.manual_seed(0)
    built = Model.of(specs, **model)
    options = RecorderOptions(
        default=RequestOptions(queries=queries, keep=keep),
        backend=backend,
        memory=memory,
        late_steps=late_steps,
        stop_strings_late=stop_strings_late,
        class_of=class_of,
        class_sets=class_sets or {},
        most_finished=most_finished,
    )
    return PagedEngine(built, Recorder(built.layers, options))


def check(
    engine: PagedEngine, sequence: Sequence, length: int | None, positions: list[int]
) -> dict[str, Any]:
    """Compare the result of a request with the definition, for these queries."""
    result = engine.recorder.collect({sequence.id: length})[sequence.id]
    assert result["error"] is None, result["error"]
    length = result["length"]
    assert result["token_ids"] == sequence.ids[:length]
    groups = {layer: group for group in result["groups"] for layer in group["layers"]}
    for layer in engine.model.layers:
        group = groups[layer.layer]
        i = group["layers"].index(layer.layer)
        dense, weights = expected(layer, sequence, positions, length)
        sums = group["sums"]
        for name in ("received", "received_later", "entropy", "self_mass", "mass"):
            value = getattr(sums, name)[i]
            if name.startswith("received"):
                value = pad(value[..., :length], (0, max(0, length - value.shape[-1])))
            torch.testing.assert_close(value, getattr(dense, name)[0], rtol=1e-4, atol=1e-4)
        assert not bool(sums.received[i, :, length:].any())
        if layer.sinks is not None:
            taken = 1 - weights.sum(-1)
            torch.testing.assert_close(sums.sink[i], taken.sum(-1), rtol=1e-4, atol=1e-4)
        for at, rows in group["kept"]:
            of = [positions.index(position) for position in at]
            part = pad(rows[i], (0, length - rows.shape[-1]))
            torch.testing.assert_close(part, weights[:, of].float(), rtol=1e-4, atol=1e-5)
    return result


@pytest.mark.parametrize("writer", list(WRITERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layout_of_pages_is_learned(writer: str, dtype: torch.dtype) -> None:
    cache = torch.zeros(6, 3, 16, 24, dtype=dtype)
    layout = learn_layout(WRITERS[writer], cache, 12)
    keys = torch.randn(40, 3, 12).to(dtype)
    slots = torch.randperm(6 * 16)[:40]
    WRITERS[writer](keys, torch.zeros_like(keys), cache, slots)
    stored = layout.read(cache, torch.arange(6))
    assert torch.equal(stored[:, slots], keys.transpose(0, 1))
    assert (layout.view(cache) is None) == (writer == "paired")


def test_a_backend_that_changes_keys_is_refused() -> None:
    def write(keys: torch.Tensor, *rest: torch.Tensor) -> None:
        WRITERS["plain"]((keys / 7).round(), *rest)

    with raises(ModelError, "unreadable-pages"):
        learn_layout(write, torch.zeros(3, 2, 4, 16), 8)


BACKENDS = ["streaming", "triton"]
"""The second one reads pages on the device, here in Triton's interpreter."""


@pytest.mark.parametrize("writer", list(WRITERS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_and_decode_in_one_batch(writer: str, backend: str) -> None:
    engine = make(writer=writer, backend=backend)
    a, b = engine.add("a", 7, 12, seed=1), engine.add("b", 3, 9, seed=2)
    engine.step({"a": 7})
    engine.step({"b": 3, "a": 1}, order=["a", "b"])
    for _ in range(4):
        engine.step({"a": 1, "b": 1}, order=["b", "a"])
    check(engine, a, None, list(range(12)))
    check(engine, b, None, list(range(7)))


SPECS: dict[str, list[dict[str, Any]]] = {
    "windows": [{"window": 5}, {}, {"window": 9}, {"window": 5}],
    "soft-cap": [{"softcap": 3.0}, {"softcap": 3.0}],
    "sinks": [{"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"sinks": torch.zeros(4)}],
    "ALiBi": [{"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}] * 2,
}


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("large", [4, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kind_of_layer(
    name: str, large: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "LARGE_ROWS", large)
    engine = make(SPECS[name], keep=True, backend=backend)
    a = engine.add("a", 18, 30, seed=3)
    engine.step({"a": 11})  # chunked prefill
    engine.step({"a": 7})
    for _ in range(12):
        engine.step({"a": 1})
    check(engine, a, None, list(range(30)))


@pytest.mark.parametrize(
    ("queries", "positions"),
    [
        ("last", [9]),
        ("generated", [10, 11, 12, 13]),
        ("predicts", [9, 10, 11, 12, 13]),
        ((2, 3, 7, 12), [2, 3, 7, 12]),
    ],
)
def test_chosen_queries(queries: Any, positions: list[int]) -> None:
    engine = make([{}, {"window": 4}], queries=queries, keep=True)
    a = engine.add("a", 10, 14, seed=4)
    engine.step({"a": 6})
    engine.step({"a": 4})
    for _ in range(4):
        engine.step({"a": 1})
    check(engine, a, None, positions)


def test_no_counted_query_gives_no_sums() -> None:
    engine = make(queries="generated")
    engine.add("a", 10, 10)
    engine.step({"a": 10})
    result = engine.recorder.collect({"a": 10})["a"]
    assert result["error"] is None
    assert [group["sums"] for group in result["groups"]] == [None]


def test_pages_that_another_request_gets_are_read_before() -> None:
    engine = make(pages=9, page=4)
    a = engine.add("a", 9, 15, seed=5)
    engine.step({"a": 9})
    for _ in range(6):
        engine.step({"a": 1})
    engine.finish("a")
    b = engine.add("b", 20, 24, seed=6)
    engine.step({"b": 20})  # takes pages of a
    assert engine.recorder.requests["a"].finished
    engine.step({"b": 1})
    check(engine, a, 15, list(range(15)))
    check(engine, b, None, list(range(21)))


def test_a_preempted_request_counts_every_query_once() -> None:
    engine = make(pages=8, page=4)
    a, b = engine.add("a", 6, 24, seed=7), engine.add("b", 5, 12, seed=8)
    engine.step({"a": 6, "b": 5})
    for _ in range(4):
        engine.step({"a": 1, "b": 1})
    pages = set(engine.sequences["b"].blocks)
    engine.preempt("b")
    for _ in range(11):
        engine.step({"a": 1})
    assert pages & set(engine.sequences["a"].blocks)  # a has written to pages of b
    engine.finish("a")
    engine.step({"b": 9})  # all tokens again, on other pages
    engine.step({"b": 1})
    check(engine, a, 21, list(range(21)))
    check(engine, b, None, list(range(10)))


def test_a_request_that_is_aborted_after_it_lost_its_pages() -> None:
    engine = make(pages=8, page=4)
    a, b = engine.add("a", 6, 24, seed=7), engine.add("b", 5, 12, seed=8)
    engine.step({"a": 6, "b": 5})
    for _ in range(4):
        engine.step({"a": 1, "b": 1})
    engine.preempt("b")
    for _ in range(11):
        engine.step({"a": 1})
    engine.finish("b")
    engine.step({"a": 1})
    check(engine, a, None, list(range(22)))
    check(engine, b, None, list(range(9)))


def test_a_shared_prefix_is_read_from_its_pages() -> None:
    engine = make([{}, {"window": 6}], queries="generated")
    engine.add("a", 11, 14, seed=9)
    engine.step({"a": 11})
    b = engine.add("b", 10, 15, seed=10, prefix_of="a", prefix_pages=2)
    engine.step({"b": 2, "a": 1})
    for _ in range(5):
        engine.step({"b": 1})
    check(engine, b, None, [10, 11, 12, 13, 14])


def test_queries_that_the_prefix_cache_replaced_are_reported() -> None:
    engine = make(queries="all")
    engine.add("a", 11, 14, seed=9)
    engine.step({"a": 11})
    engine.add("b", 10, 15, seed=10, prefix_of="a", prefix_pages=2)
    engine.step({"b": 2})
    result = engine.recorder.collect({"b": None})["b"]
    assert result["missing"] == list(range(8))


def test_a_small_buffer_is_flushed_and_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_buffer, "PENDING_BYTES", 0)
    monkeypatch.setattr(query_buffer, "MIN_PENDING", 7)
    engine = make(late_steps=1)
    sequences = [engine.add(str(i), 3 + i, 14, seed=20 + i) for i in range(3)]
    engine.step({"0": 3, "1": 4, "2": 5})  # more rows than the buffer has
    for _ in range(6):
        engine.step({"0": 1, "1": 1, "2": 1})
    assert engine.recorder.pending.buffer.capacity == 7
    for i, sequence in enumerate(sequences):
        check(engine, sequence, 9 + i, list(range(9 + i)))


def test_steps_after_the_end_of_a_completion_do_not_count() -> None:
    engine = make(late_steps=1, pages=9, page=4)
    a = engine.add("a", 5, 12, seed=11)
    engine.step({"a": 5})
    for _ in range(6):
        engine.step({"a": 1})
    engine.finish("a")  # its tokens end at 10, and the engine has read 11
    engine.add("b", 20, 20, seed=12)
    engine.step({"b": 20})
    check(engine, a, 10, list(range(10)))


def test_a_stop_string_may_come_some_steps_late() -> None:
    engine = make(stop_strings_late=True, pages=9, page=4)
    a = engine.add("a", 5, 14, seed=13, stops_late=True)
    b = engine.add("b", 4, 14, seed=14)
    engine.step({"a": 5, "b": 4})
    for _ in range(8):
        engine.step({"a": 1, "b": 1})
    engine.preempt("b")
    engine.step({"a": 1})
    engine.finish("a")
    engine.step({"b": 12})
    check(engine, a, 9, list(range(9)))
    check(engine, b, 12, list(range(12)))


def test_more_late_steps_than_are_held_back_are_an_error() -> None:
    engine = make(late_steps=1)
    engine.add("a", 5, 12, seed=11)
    engine.step({"a": 5})
    for _ in range(6):
        engine.step({"a": 1})
    assert engine.recorder.collect({"a": 8})["a"]["error"].code == "stopped-late"


def test_flow_counts_queries_by_the_class_of_their_token() -> None:
    class_of = torch.arange(50) % 3 - 1
    engine = make(class_of=class_of)
    a = engine.add("a", 6, 10, seed=15)
    engine.step({"a": 6})
    for _ in range(4):
        engine.step({"a": 1})
    result = check(engine, a, None, list(range(10)))
    flow = result["groups"][0]["sums"].flow
    for c in range(2):
        positions = [i for i in range(10) if class_of[a.ids[i]] == c]
        dense, _ = expected(engine.model.layers[0], a, positions, 10)
        torch.testing.assert_close(flow[0, :, c], dense.received[0], rtol=1e-4, atol=1e-4)


def test_a_request_over_the_memory_limit_fails_alone() -> None:
    engine = make(memory=1200)
    a = engine.add("a", 4, 6, seed=16)
    engine.add("b", 12, 30, seed=17)
    engine.step({"a": 4, "b": 12})
    check(engine, a, None, list(range(4)))
    assert engine.recorder.collect({"b": None})["b"]["error"].code == "not-enough-memory"


def test_a_page_that_does_not_hold_the_key_of_its_token_is_an_error() -> None:
    engine = make()
    engine.add("a", 4, 6)
    engine.model.write = lambda *_: None  # pages stay as they are
    engine.step({"a": 4})
    assert engine.recorder.collect({"a": None})["a"]["error"].code == "unreadable-pages"


def test_unknown_options_of_a_request_are_its_error() -> None:
    engine = make()
    a = engine.add("a", 4, 6, options={"queries": "nothing"})
    b = engine.add("b", 4, 6, options={"queries": "last"}, seed=3)
    engine.step({"a": 4, "b": 4})
    assert engine.recorder.collect({a.id: None})["a"]["error"].code == "unknown-queries"
    check(engine, b, None, [3])
    with raises(InputError, "unknown-option"):
        RequestOptions.parse({"measure": "mass"})


def test_random_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests that start, pause, lose their pages and end at random."""
    monkeypatch.setattr(query_buffer, "PENDING_BYTES", 0)
    monkeypatch.setattr(query_buffer, "MIN_PENDING", 24)
    monkeypatch.setattr(recorders, "LARGE_ROWS", 9)
    monkeypatch.setattr(reduction, "STACKED_BYTES", 1500)
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)

        def pick(high: int, low: int = 0, draw: torch.Generator = draw) -> int:
            return int(torch.randint(low, high, (1,), generator=draw))

        engine = make([{}, {"window": 7}, {}], pages=30, page=4, late_steps=seed % 2)
        done: list[tuple[Sequence, int]] = []
        waiting = [(f"r{i}", pick(16, 1), pick(14)) for i in range(12)]
        live: dict[str, Sequence] = {}
        while waiting or live:
            while waiting and len(live) < 4:
                name, prompt, more = waiting.pop()
                live[name] = engine.add(name, prompt, prompt + more, seed=pick(1000))
            counts, need = {}, 0
            for name, sequence in live.items():
                left = len(sequence.ids) - sequence.computed
                count = 1 if sequence.computed >= sequence.prompt else pick(left + 1, 1)
                pages = -(-(sequence.computed + count) // 4) - len(sequence.blocks)
                if need + pages <= len(engine.free) and pick(5):
                    counts[name], need = count, need + pages
            if counts:
                engine.step(counts, order=sorted(counts))
            elif len(engine.free) < 8:
                engine.preempt(max(live, key=lambda name: len(live[name].blocks)))
            for name in list(live):
                if live[name].computed == len(live[name].ids):
                    done.append((live.pop(name), len(engine.sequences[name].ids)))
                    engine.finish(name)
        for sequence, length in done:
            check(engine, sequence, length, list(range(length)))


@pytest.mark.parametrize("large", [4, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_by_class_do_not_grow_with_the_text(
    large: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "LARGE_ROWS", large)
    shares = torch.nn.functional.one_hot(torch.arange(50) % 4, 4).float() * 0.5
    engine = make([{}, {"window": 5}], class_sets={"default": shares}, backend=backend)
    a = engine.add("a", 11, 40, seed=18, options=["mass"])
    engine.step({"a": 6})
    engine.step({"a": 5})
    request = engine.recorder.requests["a"]
    for _ in range(4):
        engine.step({"a": 1})
    engine.recorder.pending.flush([request])
    size = request.nbytes
    for _ in range(20):
        engine.step({"a": 1})
    engine.recorder.pending.flush([request])
    assert request.nbytes == size
    result = engine.recorder.collect({"a": None})["a"]
    assert result["by_class"]
    for g, layer in enumerate(engine.model.layers):
        sums = result["groups"][g]["sums"]
        dense, _ = expected(layer, a, list(range(35)), 35)
        by_class = dense.received[0] @ shares[torch.tensor(a.ids[:35])]
        torch.testing.assert_close(sums.received[0, :, 1:], by_class, rtol=1e-4, atol=1e-4)
        first = dense.received[0, :, 0]
        torch.testing.assert_close(sums.received[0, :, 0], first, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sums.entropy[0], dense.entropy[0], rtol=1e-4, atol=1e-4)


def test_measures_by_token_keep_sums_by_key() -> None:
    engine = make(class_sets={"default": torch.ones(50, 1)})
    a = engine.add("a", 4, 9, options={"measures": ["mass", "received"]})
    engine.step({"a": 4})
    engine.step({"a": 1})
    assert not check(engine, a, None, list(range(5)))["by_class"]


def test_only_the_last_finished_requests_are_kept() -> None:
    engine = make(most_finished=2)
    for i in range(4):
        engine.add(str(i), 4, 8, seed=i)
        engine.step({str(i): 4})
        engine.step({str(i): 1})
        engine.finish(str(i))
    engine.add("last", 4, 8)
    engine.step({"last": 4})
    recorder = engine.recorder
    assert list(recorder.requests) == ["2", "3", "last"]
    assert not recorder.pending.token_rows


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"queries": "sample:4"}, "unknown-queries"),
        ({"queries": [1, 1]}, "unknown-queries"),
        ({"queries": [-1]}, "unknown-queries"),
        ({"measures": ["n_heads"]}, "unknown-measure"),
        ({"measures": "mass"}, "bad-options"),
        ({"classes": "/etc/passwd"}, "unknown-class-set"),
        ({"classes": ["default"]}, "unknown-class-set"),
        ({"keep": 1}, "not-boolean"),
        ({"measures": ["rows"]}, "too-many-rows"),
        ({"measures": ["rows"], "queries": list(range(65))}, "too-many-rows"),
        ("{", "bad-options"),
        (3, "bad-options"),
    ],
)
def test_wrong_options_of_a_request(options: Any, code: str) -> None:
    with raises(InputError, code):
        RequestOptions.parse(options)


def test_options_of_a_request() -> None:
    parsed = RequestOptions.parse('{"measures": ["rows"], "queries": [7, 3]}')
    assert parsed.queries == (3, 7)
    assert parsed.keep
    assert parsed.by_class
    assert not RequestOptions.parse(["average"]).by_class
