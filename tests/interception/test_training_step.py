"""A training step under `watch` has the loss and the gradients of the step without it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import attnscope
from families import VOCABULARY, build

B, N = 4, 24
Step = tuple[list[float], list[Tensor], int]
Watching = Callable[[Any], AbstractContextManager[Any]]


def batch(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (B, N), generator=draw)
    real = torch.ones_like(ids)
    real[0, :5] = 0
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}


def step(family: str, how: str, watching: Watching) -> Step:
    """One optimizer step: its losses, its gradients, and the tokens that were measured."""
    model = build(family).train()
    if "checkpointing" in how:
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in how})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in how, init_scale=2.0**10)
    dtype = torch.float16 if "scaler" in how else torch.bfloat16
    losses, counted = [], 0
    torch.manual_seed(1)  # dropout
    for part in range(2 if "accumulation" in how else 1):
        with watching(model) as scope:
            with torch.autocast("cpu", dtype=dtype, enabled="autocast" in how or "scaler" in how):
                loss = model(**batch(part), use_cache=False).loss
            scaler.scale(loss).backward()
        losses.append(loss.item())
        counted += 0 if scope is None else int(scope.count(1).sum())
    scaler.unscale_(optimizer)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    scaler.step(optimizer)
    scaler.update()
    return losses, gradients + [p.detach() for p in model.parameters()], counted


def plainly(model: Any) -> AbstractContextManager[None]:
    return nullcontext()


def check_equal(plain: Step, watched: Step, tolerance: float = 0.0) -> None:
    losses, tensors, _ = plain
    assert watched[0] == losses
    assert len(tensors) == len(watched[1]) > 10
    for one, other in zip(tensors, watched[1], strict=True):
        assert (one - other).norm() <= tolerance * one.norm()
    assert watched[2] == len(losses) * (B * N - 5)  # a layer that runs again counts once


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3", "mixtral"])
@pytest.mark.parametrize(
    "how",
    [
        "plain",
        "accumulation",
        "checkpointing",
        "checkpointing reentrant",
        "accumulation checkpointing",
    ],
)
def test_loss_gradients_and_weights_are_bit_for_bit_equal(family: str, how: str) -> None:
    plain = step(family, how, plainly)
    assert sum(float(t.abs().sum()) for t in plain[1]) > 0
    check_equal(plain, step(family, how, attnscope.watch))


@pytest.mark.parametrize("how", ["plain", "checkpointing", "accumulation"])
def test_dropout_draws_the_same_numbers(how: str) -> None:
    check_equal(step("gpt2", how, plainly), step("gpt2", how, attnscope.watch), 2e-6)


@pytest.mark.parametrize("how", ["autocast", "scaler", "accumulation checkpointing autocast"])
def test_without_grouped_heads_16_bits_are_bit_for_bit_equal(how: str) -> None:
    check_equal(step("llama", how, plainly), step("llama", how, attnscope.watch))


def error(step: Step, exact: Step) -> float:
    """The largest relative error of a gradient."""
    count = len(exact[1]) // 2  # gradients, then weights
    pairs = zip(step[1][:count], exact[1][:count], strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "mixtral"])
@pytest.mark.parametrize("how", ["autocast", "scaler", "accumulation checkpointing autocast"])
def test_with_grouped_heads_16_bits_round_no_worse(family: str, how: str) -> None:
    """The gradients of shared keys are added in 16 bits, and without attnscope in another order."""
    words = how.replace("autocast", "").replace("scaler", "") or "plain"
    exact, plain = step(family, words, plainly), step(family, how, plainly)
    watched = step(family, how, attnscope.watch)
    assert watched[0] == plain[0]
    assert 0 < error(watched, exact) <= 1.25 * error(plain, exact)
