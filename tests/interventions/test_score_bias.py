"""Knockout and steering: what they promise, against attention spelled out."""

import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

import attnscope
import biased_attention as dense
from attnscope.errors import InputError, ModelError
from attnscope.interventions import score_bias
from families import ENCODERS, FALLBACK, VOCABULARY, build
from support_errors import raises

B, N = 2, 14
FAMILIES = ["llama", "qwen2", "mistral", "gemma2", "gemma3", "gpt2", "gpt-neox", "gpt-oss", "bert"]
KEYS = torch.zeros(B, N, dtype=torch.bool)
KEYS[0, [5, 8, 9]] = True
KEYS[1, [0, 2, 7]] = True
QUERIES = torch.zeros(B, N, dtype=torch.bool)
QUERIES[0, [7, 9, 13]] = True
QUERIES[1, [3, 12]] = True


def inputs(*, padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(5, VOCABULARY, (B, N), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    if padded:
        real[0, :3] = 0
    return {"input_ids": ids, "attention_mask": real}


def output(model: Any, given: dict[str, Tensor]) -> Tensor:
    made = model(**given)
    return made.logits if hasattr(made, "logits") else made.last_hidden_state


def spelled(keys: Tensor, bias: float, heads: list[int], queries: Tensor | None = None) -> Tensor:
    """[B, 4, N, N], written out entry by entry."""
    table = torch.zeros(B, 4, N, N)
    for b, i, j in torch.ones(B, N, N).nonzero().tolist():
        if keys[b, j] and (queries is None or queries[b, i]):
            table[b, heads, i, j] = bias
    return table


def agree(name: str, got: Tensor, wanted: Tensor, real: Tensor) -> None:
    off = (got - wanted)[real.bool()].abs().max() / wanted[real.bool()].abs().max()
    assert off < 1e-5, name


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_equals_attention_spelled_out(name: str) -> None:
    """Every head and query; some heads; some queries; both; steering; and all of them nested."""
    model, oracle, given = build(name), build(name, dense.NAME), inputs()
    real = given["attention_mask"]
    # With left padding and windows, some would lose all they see: those keys stay.
    keys = KEYS.clone()
    keys[1, 0] = name in ENCODERS
    rows = QUERIES
    every = [0, 1, 2, 3]
    low = -1e30  # eager masks are finite, and a padding row would have nothing left
    cases: list[tuple[list[Any], dict[int, Tensor]]] = [
        ([attnscope.knockout(model, keys=keys)], {n: spelled(keys, low, every) for n in range(3)}),
        ([attnscope.knockout(model, keys=keys, layers=1, heads=[0, 3])],
         {1: spelled(keys, low, [0, 3])}),
        ([attnscope.knockout(model, keys=keys, queries=rows, layers=[0, 2])],
         {n: spelled(keys, low, every, rows) for n in (0, 2)}),
        ([attnscope.knockout(model, keys=keys, queries=rows, heads=2, layers=[1])],
         {1: spelled(keys, low, [2], rows)}),
        ([attnscope.steer(model, keys=keys, factor=5.0, heads=[1, 2])],
         {n: spelled(keys, math.log(5), [1, 2]) for n in range(3)}),
        ([attnscope.steer(model, keys=~keys, factor=0.2, layers=0),
          attnscope.knockout(model, keys=keys, queries=rows, layers=[0, 1]),
          attnscope.knockout(model, keys=keys, heads=3, layers=1)],
         {0: spelled(~keys, math.log(0.2), every) + spelled(keys, low, every, rows),
          1: spelled(keys, low, every, rows) + spelled(keys, low, [3])}),
    ]  # fmt: skip
    plain = output(model, given)
    for blocks, bias in cases:
        with dense.adding(bias) as weights:
            wanted = output(oracle, given)
            wanted_weights = dict(weights)
        with attnscope.watch(model) as scope:
            for block in blocks:
                block.__enter__()
            got = output(model, given)
            for block in reversed(blocks):
                block.__exit__(None, None, None)
        agree(name, got, wanted, real)
        assert (got - plain)[real.bool()].abs().max() > 1e-4
        for layer in scope.layers:
            A = wanted_weights[layer] * real[:, None, :, None] * real[:, None, None]
            assert (scope.received(layer) - A.sum(2)).abs().max() < 1e-4
            entropy = torch.special.entr(A).sum((2, 3)) / real.sum(1)[:, None]
            assert (scope.entropy(layer) - entropy).abs().max() < 1e-4
    assert torch.equal(output(model, given), plain)


@pytest.mark.parametrize("backend", ["reference", "streaming", "triton", "eager-fallback"])
@torch.no_grad()
def test_every_backend_measures_the_changed_attention(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model, given = build("qwen2"), inputs(padded=False)
    keys = KEYS & (torch.arange(N) > 0)
    classes = keys.long()
    with (
        attnscope.knockout(model, keys=keys, queries=QUERIES, layers=1, heads=[1]),
        attnscope.watch(model, queries=QUERIES, backend=backend, keep=True) as scope,
    ):
        model(**given)
    mass = scope.mass(1, classes, 2)
    assert (mass[:, 1, 1] == 0).all()
    assert (mass[:, [0, 2, 3], 1] > 0).all()
    assert torch.allclose(mass.sum(-1), torch.ones(B, 4), atol=1e-5)
    top = scope.largest(1, 3).key
    looked = keys[:, None, None].expand(-1, 4, top.shape[2], -1).gather(3, top.clamp(min=0))
    assert not looked[:, 1][top[:, 1] >= 0].any()


@torch.no_grad()
def test_generate() -> None:
    """Step by step with a cache is what a pass over all of it is: new tokens are not knocked out,
    and new queries are cut off where all or the generated ones are meant."""
    model = build("qwen2")
    given = inputs(padded=False)
    keys = KEYS & (torch.arange(N) > 0)
    for queries in ("all", "generated", "last"):
        with attnscope.knockout(model, keys=keys, queries=queries):
            ids = model.generate(**given, max_new_tokens=5, do_sample=False)
        rows = torch.ones(B, ids.shape[1], dtype=torch.bool)
        if queries == "generated":
            rows[:, :N] = False
        elif queries == "last":
            rows[:] = torch.arange(ids.shape[1]) == N - 1
        longer = torch.nn.functional.pad(keys, (0, ids.shape[1] - N))
        with attnscope.knockout(model, keys=longer, queries=rows):
            predicted = model(input_ids=ids).logits.argmax(-1)
        assert torch.equal(predicted[:, N - 1 : -1], ids[:, N:])
    plain = model.generate(**given, max_new_tokens=5, do_sample=False)
    with attnscope.knockout(model, keys=keys):
        assert not torch.equal(model.generate(**given, max_new_tokens=5, do_sample=False), plain)
    assert torch.equal(model.generate(**given, max_new_tokens=5, do_sample=False), plain)


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    """A sequence alone, and in a padded batch, on either side."""
    model = build("gemma3")
    ids = torch.randint(5, VOCABULARY, (1, 9))
    keys = torch.zeros(1, 9, dtype=torch.bool)
    keys[0, [2, 3]] = True
    rows = torch.zeros(1, 9, dtype=torch.bool)
    rows[0, [4, 8]] = True
    with attnscope.knockout(model, keys=keys, queries=rows):
        alone = model(input_ids=ids).logits
    for left in (True, False):
        wide = (5, 0) if left else (0, 5)
        there = slice(5, None) if left else slice(0, 9)

        def among(short: Tensor, other: Tensor, wide: tuple[int, int] = wide) -> Tensor:
            return torch.cat([torch.nn.functional.pad(short, wide), other])

        batch = among(ids, torch.randint(5, VOCABULARY, (1, 14)))
        real = among(torch.ones_like(ids), torch.ones(1, 14, dtype=torch.long))
        some = torch.arange(14)[None] == 3
        with attnscope.knockout(model, keys=among(keys, some), queries=among(rows, ~some)):
            made = model(input_ids=batch, attention_mask=real).logits[:1, there]
        assert (made - alone).abs().max() < 1e-5
        everything = torch.ones(1, 14, dtype=torch.bool)
        with attnscope.knockout(model, keys=among(keys, some), queries=everything.expand(2, -1)):
            assert model(input_ids=batch, attention_mask=real).logits.isfinite().all()


@torch.no_grad()
def test_errors() -> None:
    model, given = build("qwen2"), inputs(padded=False)
    some = torch.zeros(B, N, dtype=torch.bool)
    some[:, 4] = True

    def fails(code: str, values: dict[str, Any], **options: Any) -> None:
        with raises(InputError, code, **values), attnscope.knockout(model, **options):
            model(**given)

    fails("no-keys", {}, keys=torch.zeros(B, N, dtype=torch.bool))
    fails("wrong-shape", {"argument": "keys", "got": f"int64 [{B}, {N}]"}, keys=some.long())
    fails("unknown-layer", {"value": 7}, keys=some, layers=[7])
    fails("unknown-head", {"value": 4, "layer": 0}, keys=some, heads=[4])
    fails("unknown-head", {"value": -1}, keys=some, heads=[-1])
    fails("no-heads", {}, keys=some, heads=[])
    fails("wrong-shape", {"argument": "keys", "got": f"bool [1, {N}]"}, keys=some[:1])
    fails("wrong-shape", {"argument": "keys", "got": f"bool [{B}, 6]"}, keys=some[:, :6])
    fails("unsupported-queries", {"queries": "sample:4"}, keys=some, queries="sample:4")
    hidden = {"position": 0, "sequence": 0}
    fails("no-visible-key", hidden | {"layer": 0}, keys=~some)
    first = torch.arange(N).expand(B, -1) == 0
    fails("no-visible-key", hidden | {"layer": 1}, keys=first, heads=[2], layers=[1])
    with raises(InputError, "value-out-of-range", argument="factor", value=0):
        attnscope.steer(model, keys=some, factor=0)
    name = next(iter(FALLBACK))
    with (
        raises(ModelError, "intervention-not-applied"),
        attnscope.knockout(build(name), keys=some),
    ):
        pass


@torch.no_grad()
def test_nested_knockouts_may_not_blind_a_query_together() -> None:
    """Each knockout leaves visible keys; both together leave none in one head, for one token."""
    model, given = build("qwen2"), inputs(padded=False)
    start = torch.arange(N).expand(B, -1) < 2
    rest = ~start
    third = torch.arange(N).expand(B, -1) == 2
    for heads in ([1], [1, 2], None):
        with (
            attnscope.knockout(model, keys=start, queries=third, heads=heads, layers=2),
            attnscope.knockout(model, keys=rest, queries=third, heads=[0, 1], layers=2),
            raises(InputError, "no-visible-key", position=2, sequence=0, layer=2),
        ):
            model(**given)
    with (
        attnscope.knockout(model, keys=start, queries=third, heads=[0, 1], layers=2),
        attnscope.knockout(model, keys=rest, queries=third, heads=[2, 3], layers=2),
    ):
        assert model(**given).logits.isfinite().all()


@torch.no_grad()
def test_a_family_that_does_more_than_its_arguments_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """What we would compute in its place is not what it does."""
    from transformers.models.qwen2 import modeling_qwen2

    honest = modeling_qwen2.eager_attention_forward

    def other(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return honest(module, query * 0.7, *args, **kwargs)

    monkeypatch.setattr(modeling_qwen2, "eager_attention_forward", other)
    model = build("qwen2", "eager")
    keys = torch.arange(N).expand(B, -1) == 4
    refused = raises(ModelError, "intervention-not-applied", module="Qwen2Attention")
    with refused, attnscope.knockout(model, keys=keys):
        model(**inputs())


@torch.no_grad()
def test_many_nested_knockouts_are_checked_once_for_each_set_of_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, given = build("qwen2"), inputs(padded=False)
    checked, count = [], score_bias._n_visible

    def counted(*arguments: Any) -> Any:
        checked.append(arguments)
        return count(*arguments)

    monkeypatch.setattr(score_bias, "_n_visible", counted)
    order, last = torch.arange(N).expand(B, -1), torch.arange(N).expand(B, -1) == N - 1
    with ExitStack() as blocks:
        for key in range(6):
            keys, heads = order == key, [key % 2]
            cut = attnscope.knockout(model, keys=keys, queries=last, heads=heads, layers=0)
            blocks.enter_context(cut)
        assert model(**given).logits.isfinite().all()
    assert len(checked) == 6
