"""Measured later, together: the same numbers as at once, from few kernels, within bounds."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

import attnscope
from attnscope.errors import ScopeError
from attnscope.interception.hooks import current
from attnscope.scope import pending, reduce, watch_hook
from attnscope.scope import query_selection as choosing
from families import FAMILIES, VOCABULARY, build
from pending_share import watching
from support_errors import raises

B, N, NEW = 2, 13, 6
GREEDY = {"do_sample": False, "pad_token_id": 0}
WHAT = (
    "received", "average", "eligible", "uniform", "entropy", "first_token", "self_mass",
    "distance", "learned_sink_mass", "count",
)  # fmt: skip


def prompts(padding: bool = False) -> dict[str, torch.Tensor]:
    ids, real = torch.randint(5, VOCABULARY, (B, N)), torch.ones(B, N).long()
    if padding:
        real[1, :4] = 0
    return {"input_ids": ids, "attention_mask": real}


def generated(model: Any, inputs: dict[str, torch.Tensor], **settings: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=NEW, **GREEDY, **settings)


def agree(one: Any, other: Any, close: float = 2e-6) -> None:
    for layer in one.layers:
        for what in WHAT:
            torch.testing.assert_close(
                getattr(one, what)(layer),
                getattr(other, what)(layer),
                rtol=close,
                atol=close,
                equal_nan=True,
                msg=lambda text, what=what, layer=layer: f"{what}, layer {layer}: {text}",
            )


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch of every kernel that runs."""
    batches: list[int] = []
    plain = reduce.kernels.kernel

    def counting(name: str) -> Callable[..., Any]:
        def reduce(rows: Any) -> Any:
            batches.append(rows.q.shape[0])
            return plain(name)(rows)

        return reduce

    monkeypatch.setattr(reduce.kernels, "kernel", counting)
    return batches


# --- the same numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma2", "gemma3", "gpt-oss"])
@torch.no_grad()
def test_together_as_at_once(name: str, cache: str, padding: bool) -> None:
    model, inputs = build(name), prompts(padding)
    with watching(model, share=0) as at_once:
        plain = generated(model, inputs, cache_implementation=cache)
    with attnscope.watch(model) as together:
        assert torch.equal(generated(model, inputs, cache_implementation=cache), plain)
    agree(together, at_once)


@pytest.mark.parametrize("name", ["llama4", "deepseek-v3", "qwen3-next"])
@torch.no_grad()
def test_other_ways_to_keep_keys(name: str) -> None:
    model, inputs = build(name), prompts(padding=True)
    with watching(model, share=0) as at_once:
        generated(model, inputs)
    with attnscope.watch(model) as together:
        generated(model, inputs)
    agree(together, at_once)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("name", ["qwen2", "gpt-oss"])
@torch.no_grad()
def test_other_kernels(name: str, backend: str) -> None:
    model, inputs = build(name), prompts(padding=True)
    with watching(model, share=0, backend="reference") as at_once:
        generated(model, inputs)
    with attnscope.watch(model, backend=backend) as together:
        generated(model, inputs)
    agree(together, at_once, 1e-5)


@pytest.mark.parametrize("queries", ["last", "predicts", "generated", "mask", "sample:16"])
@torch.no_grad()
def test_chosen_queries(queries: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "NEAR", 4)
    model, inputs = build("qwen2"), prompts(padding=True)
    chosen: Any = torch.rand(B, N + 3) < 0.5 if queries == "mask" else queries
    if queries == "sample:16":
        inputs = {"input_ids": torch.randint(5, VOCABULARY, (B, 80))}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    ids = torch.randint(-1, 2, (B, inputs["input_ids"].shape[1] + 2))
    scopes = []
    for hold in (0, 1 / 1024):
        with watching(model, queries=chosen, classes=ids, share=hold) as scope:
            generated(model, inputs)
        scopes.append(scope)
    agree(*scopes)
    for layer in scope.layers:
        for what in ("flow", "received_error", "entropy_error"):
            one, other = (getattr(scope, what)(layer) for scope in scopes)
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6, equal_nan=True)


# --- from few kernels ----------------------------------------------------------------------------


