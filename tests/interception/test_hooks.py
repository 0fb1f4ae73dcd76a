"""Several hooks on one model: attention is computed once, and other callers are unaffected."""

import copy
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

import attnscope
from attnscope.activations.layer_activations import capture_activations
from attnscope.errors import ModelError, ScopeError
from attnscope.interception import dispatch, patches, sites
from attnscope.interception.captured_call import CapturedCall
from attnscope.interception.hooks import Hook
from attnscope.interception.intercept import register
from attnscope.interception.sites import Site
from attnscope.kernels import AttentionCall
from families import VOCABULARY, build
from support_errors import raises

B, N = 2, 13
NAMES = ["qwen2", "gemma2", "falcon", "gptj", "bert"]


def inputs(name: str = "qwen2") -> dict[str, torch.Tensor]:
    ids = torch.randint(5, VOCABULARY, (B, N))
    real = torch.ones_like(ids)
    real[0, :4] = 0
    return {"input_ids": ids, "attention_mask": real}


def first(output: Any) -> torch.Tensor:
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


class Count(Hook):
    """A hook that records its calls and passes."""

    def __init__(self, *, needs_geometry: bool) -> None:
        self.needs_geometry = needs_geometry
        self.seen: list[CapturedCall] = []
        self.passes: list[tuple[str, bool]] = []

    def on_call(self, seen: CapturedCall) -> None:
        self.seen.append(seen)

    def end(self, stack: str, *, finished: bool) -> None:
        self.passes.append((stack, finished))


class Rewrite(Hook):
    """A hook that rewrites calls by a function, and gets none."""

    def __init__(self, rewrite: Any) -> None:
        self.rewrite = rewrite

    def wants(self, site: Site) -> bool:
        return False

    def rewrite_call(self, site: Site, call: AttentionCall, geometry: Any) -> AttentionCall:
        return self.rewrite(site, call, geometry)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
@torch.no_grad()
def test_several_watches_end_in_any_order(name: str, order: list[int]) -> None:
    model, text = build(name), inputs()
    mask = torch.zeros(B, N, dtype=torch.bool)
    mask[:, 5:9] = True
    choices: list[dict[str, Any]] = [{}, {"queries": "last", "layers": [1]}, {"queries": mask}]
    wanted = []
    for choice in choices:
        with attnscope.watch(model, **choice) as scope:
            model(**text)
        wanted.append(scope)
    watches = [attnscope.watch(model, **choice) for choice in choices]
    scopes = [watch.__enter__() for watch in watches]
    model(**text)
    for leaving in order:
        watches[leaving].__exit__(None, None, None)
        assert (leaving != order[-1]) == bool(patches._active)
        if leaving != order[-1]:  # the other watches are still open
            model(**text)
    for scope, alone in zip(scopes, wanted, strict=True):
        for layer in alone.layers:
            assert torch.equal(scope.received(layer), alone.received(layer))
            assert torch.equal(scope.entropy(layer), alone.entropy(layer))


@torch.no_grad()
def test_attention_is_computed_once_for_all_hooks() -> None:
    model, one, two = build("qwen2"), Count(needs_geometry=True), Count(needs_geometry=True)
    found = sites.find(model)
    with (
        register(found, one),
        attnscope.watch(model),
        attnscope.watch(model.model),
        register(found, two),
    ):
        model(**inputs())
    assert [seen.site for seen in one.seen] == [Site("decoder", layer) for layer in range(3)]
    for a, b in zip(one.seen, two.seen, strict=True):
        assert a.geometry is b.geometry
        assert a.lse is b.lse is not None
    assert one.passes == two.passes == [("decoder", True)]


@torch.no_grad()
def test_an_observer_without_geometry_uses_the_original_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "attend", lambda *_: 1 / 0)
    model, text, one = build("qwen2"), inputs(), Count(needs_geometry=False)
    plain = first(model(**text))
    with register(sites.find(model), one):
        assert torch.equal(first(model(**text)), plain)
    assert [seen.v is not None for seen in one.seen] == [True] * 3


