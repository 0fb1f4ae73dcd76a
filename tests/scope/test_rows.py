"""What single queries look at: rows of a watched model against its own dense attention."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf

import attnscope
from attnscope.errors import ConservationError, InputError, ScopeError
from attnscope.kernels import streaming
from attnscope.scope import pending, reduce
from families import VOCABULARY, build
from pending_share import watching
from support_errors import raises

B, N, NEW, C = 2, 19, 6, 3
CLOSE = 1e-5
GREEDY = {"do_sample": False, "pad_token_id": 0}


def inputs(side: str = "") -> dict[str, torch.Tensor]:
    ids, real = torch.randint(5, VOCABULARY, (B, N)), torch.ones(B, N).long()
    if side:
        real[1, slice(0, 5) if side == "left" else slice(N - 5, N)] = 0
    return {"input_ids": ids * real, "attention_mask": real}


@torch.no_grad()
def dense(name: str, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """[B, H, K, K] of every layer, 0 in rows and columns of padding."""
    real = given["attention_mask"].bool()
    out = build(name, "eager")(**given, output_attentions=True)
    return [A * real[:, None, :, None] * real[:, None, None] for A in out.attentions]


def classes(keys: int) -> torch.Tensor:
    return torch.randint(-1, C, (B, keys))


def masses(A: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([(A * (ids == c)[:, None, None]).sum(-1) for c in range(C)], -1)


def at(A: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The rows of these positions [B, M], nan where one is -1."""
    rows = A.gather(2, where.clamp(min=0)[:, None, :, None].expand(-1, A.shape[1], -1, A.shape[3]))
    return rows.where(where[:, None, :, None] >= 0, torch.nan)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=CLOSE, equal_nan=True)


def agree(scope: Any, attentions: list[torch.Tensor]) -> None:
    """Every per-query result of every layer."""
    for layer, A in enumerate(attentions):
        where = scope.query_positions(layer)
        ids = classes(A.shape[3])
        rows = at(A, where)
        close(scope.rows(layer, ids, C), at(masses(A, ids), where))
        close(scope.rows(layer, ids, C).nanmean(2), scope.mass(layer, ids, C))
        for sequence, places in enumerate(where.tolist()):
            for position in [p for p in places[:1] + places[-1:] if p >= 0]:
                got = scope.row(layer, position, sequence)
                close(got, A[sequence, :, position].to(got.dtype))
        before = where - 1
        picked = rows.gather(3, before.clamp(min=0)[:, None, :, None].expand(*rows.shape[:3], 1))
        close(scope.weight(layer, before), picked[..., 0].where(before[:, None] >= 0, torch.nan))
        close(scope.query_entropy(layer), -(rows * rows.clamp(min=1e-30).log()).sum(-1))
        close(scope.query_entropy(layer, 2), -rows.square().sum(-1).log())
        key, weight, _ = scope.largest(layer, 2)
        close(weight, rows.topk(2).values)
        close(rows.gather(3, key.clamp(min=0))[key >= 0], weight[key >= 0])
        distances(scope, layer, rows, where)


def distances(scope: Any, layer: int, rows: torch.Tensor, where: torch.Tensor) -> None:
    first = scope.sums(layer).first_token[:, None, None, None]
    order, own = torch.arange(rows.shape[3]), where[:, None, :, None]
    sink = (order >= first) & (order < first + 2)
    recent = (order > own - 4) & (order <= own) & ~sink
    wanted = [(rows * part).sum(-1) for part in (sink, recent, ~sink & ~recent)]
    close(scope.by_distance(layer, first=2, recent=4), torch.stack(wanted, -1))


# gpt-oss: learned sinks; gemma2: soft-caps and windows; gptj: the fallback
@pytest.mark.parametrize("side", ["", "left", "right"])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt-oss", "gptj"])
def test_against_dense_attention(name: str, side: str) -> None:
    given = inputs(side)
    model = build(name)
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(**given)
    agree(scope, dense(name, given))


@pytest.mark.parametrize("backend", ["reference", "triton", "eager-fallback"])
def test_other_backends(backend: str) -> None:
    given, model = inputs("left"), build("qwen2")
    with torch.no_grad(), attnscope.watch(model, keep=True, backend=backend) as scope:
        model(**given)
    agree(scope, dense("qwen2", given))