@torch.no_grad()
def test_one_kernel_for_all_layers_of_a_pass(kernels_run: list[int]) -> None:
    model, inputs = build("qwen2"), prompts()
    with attnscope.watch(model):
        model(**inputs)
    assert kernels_run == [3 * B]


@pytest.mark.parametrize("queries", ["all", "predicts"])
@torch.no_grad()
def test_one_kernel_for_all_steps_of_a_reply(queries: str, kernels_run: list[int]) -> None:
    model, inputs = build("qwen2"), prompts(padding=True)
    with attnscope.watch(model, queries=queries):
        generated(model, inputs)
    assert kernels_run == [3 * B, 3 * B]


@torch.no_grad()
def test_what_does_not_count_does_not_run(kernels_run: list[int]) -> None:
    model, inputs = build("qwen2"), prompts()
    with attnscope.watch(model, queries="last"):
        generated(model, inputs)
    assert kernels_run == [3 * B]
    kernels_run.clear()
    with attnscope.watch(model, queries="generated"):
        generated(model, inputs)
    assert kernels_run == [3 * B]


@torch.no_grad()
def test_layers_under_one_mask_go_together(kernels_run: list[int]) -> None:
    """Two of the three layers of this model have a window."""
    model, inputs = build("gemma3"), prompts()
    with attnscope.watch(model):
        model(**inputs)
    assert sorted(kernels_run) == [B, 2 * B]


@torch.no_grad()
def test_masks_in_turn_with_scales_of_their_own() -> None:
    """A layer is measured as its own kind was, not as the kind that came before it."""
    kind, config = FAMILIES["gemma3"]()
    config.num_hidden_layers, config.layer_types = 6, ["sliding_attention", "full_attention"] * 3
    torch.manual_seed(0)
    model, inputs = kind(config).eval(), prompts()
    for layer in model.model.layers[1::2]:
        layer.self_attn.scaling *= 3.0
    for run in (lambda: model(**inputs), lambda: generated(model, inputs)):
        with watching(model, share=0) as at_once:
            run()
        with attnscope.watch(model) as together:
            run()
        agree(together, at_once)


@torch.no_grad()
def test_large_calls_do_not_wait(kernels_run: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "LARGE_BYTES", {"cpu": 1000})
    model, inputs = build("qwen2"), prompts()
    with attnscope.watch(model):
        generated(model, inputs)
    assert kernels_run == [B, B, B, 3 * B]  # the prompt by layers, the steps together