@torch.no_grad()
def test_changes_run_in_order_before_attention() -> None:
    """Observers and the model get the changed call."""
    model, text = build("qwen2"), inputs()
    applied: list[tuple[str, int]] = []

    def double(site: Site, call: AttentionCall, frame: Any) -> AttentionCall:
        applied.append(("double", site.layer))
        return replace(call, v=call.v * 2)

    def drop(site: Site, call: AttentionCall, frame: Any) -> AttentionCall:
        applied.append(("drop", site.layer))
        return replace(call, v=call.v * 0) if site.layer == 1 else call

    plain, found = first(model(**text)), sites.find(model)
    with capture_activations(model) as held:
        model(**text)
        values = held.values(0)
    with (
        register(found, Rewrite(double)),
        register(found, Rewrite(drop)),
        capture_activations(model) as held,
        attnscope.watch(model) as scope,
    ):
        changed = first(model(**text))
        torch.testing.assert_close(held.values(0), 2 * values)
        assert not held.values(1).any()
        assert not held.outputs(1).any()
    assert applied == [(name, layer) for layer in range(3) for name in ("double", "drop")]
    assert not torch.allclose(changed, plain)
    assert scope.count(0).tolist() == [N - 4, N]
    assert torch.equal(first(model(**text)), plain)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_a_bias_that_no_kernel_supports_is_applied_and_measured(implementation: str) -> None:
    """The eager fallback computes and measures the changed call."""
    model, text = build("qwen2", implementation), inputs()
    away = torch.zeros(1, 1, N, N)
    away[..., 7:9, 5] = -torch.inf

    def knock(site: Site, call: AttentionCall, frame: Any) -> AttentionCall:
        return replace(call, bias=away)

    with register(sites.find(model), Rewrite(knock)), attnscope.watch(model) as scope:
        changed = first(model(**text))
    mask = torch.ones(B, 1, N, N, dtype=torch.bool).tril() & (away == 0)
    mask = mask & text["attention_mask"].bool()[:, None, None]
    wanted = first(model(text["input_ids"], attention_mask=_additive(mask)))
    real = text["attention_mask"].bool()
    torch.testing.assert_close(changed[real], wanted[real], rtol=0, atol=1e-5)
    assert scope.backend == "eager-fallback"
    with attnscope.watch(model, layers=[0]) as masked:
        model(text["input_ids"], attention_mask=_additive(mask))
    torch.testing.assert_close(scope.received(0)[1], masked.received(0)[1], rtol=0, atol=1e-5)


def _additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def test_a_module_outside_the_interface_cannot_be_changed() -> None:
    found = sites.find(build("falcon"))
    refused = raises(ModelError, "intervention-not-applied")
    with refused, register(found, Rewrite(lambda site, call, frame: call)):
        pass


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_another_thread_is_neither_measured_nor_changed(name: str) -> None:
    """The other thread runs the model in the middle of a watched pass."""
    model, text, other = build(name), inputs(), inputs()
    plain, plain_other = first(model(**text)), first(model(**other))
    with attnscope.watch(model) as wanted:
        model(**text)
    here, got = threading.get_ident(), []

    def elsewhere() -> None:
        with torch.no_grad():
            got.append(first(model(**other)))

    def in_between(*_: Any) -> None:
        if threading.get_ident() == here:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

    for module in sites.find(model).modules:
        module.register_forward_hook(in_between)
    with attnscope.watch(model) as scope, capture_activations(model) as held:
        watched = first(model(**text))
        assert held.outputs(1).shape[0] == B
    assert len(got) == 3
    assert all(torch.equal(one, plain_other) for one in got)
    real = text["attention_mask"].bool()
    torch.testing.assert_close(watched[real], plain[real], rtol=0, atol=1e-5)
    for layer in scope.layers:
        assert torch.equal(scope.received(layer), wanted.received(layer))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_two_threads_watch_one_model(name: str) -> None:
    model, texts = build(name), [inputs(), inputs()]
    wanted, got = [], [None, None]
    for text in texts:
        with attnscope.watch(model) as scope:
            model(**text)
        wanted.append(scope)
    meet = threading.Barrier(2, timeout=200)

    def run(which: int) -> None:
        with torch.no_grad(), attnscope.watch(model) as scope:
            meet.wait()
            for _ in range(3):
                model(**texts[which])
            meet.wait()
        got[which] = scope

    threads = [threading.Thread(target=run, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for scope, alone in zip(got, wanted, strict=True):
        assert scope is not None
        for layer in alone.layers:
            assert torch.equal(scope.received(layer), alone.received(layer))
    assert not patches._active


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_copy_made_inside_a_block_works_after_it(name: str) -> None:
    model, text = build(name), inputs()
    plain = first(model(**text))
    with attnscope.watch(model) as scope:
        model(**text)
        wanted = scope.received(1)
        copied = copy.deepcopy(model)
        copied(**inputs())
        assert torch.equal(scope.received(1), wanted)  # the copy is not watched
    assert torch.equal(first(copied(**text)), plain)
    with attnscope.watch(copied) as scope:
        first(copied(**text))
    torch.testing.assert_close(scope.received(1), wanted)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_cache_is_guarded_until_the_last_watch_ends(order: list[int]) -> None:
    model, text = build("qwen2"), inputs()
    watches = [attnscope.watch(model), attnscope.watch(model)]
    for watch in watches:
        watch.__enter__()
    past = DynamicCache(config=model.config)
    model(**text, past_key_values=past)
    watches[order[0]].__exit__(None, None, None)
    with raises(ScopeError, "cache-changed", method="reorder_cache"):
        past.reorder_cache(torch.tensor([1, 0]))
    watches[order[1]].__exit__(None, None, None)
    past.reorder_cache(torch.tensor([1, 0]))
    assert "reorder_cache" not in vars(past)


@torch.no_grad()
def test_transformers_is_restored() -> None:
    before = AttentionInterface.get_interface, vars(AttentionMaskInterface).copy()
    model = build("qwen2")
    configuration = model.config.to_dict()
    with attnscope.watch(model):
        model(**inputs())
        assert AttentionInterface.get_interface is not before[0]
        assert model.config.to_dict() == configuration
        assert model.config._attn_implementation == "sdpa"
    assert (AttentionInterface.get_interface, vars(AttentionMaskInterface).copy()) == before