@pytest.mark.parametrize("queries", ["last", "mask"])
def test_chosen_queries(queries: str) -> None:
    given, model = inputs("left"), build("qwen2")
    mask = torch.rand(B, N) < 0.3
    mask[:, -1] = True
    with (
        torch.no_grad(),
        attnscope.watch(model, keep=True, queries=mask if queries == "mask" else queries) as scope,
    ):
        model(**given)
    where = scope.query_positions(0)
    if queries == "last":
        assert where.tolist() == [[N - 1], [N - 1]]
    else:
        wanted = mask & given["attention_mask"].bool()
        assert [sorted(set(row.tolist()) - {-1}) for row in where] == [
            row.nonzero()[:, 0].tolist() for row in wanted
        ]
    agree(scope, dense("qwen2", given))


@pytest.mark.parametrize("hold", [1 / 1024, 0])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("queries", ["all", "predicts"])
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_generation(name: str, queries: str, cache: str, hold: float) -> None:
    """Prompt and steps over the keys of the last; a static cache is written over while we look."""
    model, given = build(name), inputs("left")
    more = {"cache_implementation": "static"} if cache == "static" else {}
    with (
        torch.no_grad(),
        watching(model, queries=queries, keep=True, share=hold) as scope,
    ):
        text = model.generate(**given, max_new_tokens=NEW, **GREEDY, **more)
    fed = text[:, :-1]
    real = torch.cat([given["attention_mask"], torch.ones(B, NEW - 1).long()], 1)
    places = (real.cumsum(1) - 1).clamp(min=0)
    agree(scope, dense(name, {"input_ids": fed, "attention_mask": real, "position_ids": places}))
    where = scope.query_positions(0)
    assert int(where.max()) == N + NEW - 2
    assert int((where >= 0)[0].sum()) == (N + NEW - 1 if queries == "all" else NEW)


def test_keys_of_a_reply_are_held_once() -> None:
    """Every step brings back the keys before it: they are one tensor, not one for each step."""
    model, given = build("qwen2"), inputs()
    with torch.no_grad(), watching(model, keep=True, share=0) as scope:
        model.generate(**given, max_new_tokens=NEW, **GREEDY)
    kept = scope._stored_rows(0)
    assert len(kept) == NEW
    assert len({id(each.keys) for each in kept}) == 1


@pytest.mark.parametrize("side", ["left", ""])
def test_bins(side: str) -> None:
    model, given = build("qwen2"), inputs(side)
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(**given)
    ids = classes(N)
    each, where = scope.rows(0, ids, C), scope.query_positions(0)
    mean = scope.rows(0, ids, C, bin=4)
    padded = [-1 if side else 0, 4, 8, 12, 16]
    assert scope.query_positions(0, bin=4).tolist() == [[0, 4, 8, 12, 16], padded]
    for b in range(B):
        for n in range(5):
            there = (where[b] >= 0) & (where[b] // 4 == n)
            close(mean[b, :, n], each[b][:, there].mean(1))
    assert scope.query_entropy(0, bin=4).shape == (B, 4, 5)


def test_per_query_errors() -> None:
    model, given = build("qwen2"), inputs()
    with torch.no_grad(), attnscope.watch(model) as scope:
        model(**given)
    with raises(ScopeError, "queries-not-kept"):
        scope.rows(0, classes(N), C)
    with raises(InputError, "keep-with-sample", queries="sample:8"):
        attnscope.watch(model, queries="sample:8", keep=True)
    with raises(InputError, "not-boolean", argument="keep", value=3):
        attnscope.watch(model, keep=3)
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(**given)
    where = scope.query_positions(0)
    with raises(InputError, "out-of-range", argument="key_of", value=[1, N]):
        scope.weight(0, where + 1)
    with raises(InputError, "wrong-shape", argument="key_of"):
        scope.weight(0, where[:, 1:])
    with raises(InputError, "bad-number", argument="bin", value=0):
        scope.rows(0, classes(N), C, bin=0)
    with raises(InputError, "unknown-order", value=3):
        scope.query_entropy(0, 3)


def test_no_more_is_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "free_memory", lambda device: 4000)
    model, given = build("qwen2"), inputs()
    with (
        torch.no_grad(),
        raises(ScopeError, "not-enough-memory", limit=2000),
        attnscope.watch(model, keep=True),
    ):
        model(**given)
    with torch.no_grad(), attnscope.watch(model) as scope:
        model(**given)
    assert scope.received(0).shape == (B, 4, N)