# --- within bounds -------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 3000, 8000])
@torch.no_grad()
def test_little_room(room: int, kernels_run: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("mistral"), prompts(padding=True)
    with watching(model, share=0) as at_once:
        generated(model, inputs)
    kernels_run.clear()
    held: list[int] = []
    plain = watch_hook.WatchHook._flush_at

    def measuring(self: Any, *moment: Any) -> None:
        held.append(self.pending.nbytes)
        plain(self, *moment)

    monkeypatch.setattr(pending, "MIN_BUDGET", 0)
    monkeypatch.setattr(pending, "free_memory", lambda device: room)
    monkeypatch.setattr(watch_hook.WatchHook, "_flush_at", measuring)
    with watching(model, share=1.0) as together:
        generated(model, inputs)
    agree(together, at_once)
    step = 3 * B * (4 * 8 * 4 + 4 * 4) + 3 * B * 2 * N * 8 * 4  # and the keys of a window
    assert max(held) <= room + max(step, N * step)
    assert len(kernels_run) > 2


@pytest.mark.parametrize("queries", ["all", "last"])
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
@torch.no_grad()
def test_layers_that_were_measured_together_are_split(
    name: str, padding: bool, queries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass in one go, in several, read or not before the next, and continued by another."""
    model, inputs = build(name), prompts(padding)
    ids = torch.randint(-1, 2, (B, N))
    with watching(model, share=0, queries=queries, classes=ids) as at_once:
        model(**inputs)
    other = {"input_ids": inputs["input_ids"].flip(0)}
    for room in (10**9, 9000, 1):
        monkeypatch.setattr(pending, "MIN_BUDGET", 0)
        monkeypatch.setattr(pending, "free_memory", lambda device, room=room: room)
        with watching(model, share=1.0, queries=queries, classes=ids) as scope:
            model(**other)
            model(**other)
            scope.received(scope.layers[1])
            model(**inputs)
        agree(scope, at_once)
        for layer in scope.layers:
            one, two = scope.flow(layer), at_once.flow(layer)
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6, equal_nan=True)
    with watching(model, share=0, queries=queries) as at_once:
        past = model(input_ids=inputs["input_ids"][:, :7]).past_key_values
        model(input_ids=inputs["input_ids"][:, 7:], past_key_values=past)
    with attnscope.watch(model, queries=queries) as scope:
        past = model(input_ids=inputs["input_ids"][:, :7]).past_key_values
        model(input_ids=inputs["input_ids"][:, 7:], past_key_values=past)
    agree(scope, at_once)


@torch.no_grad()
def test_old_keys_and_values_are_let_go() -> None:
    """Of a cache that makes new ones at every step, only the latest keys are held."""
    model, inputs = build("qwen2"), prompts()
    cache, old = hf.DynamicCache(config=model.config), []
    with attnscope.watch(model):
        model(**inputs, past_key_values=cache)
        for _ in range(3):
            model(inputs["input_ids"][:, :1], past_key_values=cache)
            old.append([weakref.ref(t) for t in (cache.layers[1].keys, cache.layers[1].values)])
        assert [ref() is None for pair in old[:-1] for ref in pair] == [True] * 4


@torch.no_grad()
def test_a_static_cache_that_is_used_again() -> None:
    """Its keys are overwritten in place once `generate` is over, or between passes by hand."""
    model, inputs = build("qwen2"), prompts()
    with watching(model, share=0) as at_once:
        generated(model, inputs)
    cache = hf.StaticCache(config=model.config, max_cache_len=N + NEW)
    with attnscope.watch(model) as scope:
        text = generated(model, inputs, past_key_values=cache)
        cache.reset()
    agree(scope, at_once)
    with attnscope.watch(model) as scope:
        model(text[:, :N], past_key_values=cache)
        for at in range(N, N + NEW - 1):
            model(text[:, at : at + 1], past_key_values=cache)
        for layer in cache.layers:
            layer.keys.fill_(7.0)
    agree(scope, at_once)


class Forgetful(hf.cache_utils.DynamicLayer):
    """Changes old keys a little at every step, as a cache that rounds them does."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.keys = keys * 1.01
        return keys, values


@torch.no_grad()
def test_keys_that_do_not_last_are_measured_in_their_pass(kernels_run: list[int]) -> None:
    model, inputs = build("qwen2"), prompts()
    scopes = []
    for hold in (0, 1 / 1024):
        kernels_run.clear()
        cache = hf.DynamicCache(config=model.config)
        cache.layers = [Forgetful() for _ in cache.layers]
        with watching(model, share=hold) as scope:
            generated(model, inputs, past_key_values=cache)
        scopes.append(scope)
    agree(*scopes)
    assert kernels_run == [3 * B] * NEW


# --- at any time ---------------------------------------------------------------------------------


@torch.no_grad()
def test_reading_between_steps() -> None:
    model, inputs = build("qwen2"), prompts()
    with attnscope.watch(model) as whole:
        text = generated(model, inputs)
    past = hf.DynamicCache(config=model.config)
    with attnscope.watch(model) as scope:
        model(text[:, :N], past_key_values=past)
        for at in range(N, N + NEW - 1):
            model(text[:, at : at + 1], past_key_values=past)
            if at % 2:
                assert scope.count(0).tolist() == [at + 1.0] * B
                assert scope.received(2).shape[-1] == at + 1
    agree(scope, whole)


@torch.no_grad()
def test_a_new_text_forgets_what_waits(kernels_run: list[int]) -> None:
    model, inputs = build("qwen2"), prompts()
    past = hf.DynamicCache(config=model.config)
    with attnscope.watch(model) as scope:
        model(**inputs, past_key_values=past)
        model(inputs["input_ids"][:, :1], past_key_values=past)
        kernels_run.clear()
        model(**inputs)
    assert kernels_run == [3 * B]
    with attnscope.watch(model) as alone:
        model(**inputs)
    agree(scope, alone)


@torch.no_grad()
def test_a_step_that_breaks_off_is_not_counted() -> None:
    model, inputs = build("qwen2"), prompts()
    past = hf.DynamicCache(config=model.config)
    with attnscope.watch(model) as scope:
        model(**inputs, past_key_values=past)
        model(inputs["input_ids"][:, :1], past_key_values=past)
        hook = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(inputs["input_ids"][:, :1], past_key_values=past)
        hook.remove()
        with raises(ScopeError, "pass-unfinished"):
            scope.received(0)
        model(**inputs)
    with attnscope.watch(model) as alone:
        model(**inputs)
    agree(scope, alone)


@torch.no_grad()
def test_a_pass_that_breaks_off_holds_nothing() -> None:
    model, inputs = build("qwen2"), prompts()
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with attnscope.watch(model):
        with pytest.raises(ZeroDivisionError):
            model(**inputs)
        hook = current().hooks[-1].hook
        assert isinstance(hook, watch_hook.WatchHook)
        assert not hook.pending.calls
    handle.remove()


@torch.no_grad()
def test_any_captured_layer_can_be_read_while_the_pass_runs() -> None:
    model, inputs, read = build("qwen2"), prompts(), []
    with attnscope.watch(model) as wanted:
        model(**inputs)
    with attnscope.watch(model) as scope:

        def reading(*_: Any) -> None:
            read.append((scope.readable, scope.received(0)))
            with raises(ScopeError, "pass-unfinished"):
                scope.received(2)

        handle = model.model.layers[1].register_forward_hook(reading)
        model(**inputs)
        handle.remove()
    assert [readable for readable, _ in read] == [[0, 1]]
    torch.testing.assert_close(read[0][1], wanted.received(0), rtol=2e-6, atol=2e-6)
    agree(scope, wanted)


@torch.no_grad()
def test_an_error_of_the_hook_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a reply, whose keys were let go for those to come."""
    model, inputs = build("qwen2"), prompts()
    past = hf.DynamicCache(config=model.config)
    with attnscope.watch(model) as scope:
        model(**inputs, past_key_values=past)
        model(inputs["input_ids"][:, :1], past_key_values=past)
        with monkeypatch.context() as patch:
            patch.setattr(watch_hook.WatchHook, "on_call", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(inputs["input_ids"][:, :1], past_key_values=past)
        with raises(ScopeError, "pass-unfinished"):
            scope.received(0)


@torch.no_grad()
def test_a_layer_that_a_step_leaves_out_keeps_what_it_measured() -> None:
    """An early exit: the last step runs the first layer alone."""
    model, ids = build("qwen2"), prompts()["input_ids"]
    scopes = []
    for hold in (1 / 256, 0):
        with watching(model, share=hold) as scope:
            cache = hf.DynamicCache(config=model.config)
            model(ids, past_key_values=cache)
            for step in range(3):
                layers = model.model.layers
                if step == 2:
                    model.model.layers = layers[:1]
                model(ids[:, step : step + 1], past_key_values=cache)
                model.model.layers = layers
        scopes.append(scope)
    assert [scope.count(0).tolist() for scope in scopes] == [[N + 3.0] * B] * 2
    assert [scope.count(2).tolist() for scope in scopes] == [[N + 2.0] * B] * 2
    for layer in range(3):
        one, other = (scope.received(layer) for scope in scopes)
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@torch.no_grad()
def test_no_step_of_a_generation_holds_what_kernels_cached() -> None:
    """Gemma 3 has two kinds of masks: frames of both are released after every step."""
    model, held = build("gemma3"), []
    with attnscope.watch(model):
        hook = current().hooks[-1].hook
        assert isinstance(hook, watch_hook.WatchHook)

        def count(module: Any, args: Any, output: Any) -> None:
            geometries = {
                id(g): g for calls in hook.pending.calls.values() for g in calls.geometries
            }
            held.append([len(g.visible.cache) for g in geometries.values() if "visible" in vars(g)])

        handle = model.register_forward_hook(count)
        generated(model, prompts(padding=True))
        handle.remove()
    assert any(held)
    assert not any(n for step in held for n in step)
