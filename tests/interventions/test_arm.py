"""ARM: against its description read word by word, and that neither batch nor padding matters."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnscope
from attnscope.errors import InputError, ModelError
from attnscope.kernels import redistribute_jit
from attnscope.kernels.redistribute import HALF, apply_shift, bounds, philox_uniform, redistribute
from attnscope.kernels.redistribute import _histogram16 as how_often
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
    """Numbers of 16 bits are counted instead of sorted: to the bit the same bounds."""
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


def test_amounts_are_even_and_go_by_place() -> None:
    keys, real = torch.tensor([5, 5, 6]), torch.ones(3, 40, dtype=torch.bool)
    real[1, :7] = False
    drawn = philox_uniform(keys, real, torch.Size([3, 40, 101]))
    assert torch.equal(drawn[0, :33], drawn[1, 7:])
    assert not torch.equal(drawn[0], drawn[2])
    assert len(drawn[0].unique()) > 0.99 * drawn[0].numel()
    assert torch.equal(philox_uniform(keys[2:], None, torch.Size([1, 50, 101]))[0, :40], drawn[2])
    counts = torch.histc(drawn[::2], 20, 0, 1) / drawn[::2].numel()
    assert (counts - 0.05).abs().max() < 0.01
    assert abs(np.corrcoef(drawn[0, :, :-1].flatten(), drawn[0, :, 1:].flatten())[0, 1]) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_moves_as_the_definition(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, the hash included; in 16 bits to the last one, which the interpreter cuts off."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(redistribute_jit, "BLOCK", 8)
    a = torch.nn.functional.silu(torch.randn(2, 5, 70) * 2).to(dtype)
    real = torch.tensor([[True] * 5, [False, False, True, True, True]])
    keys = torch.tensor([2**62 + 12345, 7])
    for there in (None, real):
        wanted = redistribute(a, keys, there)
        got = redistribute_jit.apply_shift(a, keys, there, bounds(a, there))
        rounding = 2**-7 if dtype == torch.bfloat16 else 0
        torch.testing.assert_close(got, wanted, rtol=rounding, atol=0)
        assert torch.equal(got != a, wanted != a)
        assert not torch.equal(got, a)
        if dtype == torch.bfloat16:
            counts = redistribute_jit.histogram16(a, there)
            assert torch.equal(counts, how_often(a, there))
            assert counts.sum() == (350 + (350 if there is None else 210))


def test_common_numbers_are_counted_as_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the chip or in memory, of real tokens alone; also where the commonest were guessed ill,
    where hardly any number is common, and where there is but one."""
    monkeypatch.setattr(redistribute_jit, "MANY", 0)
    for name, size in (("BLOCK", 64), ("SAMPLED_BLOCKS", 2), ("TILE", 128), ("TILES", 2)):
        monkeypatch.setattr(redistribute_jit, name, size)
    acted = torch.nn.functional.silu(torch.randn(2, 5, 71) * 2).bfloat16()
    wide = torch.randint(-HALF, HALF, acted.shape, dtype=torch.int16).view(torch.bfloat16)
    changing = torch.cat([acted[:, :3], 1000 * acted[:, 3:]], 1)
    zeros = torch.zeros_like(acted)
    zeros[:, ::2] *= -1
    real = torch.ones(2, 5, dtype=torch.bool)
    real[0, 2] = real[1, :4] = False
    for a in (acted, wide, changing, zeros):
        for there in (None, real):
            assert torch.equal(redistribute_jit.histogram16(a, there), how_often(a, there))


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
    for name, value in (("p1", 101), ("p1", 0), ("c", -1), ("share", 1.5), ("seed", -1)):
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
