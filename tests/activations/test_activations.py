"""Recorded value vectors and outputs are the model's own, for every family, with and without a
watch beside.
"""

from typing import Any

import pytest
import torch
from transformers import AttentionInterface

import attnscope
from attnscope.activations.layer_activations import capture_activations
from attnscope.errors import InputError, ScopeError
from attnscope.interception import patches, sites
from families import FAMILIES, VOCABULARY, build
from support_errors import raises

B, N = 2, 13


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, VOCABULARY, (B, N))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def first(output: Any) -> torch.Tensor:
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def made_by_hand(model: Any, layer: int, weights: torch.Tensor, held: Any) -> torch.Tensor:
    """Weights times recorded values: what the output projection should have been given."""
    values = held.values(layer)
    values = values.repeat_interleave(weights.shape[1] // values.shape[1], 1)
    return (weights @ values).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_outputs_are_the_projected_sums_of_values(name: str) -> None:
    """The two recorded things fit each other, through the model's own weights and projection."""
    model = build(name, "eager")
    text = inputs()
    weights = [a for a in model(**text, output_attentions=True).attentions if a is not None]
    with capture_activations(model) as held:
        model(**text)
        found = sites.find(model)
        for module, site in found.modules.items():
            layer = site.layer
            A = weights[found.layers.index(layer)]
            assert held.values(layer).shape[0::2] == (B, N)
            summed = made_by_hand(model, layer, A, held)
            if name == "qwen3-next":  # a gate stands between the sum and the projection
                continue
            projection = next(
                (
                    getattr(module, n)
                    for n in ("o_proj", "out_proj", "c_proj", "dense", "Wo")
                    if hasattr(module, n)
                ),
                None,
            )
            if projection is None:
                projection = model.encoder.layer[layer].attention.output.dense
            torch.testing.assert_close(held.heads(layer), summed, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                projection(summed), held.outputs(layer), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("outer", ["watch", "record"])
@torch.no_grad()
def test_beside_a_watch(name: str, outer: str) -> None:
    model = build(name, "eager" if "alibi" in name else None)
    text = inputs()
    plain = first(model(**text))
    with capture_activations(model) as held:
        recorded = first(model(**text))
        alone = [(held.values(lay), held.outputs(lay)) for lay in held.layers]
    contexts = [attnscope.watch(model), capture_activations(model)]
    one, two = contexts if outer == "watch" else contexts[::-1]
    with one as a, two as b:
        scope, held = (a, b) if outer == "watch" else (b, a)
        both = first(model(**text))
        together = [(held.values(lay), held.outputs(lay)) for lay in held.layers]
        assert scope.layers == held.layers
    torch.testing.assert_close(recorded, plain, rtol=0, atol=0)
    torch.testing.assert_close(both, plain, rtol=0, atol=1e-5)
    for (v, o), (v2, o2) in zip(alone, together, strict=True):
        torch.testing.assert_close(v2, v, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(o2, o, rtol=1e-4, atol=1e-4)
    with attnscope.watch(model) as unrecorded:
        model(**text)
    for layer in scope.layers:
        torch.testing.assert_close(scope.received(layer), unrecorded.received(layer))


@torch.no_grad()
def test_the_model_is_left_as_it_was() -> None:
    model = build("qwen2")
    before = AttentionInterface.get_interface
    context = capture_activations(model)
    held = context.__enter__()
    model(**inputs())
    assert AttentionInterface.get_interface is not before
    assert not context.__exit__(RuntimeError, RuntimeError("from inside"), None)
    assert AttentionInterface.get_interface is before
    assert not patches._active
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    with raises(ScopeError, "no-forward-pass"):
        held.values(0)


@torch.no_grad()
def test_two_records_leave_in_any_order() -> None:
    one, two = build("qwen2"), build("llama")
    text = inputs()
    first_record, second_record = capture_activations(one), capture_activations(two)
    a = first_record.__enter__()
    b = second_record.__enter__()
    one(**text), two(**text)
    assert a.values(0).shape != b.values(0).shape  # 2 and 4 key/value heads
    first_record.__exit__(None, None, None)
    two(**text)
    assert b.values(0).shape[1] == 4
    second_record.__exit__(None, None, None)
    assert not patches._active


@torch.no_grad()
def test_a_new_pass_forgets_the_one_before() -> None:
    model = build("qwen2")
    with capture_activations(model, layers=[1]) as held:
        with raises(ScopeError, "no-forward-pass"):
            held.outputs(1)
        model(**inputs())
        old = held.outputs(1)
        model(**{name: tensor[:1, :5] for name, tensor in inputs().items()})
        assert held.outputs(1).shape[:2] == (1, 5)
        assert held.values(1).shape[0::2] == (1, 5)
        assert old.shape[:2] == (B, N)
        with raises(InputError, "unknown-layer", value=0, known=[1]):
            held.values(0)


@torch.no_grad()
def test_a_pass_that_fails_leaves_nothing_to_read() -> None:
    model = build("qwen2")
    with capture_activations(model) as held:
        model(**inputs())
        with pytest.raises(IndexError):
            model(torch.full((1, 3), VOCABULARY + 1))
        with raises(ScopeError, "no-forward-pass"):
            held.values(0)


def test_nothing_is_held_for_the_gradient() -> None:
    model = build("qwen2")
    with capture_activations(model) as held:
        model(**inputs())
        assert not held.values(0).requires_grad
        assert not held.outputs(0).requires_grad