def test_a_new_text_forgets_the_rows_before_it() -> None:
    model = build("qwen2")
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(**inputs())
        given = inputs("right")
        model(**given)
    agree(scope, dense("qwen2", given))


@pytest.fixture
def long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text counts as a long one."""
    monkeypatch.setitem(pending.LARGE_BYTES, "cpu", 1)


@pytest.mark.usefixtures("long_texts")
@pytest.mark.parametrize("name", ["qwen2", "gpt-oss"])
def test_sums_of_a_long_text_are_made_when_they_are_read(name: str) -> None:
    given, model = inputs("left"), build(name)
    with torch.no_grad(), attnscope.watch(model) as wanted:
        model(**given)
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(**given)
    rows = scope.rows(0, classes(N), C)
    assert scope._blocks[0].compute is not None
    assert rows.shape == (B, scope.received(0).shape[1], N, C)
    assert scope._blocks[0].compute is None
    assert scope._blocks[1].compute is not None
    for read in (
        "count",
        "received",
        "average",
        "entropy",
        "self_mass",
        "learned_sink_mass",
        "uniform",
    ):
        for layer in scope.layers:
            close(getattr(scope, read)(layer), getattr(wanted, read)(layer))
    agree(scope, dense(name, given))
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(**given)
    again = pickle.loads(pickle.dumps(scope))
    close(again.received(1), wanted.received(1))


@pytest.mark.usefixtures("long_texts")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_long_prompt_is_added_up_before_its_reply(cache: str) -> None:
    model, given = build("gemma3"), inputs("left")
    more = {"cache_implementation": "static"} if cache == "static" else {}
    found = []
    for keep in (False, True):
        with torch.no_grad(), attnscope.watch(model, keep=keep) as scope:
            model.generate(**given, max_new_tokens=NEW, **GREEDY, **more)
        found.append(scope)
    for layer in scope.layers:
        close(found[1].received(layer), found[0].received(layer))
        close(found[1].average(layer), found[0].average(layer))


@pytest.mark.usefixtures("long_texts")
def test_sums_that_do_not_add_up_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    given, model = inputs(), build("qwen2")
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(**given)
    right = streaming.reduce
    monkeypatch.setattr(
        streaming, "reduce", lambda rows: replace(sums := right(rows), mass=sums.mass * 1.01)
    )
    with raises(ConservationError, "conservation", layer=1):
        scope.received(1)
    with raises(ScopeError, "no-forward-pass"):
        scope.received(1)


def test_rows_that_do_not_add_up_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    given, model = inputs(), build("qwen2")
    with torch.no_grad(), attnscope.watch(model, keep=True, backend="triton") as scope:
        model(**given)
    kept = scope._stored_rows(0)[0]
    assert kept.rows is not None
    assert kept.rows.lse is not None
    kept.rows.lse.add_(0.01)
    with pytest.raises(ConservationError) as error:
        scope.rows(0, classes(N), C)
    assert error.value.values["deviation"] == pytest.approx(0.00995, rel=1e-3)


def test_cross_attention_has_rows_and_no_distance() -> None:
    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.BartForConditionalGeneration(config).eval()
    text, reply = torch.randint(5, VOCABULARY, (B, 9)), torch.randint(5, VOCABULARY, (B, 4))
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(input_ids=text, decoder_input_ids=reply)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        A = model(input_ids=text, decoder_input_ids=reply, output_attentions=True)
    ids = classes(9)
    cross = scope["cross"]
    close(cross.rows(0, ids, C), masses(A.cross_attentions[0], ids))
    assert cross.query_positions(0).tolist() == [[0, 1, 2, 3]] * B
    with raises(ScopeError, "cross-attention", measure="by_distance"):
        cross.by_distance(0)
