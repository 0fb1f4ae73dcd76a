"""Gradient checkpointing computes layers again during the backward pass: with every intervention,
or not at all."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attnscope
from attnscope.errors import ModelError
from families import VOCABULARY, build
from support_errors import raises

B, N = 2, 9
KEYS = (torch.arange(N) % 4 == 2).expand(B, N).clone()
BLOCKS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "knockout": lambda model: attnscope.knockout(model, keys=KEYS, queries="last"),
    "steer": lambda model: attnscope.steer(model, keys=KEYS, factor=4.0),
    "arm": lambda model: attnscope.arm(model, layers=[0, 1, 2]),
    "watch": attnscope.watch,
}
ids = torch.randint(5, VOCABULARY, (B, N), generator=torch.Generator().manual_seed(0))


def made(reentrant: bool | None) -> Any:
    model = build("llama").train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def gradients(model: Any, *, inside: bool, block: str) -> list[Tensor]:
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    with BLOCKS[block](model):
        loss = model(inputs_embeds=embeds, use_cache=False).logits.square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [embeds.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("block", BLOCKS)
def test_backward_inside_the_block_is_right(block: str, reentrant: bool) -> None:
    plain = gradients(made(None), inside=False, block=block)
    again = gradients(made(reentrant), inside=True, block=block)
    for one, other in zip(plain, again, strict=True):
        assert (one - other).abs().max() <= 1e-4 * one.abs().max()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("block", BLOCKS)
def test_backward_after_the_block_is_refused(block: str, reentrant: bool) -> None:
    model = made(reentrant)
    if block == "watch" and reentrant:  # the layers run again as they always do
        plain = gradients(made(None), inside=False, block=block)
        for one, other in zip(plain, gradients(model, inside=False, block=block), strict=True):
            assert (one - other).abs().max() <= 1e-4 * one.abs().max()
        return
    with raises(ModelError, "backward-after-block"):
        gradients(model, inside=False, block=block)
    model.zero_grad()
    gradients(model, inside=True, block=block)  # and the model is usable


@pytest.mark.parametrize("reentrant", [True, False])
def test_arm_is_repeated_in_the_thread_of_the_backward_pass(reentrant: bool) -> None:
    """Autograd runs the backward pass of a GPU in a thread of its own."""
    wanted = gradients(made(None), inside=True, block="arm")
    model = made(reentrant)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    with BLOCKS["arm"](model):
        loss = model(inputs_embeds=embeds, use_cache=False).logits.square().mean()
        thread = Thread(target=loss.backward)
        thread.start()
        thread.join(60)
    assert (embeds.grad - wanted[0]).abs().max() <= 1e-4 * wanted[0].abs().max()


@pytest.mark.parametrize("reentrant", [True, False])
def test_tokens_are_recorded_once(reentrant: bool) -> None:
    model = made(reentrant)
    model.enable_input_require_grads()
    with attnscope.record(model) as recorded:
        for _ in range(2):
            model(ids, use_cache=False).logits.square().mean().backward()
    assert recorded.forwards == 2
    assert recorded.tokens("mlp", 1).tolist() == [2.0 * B * N]
    assert recorded.tokens("residual", 1).tolist() == [2.0 * B * N]


@pytest.mark.parametrize("block", ["knockout", "steer", "arm"])
def test_a_checkpoint_of_the_users_own(block: str) -> None:
    model = made(None)
    for layer in model.model.layers:
        plain = layer.forward
        layer.forward = lambda hidden, *args, plain=plain, **kwargs: checkpoint(
            lambda hidden: plain(hidden, *args, **kwargs), hidden, use_reentrant=True
        )
    with raises(ModelError, "backward-after-block"):
        gradients(model, inside=False, block=block)


@pytest.mark.parametrize("block", BLOCKS)
def test_an_evaluation_is_not_refused(block: str) -> None:
    """Without gradients, or out of training, nothing is computed twice."""
    model = made(False)
    with torch.no_grad(), BLOCKS[block](model):
        model(ids, use_cache=False)
    gradients(model.eval(), inside=False, block=block)
