"""ARM: against its description read word by word, and that neither batch nor padding matters."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnscope
from attnscope.errors import InputError, ModelError
from attnscope.interventions.redistribute import amounts, apply_shift, bounds
from families import VOCABULARY, build
from support_errors import raises


def literally(a: Any, u: Any, c: float, p1: float) -> Any:
    """One sequence, one entry after the other, in numpy."""
    a = a.astype(np.float64)
    size = np.abs(a)
    mad = np.median(np.abs(size - np.median(size)))
    share = np.clip(np.mean(size < 1.4826 * mad * c), 0.02, 0.25)
    out = a.copy()
    highest = max(np.percentile(a, p1), 0.0)
    for flat in np.argsort(size, axis=None, kind="stable")[: round(share * a.size)]:
        at = np.unravel_index(flat, a.shape)
        out[at] += u[at] * (highest if a[at] >= 0 else a.min())
    return out


@pytest.mark.parametrize("c", [0.05, 0.25, 0.45, 3.0, 1e-6])
@pytest.mark.parametrize("p1", [30.0, 85.0, 99.5])
def test_read_word_by_word(c: float, p1: float) -> None:
    """The share lies inside its bounds, and at either of them."""
    a = torch.nn.functional.silu(torch.randn(1, 7, 48) * 2)
    u = torch.rand(a.shape)
    got = apply_shift(a, u, bounds(a, c=c, p1=p1))
    assert np.allclose(got[0].numpy(), literally(a[0].numpy(), u[0].numpy(), c, p1), atol=1e-6)


def test_properties() -> None:
    a, u = torch.nn.functional.gelu(torch.randn(1, 11, 64)), torch.rand(1, 11, 64)
    for given in (None, 0.5, 0.01):
        got = apply_shift(a, u, bounds(a, share=given))
        changed = got != a
        assert (got.sign() == a.sign())[a != 0].all()
        share = given or float(changed.float().mean())
        assert 0.02 <= share <= 0.25 or given
        assert abs(changed.float().mean() - share) < 0.02
        assert a.abs()[changed].max() <= a.abs()[~changed].min()
        by = (got - a)[changed]
        highest = np.percentile(a.numpy(), 85.0)
        assert by.max() <= highest
        assert by.min() >= a.min()
        assert (by[a[changed] >= 0] >= 0).all()
        assert (by[a[changed] < 0] <= 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("c", [0.05, 0.25, 3.0])
def test_padding_and_width_of_numbers_change_no_bound(dtype: torch.dtype, c: float) -> None:
    a = torch.nn.functional.silu(torch.randn(3, 9, 30) * 2).to(dtype)
    real = torch.ones(3, 9, dtype=torch.bool)
    real[1, :4] = real[2, 1:] = False
    there = bounds(a, real, c=c)
    for b in range(3):
        alone = a[b, real[b]][None]
        for other in (bounds(alone, c=c), bounds(alone.float(), c=c)):
            for name in ("near", "high", "low"):
                assert getattr(other, name)[0] == getattr(there, name)[b], name
    share = (a.abs() <= there.near[:, None, None])[1, real[1]].float().mean()
    assert 0.02 <= share <= 0.27  # those equal to the last one move too


def test_amounts_are_uniform_and_depend_on_seed_and_token_alone() -> None:
    a, real = torch.zeros(3, 40, 101), torch.ones(3, 40, dtype=torch.bool)
    real[1, :7] = False
    drawn = amounts(a, [5, 5, 6], real)
    assert torch.equal(drawn[0, :33], drawn[1, 7:])
    assert not torch.equal(drawn[0], drawn[2])
    assert len(drawn[0].unique()) > 0.99 * drawn[0].numel()
    for tokens in (40, 50, 70):
        assert torch.equal(amounts(torch.zeros(1, tokens, 101), [6], None)[0, :40], drawn[2])
    counts = torch.histc(drawn[::2], 20, 0, 1) / drawn[::2].numel()
    assert (counts - 0.05).abs().max() < 0.01
    assert abs(np.corrcoef(drawn[0, :, :-1].flatten(), drawn[0, :, 1:].flatten())[0, 1]) < 0.05


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt2", "bert"])
@torch.no_grad()
def test_neither_batch_nor_padding_matters(name: str) -> None:
    model = build(name)
    ids = torch.randint(5, VOCABULARY, (1, 9))

    def outputs(inputs: dict[str, Tensor], **options: Any) -> Tensor:
        with attnscope.arm(model, **options):
            made = model(**inputs)
        return made.logits if hasattr(made, "logits") else made.last_hidden_state

    alone = outputs({"input_ids": ids}, layers=[0, 2], seed=3)
    again = outputs({"input_ids": ids}, layers=[0, 2], seed=3)
    other = outputs({"input_ids": ids}, layers=[0, 2], seed=4)
    assert torch.equal(alone, again)
    assert not torch.equal(alone, other)
    longer = torch.randint(5, VOCABULARY, (1, 14))
    position = {} if name == "bert" else {"position_ids": torch.arange(14).expand(2, -1).clone()}
    for left in (False, True):
        wide = (5, 0) if left else (0, 5)
        pad = torch.nn.functional.pad
        batch = {
            "input_ids": torch.cat([longer, pad(ids, wide)]),
            "attention_mask": torch.cat([torch.ones_like(longer), pad(torch.ones_like(ids), wide)]),
        }
        if left and position:
            position["position_ids"][1] = (torch.arange(14) - 5).clamp(min=0)
        elif left:
            continue  # BERT's positions are absolute, and not ours to move
        there = slice(5, None) if left else slice(0, 9)
        made = outputs(batch | position, layers=[0, 2], seed=[8, 3])[1:, there]
        assert (made - alone).abs().max() < 1e-5
    with attnscope.arm(model, seed=3):
        pass
    assert torch.equal(outputs({"input_ids": ids}, layers=[0, 2], seed=3), alone)


@torch.no_grad()
def test_generate_draws_anew_at_every_step_and_the_same_for_every_call() -> None:
    model = build("qwen2")
    ids = torch.randint(5, VOCABULARY, (1, 9))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    drawn: list[Tensor] = []

    def note(module: Any, args: Any, output: Tensor) -> None:
        drawn.append((output - torch.nn.functional.silu(args[0]))[0, -1])

    act = model.model.layers[0].mlp.act_fn
    with attnscope.arm(model, share=1.0, p1=99.0):
        hook = act.register_forward_hook(note)
        first = model.generate(ids, **options)
        second = model.generate(ids, **options)
        hook.remove()
    assert torch.equal(first, second)
    assert len(drawn) == 12
    assert not torch.equal(drawn[1], drawn[2])
    assert torch.equal(drawn[1], drawn[7])
    assert torch.equal(model.generate(ids, **options), plain)


def test_errors() -> None:
    model = build("qwen2")
    for name, value in (("p1", 101), ("p1", 0), ("c", -1), ("share", 1.5)):
        with raises(InputError, "value-out-of-range", argument=name, value=value):
            attnscope.arm(model, **{name: value})
    with raises(InputError, "unknown-layer", value=9):
        attnscope.arm(model, layers=9)
    with raises(ModelError, "mixture-of-experts", layer=0):
        attnscope.arm(build("mixtral"))
    with pytest.raises(ModelError):
        attnscope.arm(build("gpt-oss"))
    inputs = {"input_ids": torch.randint(5, VOCABULARY, (2, 4))}
    refused = raises(InputError, "wrong-batch-size", argument="seed", size=3, batch=2)
    with refused, attnscope.arm(model, seed=[1, 2, 3]):
        model(**inputs)
