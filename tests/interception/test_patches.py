"""Patches of the process are undone with the last block, in any order and in any thread."""

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import eval_frame
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteriaList,
)

import attnscope
from attnscope.activations.record import summing_tokens
from attnscope.errors import ScopeError
from attnscope.interception import generation, patches
from families import VOCABULARY, build

IDS = torch.randint(5, VOCABULARY, (2, 9))
GREEDY = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": 4, "max_new_tokens": 4}
BLOCKS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "watch": attnscope.watch,
    "intercept": attnscope.intercept,
    "record": attnscope.record,
    "arm": attnscope.arm,
    "tallying": summing_tokens,
    "knockout": lambda model: attnscope.knockout(model, keys=(torch.arange(9) == 1).expand(2, 9)),
}


def touched(model: PreTrainedModel) -> dict[str, Any]:
    """All state outside attnscope that its blocks could change."""
    attributes = {
        f"{name}.{attribute}": [*value.values()] if isinstance(value, dict) else value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
    }
    owners = (
        *(AttentionInterface, AttentionMaskInterface, GenerationMixin, StoppingCriteriaList),
        *(DynamicCache, torch.nn.Module, torch.nn.functional),
    )
    methods = {
        f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()
    }
    process = {name: getattr(eval_frame, name) for name in ("_stance", "_callback_from_stance")}
    process["modes"] = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return attributes | methods | process | {"config": model.config.to_dict()}


def in_thread(do: Callable[[], Any]) -> Any:
    """Run a function in a new thread; its error is raised here."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(do())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    if errors:
        raise errors[0]
    return results[0]


@pytest.mark.parametrize("other", ["intercept", "record", "arm", "tallying", "knockout"])
@pytest.mark.parametrize("threads", [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 0, 1), (0, 0, 1, 1)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@torch.no_grad()
def test_blocks_that_end_in_any_order_and_thread_restore_the_state(
    other: str, threads: tuple[int, ...], order: tuple[int, int]
) -> None:
    model = build("qwen2")
    before = touched(model)
    run = {0: lambda do: do(), 1: in_thread}
    blocks = [BLOCKS["watch"](model), BLOCKS[other](model)]
    for block, thread in zip(blocks, threads[:2], strict=True):
        run[thread](block.__enter__)
    cache = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache)
    assert eval_frame._stance.stance == "force_eager"
    for position, at in enumerate(order):
        run[threads[2 + position]](lambda at=at: blocks[at].__exit__(None, None, None))
        still_open = position == 0
        assert (eval_frame._stance.stance == "force_eager") == still_open
    assert touched(model) == before
    assert not patches._active


def test_a_block_that_raises_restores_the_state() -> None:
    model = build("qwen2")
    before = touched(model)
    with pytest.raises(KeyError), attnscope.watch(model), attnscope.record(model):
        raise KeyError
    assert touched(model) == before


@torch.no_grad()
def test_generate_that_was_looked_up_inside_a_block_works_after_it() -> None:
    model = build("qwen2")
    plain = model.generate(IDS, **GREEDY)
    with attnscope.watch(model) as scope:
        generate = model.generate
        assert torch.equal(generate(IDS, **GREEDY), plain)
    count = scope.count(0)
    assert torch.equal(generate(IDS, **GREEDY), plain)
    with attnscope.watch(model) as again:
        assert torch.equal(generate(IDS, **GREEDY), plain)
    assert torch.equal(again.count(0), count)


def test_a_later_patch_by_other_code_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen2")
    original = vars(GenerationMixin)["generate"]
    with attnscope.watch(model):
        ours = vars(GenerationMixin)["generate"]

        def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
            return ours(self, *args, **kwargs)

        GenerationMixin.generate = theirs
    try:
        assert vars(GenerationMixin)["generate"] is theirs
        with torch.no_grad():
            assert model.generate(IDS, **GREEDY).shape == (2, 13)
    finally:
        GenerationMixin.generate = original


@torch.no_grad()
def test_a_watch_made_in_one_thread_follows_generate_in_the_thread_that_enters_it() -> None:
    """Sequence 0 ends early: its tokens after the end do not count."""
    model = build("qwen2")
    ends = model.generate(IDS, **GREEDY)[0, 10].item()

    def generate(block: Any) -> torch.Tensor:
        with block as scope:
            more = GREEDY | {"min_new_tokens": 0}
            model.generate(IDS, **more, eos_token_id=ends)
        counted: torch.Tensor = scope.count(0)
        return counted

    wanted = generate(attnscope.watch(model))
    assert wanted[0] < wanted[1]
    made = in_thread(lambda: attnscope.watch(model))
    assert torch.equal(generate(made), wanted)


def test_all_trackers_end_if_the_end_of_one_raises() -> None:
    model = build("qwen2")
    ran: list[int] = []

    def fail() -> None:
        ran.append(0)
        raise ScopeError("fails", code="made-up")

    failing = generation.GenerationTracker(model.model, fail)
    others = [generation.GenerationTracker(model.model, lambda n=n: ran.append(n)) for n in (1, 2)]
    with generation.tracking_generate([others[0], failing, others[1]]):
        with pytest.raises(ScopeError) as error:
            model.generate(IDS, **GREEDY)
        assert error.value.code == "made-up"
        assert [each.depth for each in (failing, *others)] == [0, 0, 0]
        assert sorted(ran) == [0, 1, 2]


@torch.no_grad()
def test_a_copy_of_a_watched_cache_can_be_cropped() -> None:
    model = build("qwen2")
    with attnscope.watch(model):
        cache = DynamicCache(config=model.config)
        model(IDS, past_key_values=cache)
        copied = copy.deepcopy(cache)
        copied.crop(-4)
        with pytest.raises(ScopeError) as error:
            cache.crop(-4)
        assert error.value.code == "cache-changed"
        assert error.value.values == {"method": "crop"}
    copied.crop(-1)
    cache.crop(-6)
    assert copied.get_seq_length() == 4
    assert cache.get_seq_length() == 3
    assert not {"crop", "reorder_cache"} & vars(cache).keys()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("first", ["knockout", "watch", "nothing"])
def test_checkpoints_are_recomputed_as_their_own_thread_ran_them(
    first: str, reentrant: bool
) -> None:
    """Autograd runs `backward` in threads of its own, here in a new one: the layers that it runs
    again are changed as in the pass they belong to, whatever blocks other threads have open."""
    model = build("qwen2").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    blocks = {
        "knockout": lambda: BLOCKS["knockout"](model),
        "watch": lambda: attnscope.watch(model),
        "nothing": contextlib.nullcontext,
    }

    def loss() -> torch.Tensor:
        return model(IDS, use_cache=False).logits.square().mean()

    def gradient(value: torch.Tensor, run: Callable[[Callable[[], Any]], Any]) -> torch.Tensor:
        model.zero_grad()
        run(value.backward)
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    second = "watch" if first == "knockout" else "knockout"
    wanted = {}
    for name in (first, second):
        with blocks[name]():
            wanted[name] = gradient(loss(), lambda do: do())
    assert not torch.allclose(wanted[first], wanted[second])
    both = [blocks[first](), blocks[second]()]
    both[0].__enter__()
    of_first = loss()

    def enter_and_run() -> torch.Tensor:
        both[1].__enter__()
        return loss()

    of_second = in_thread(enter_and_run)
    for name, value in ((first, of_first), (second, of_second)):
        torch.testing.assert_close(gradient(value, in_thread), wanted[name])
    both[0].__exit__(None, None, None)
    both[1].__exit__(None, None, None)
