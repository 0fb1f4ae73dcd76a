"""Statistics of activations, against numpy on the activations themselves."""

import contextlib
import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnscope
from attnscope.activations.log_histogram import BOUND, GINI_BOUND, LogHistogram
from attnscope.activations.record import summing_tokens
from attnscope.activations.recording import Recording
from attnscope.errors import InputError, ModelError, ScopeError
from families import VOCABULARY, build
from support_errors import raises

B, N = 2, 11
CLASSES = torch.arange(N).expand(B, -1) % 3 - 0
CLASSES = torch.where(torch.arange(N) == 4, -1, CLASSES)


def inputs(*, right: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(5, VOCABULARY, (B, N), generator=torch.Generator().manual_seed(2))
    real = torch.ones_like(ids)
    real[1, 8:] = 0
    if not right:
        real = real.flip(1)
    return {"input_ids": ids, "attention_mask": real}


KernelRows = dict[tuple[int, int], list[Any]]
"""By token: its activations, whole or expert by expert."""


def stored(model: Any, given: dict[str, Tensor], point: str, layer: int) -> KernelRows:
    """What a layer makes, kept by hooks of our own."""
    rows: KernelRows = {}

    def keep(output: Any) -> None:
        made = (output[0] if isinstance(output, tuple) else output).reshape(B, N, -1)
        for b in range(B):
            for n in range(N):
                rows.setdefault((b, n), []).append(made[b, n].double().numpy())

    def spell_out(module: Any, args: Any) -> None:
        hidden, index = args[0], args[1]
        for token in range(len(hidden)):
            for expert in index[token].tolist():
                gate = (module.gate_up_proj[expert] @ hidden[token]).chunk(2)[0]
                made = nn.functional.silu(gate).double().numpy()
                rows.setdefault((token // N, token % N), []).append(made)

    stack = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) >= 3)
    with ExitStack() as undo:
        if point == "residual":
            hook = stack[layer].register_forward_hook(lambda m, a, output: keep(output))
            undo.callback(hook.remove)
        else:
            for name, module in stack[layer].named_modules():
                routed = "experts.act_fn" in name and "shared" not in name
                if name.endswith(("act_fn", "mlp.act", "intermediate_act_fn")) and not routed:
                    hook = module.register_forward_hook(lambda m, a, output: keep(output))
                    undo.callback(hook.remove)
                if name.endswith("mlp.experts"):
                    undo.callback(module.register_forward_pre_hook(spell_out).remove)
        model(**given)
    return rows


def gini(sizes: Any) -> float:
    order = np.sort(sizes)
    n = len(order)
    return float((2 * np.arange(1, n + 1) - n - 1) @ order / (n * order.sum()))


def compare(
    got: Recording, near: Any, rows: KernelRows, real: Tensor, point: str, layer: int
) -> None:
    for c in range(3):
        there = [t for t in rows if CLASSES[t] == c and real[t]]
        each = [np.concatenate(rows[t]) for t in there]
        a = np.concatenate(each)
        exact = {
            "tokens": len(there),
            "l1": np.mean([np.abs(v).sum() for v in each]),
            "l2": np.mean([np.sqrt((v**2).sum()) for v in each]),
            "variance": a.var(),
            "near_zero": np.mean(np.abs(a) < float(near[c])),
        }
        for name, wanted in exact.items():
            found = float(getattr(got, name)(point, layer)[c])
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-9), (name, layer, c)
        largest = got.largest(point, layer)[c]
        assert largest is not None
        assert abs(largest.value) == pytest.approx(np.abs(a).max(), rel=1e-6)
        where = rows[largest.sequence, largest.position]
        assert any(np.isclose(part[largest.index], largest.value) for part in where)
        for q in (0.01, 0.3, 0.5, 0.99):
            order = np.sort(a)
            wanted = order[int(np.floor(q * (len(a) - 1)))]
            assert float(got.quantile(point, layer, q)[c]) == pytest.approx(wanted, rel=BOUND)
        assert float(got.gini(point, layer)[c]) == pytest.approx(gini(np.abs(a)), abs=GINI_BOUND)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("qwen2", None),
        ("gemma3", None),
        ("gpt2", None),
        ("bert", None),
        ("qwen3-moe", "eager"),
        ("qwen3-moe", "grouped_mm"),
        ("mixtral", "batched_mm"),
        ("deepseek-v3", None),
    ],
)
@torch.no_grad()
def test_equals_numpy_on_stored_activations(name: str, how: str | None) -> None:
    """Gated and plain MLPs, experts in every implementation, shared experts; padded."""
    model, given = build(name), inputs(right=name != "gemma3")
    if how is not None:
        model.config._experts_implementation = how
    real = given["attention_mask"].bool()
    near = {(p, n): torch.tensor([0.02, 0.1, 0.3]) for p in ("mlp", "residual") for n in range(4)}
    with attnscope.record(model, classes=CLASSES, near=near) as got:
        watched = model(**given)
    assert torch.equal(watched[0], model(**given)[0])
    layers = got.layers if how is None else [0, 2]
    for layer in layers:
        for point in ("mlp", "residual"):
            rows = stored(model, given, point, layer)
            compare(got, near[point, layer], rows, real, point, layer)


@torch.no_grad()
def test_passes_add_up_and_padding_does_not_count() -> None:
    model, given = build("qwen2"), inputs()
    ids, real = given["input_ids"], given["attention_mask"]
    with attnscope.record(model, "mlp") as together:
        model(**given)
    with attnscope.record(model, "mlp") as alone:
        for b in range(B):
            model(input_ids=ids[b : b + 1, : int(real[b].sum())])
    for name in ("tokens", "l1", "l2", "variance", "gini", "epsilon", "near_zero"):
        one, other = (getattr(each, name)("mlp", 1) for each in (together, alone))
        assert torch.allclose(one, other, rtol=1e-6), name
    assert (alone.forwards, together.forwards) == (2, 1)
    with attnscope.record(model, "mlp") as steps:
        made = model.generate(**inputs(right=False), max_new_tokens=4, do_sample=False)
    assert int(steps.tokens("mlp", 0)) == int(real.sum()) + 3 * B
    assert made.shape == (B, N + 4)


def test_sketch_within_its_bounds() -> None:
    """Of numbers over many orders of magnitude."""
    numbers = torch.randn(4, 5000).double() * 10 ** (torch.rand(4, 5000).double() * 8 - 5)
    sketch = LogHistogram(2)
    sketch.add(numbers.float(), torch.tensor([0, 0, 1, 1]))
    for g in range(2):
        a = numbers[2 * g : 2 * g + 2].float().double().flatten().numpy()
        for q in (0.001, 0.1, 0.5, 0.9, 0.999):
            for absolute in (False, True):
                order = np.sort(np.abs(a) if absolute else a)
                wanted = order[int(np.floor(q * (len(a) - 1)))]
                found = float(sketch.quantile(q, absolute=absolute)[g])
                assert found == pytest.approx(wanted, rel=BOUND)
        assert float(sketch.gini()[g]) == pytest.approx(gini(np.abs(a)), abs=GINI_BOUND)
        edges = np.array([-100.0, -0.1, 0.0, 0.001, 5.0, 1e9])
        counts = np.histogram(a, edges)[0] / len(a)
        assert np.allclose(sketch.histogram(torch.tensor(edges))[g], counts, atol=0.01)
        mad = np.median(np.abs(np.abs(a) - np.median(np.abs(a))))
        assert float(sketch.deviation()[g]) == pytest.approx(mad, rel=0.05)


@torch.no_grad()
def test_errors() -> None:
    model, given = build("qwen2"), inputs()
    with raises(InputError, "unknown-point", value="mpl"):
        attnscope.record(model, "mpl")
    with raises(InputError, "unknown-layer", value=9):
        attnscope.record(model, layers=[9])
    with raises(InputError, "wrong-shape", argument="classes"):
        attnscope.record(model, classes=torch.zeros(2, 3))
    with raises(ModelError, "no-nonlinearity", layer=0):
        attnscope.record(build("gpt-oss"), "mlp")
    with attnscope.record(model, "mlp", layers=[1]) as got:
        with raises(ScopeError, "no-forward-pass"):
            got.l1("mlp", 1)
        model(**given)
    with raises(InputError, "unknown-layer", value=0, known=[1]):
        got.l1("mlp", 0)
    with raises(InputError, "unknown-point", value="residual"):
        got.l1("residual", 1)
    refused = raises(InputError, "wrong-shape", argument="classes")
    with refused, attnscope.record(model, classes=CLASSES[:1]):
        model(**given)


@pytest.mark.parametrize("finishes", [True, False])
@torch.no_grad()
def test_a_pass_of_another_thread_neither_ends_nor_drops_this_one(finishes: bool) -> None:
    """It runs in the very middle of a recorded pass, and may break off."""
    model, text = build("qwen2"), inputs()
    with attnscope.record(model) as wanted:
        model(**text)
    main = threading.get_ident()

    def other() -> None:
        with contextlib.suppress(ZeroDivisionError):
            model(**inputs(right=False))

    def interrupt(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == main:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(60)
        elif not finishes:
            raise ZeroDivisionError

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with attnscope.record(model) as recorded, summing_tokens(model) as tallies:
        model(**text)
    handle.remove()
    assert recorded.forwards == 1
    assert sorted(tallies) == [0, 1, 2]
    for layer in range(3):
        for point in ("mlp", "residual"):
            assert torch.equal(recorded.l2(point, layer), wanted.l2(point, layer))


@pytest.mark.parametrize("point", ["mlp", "residual"])
@torch.no_grad()
def test_activations_that_are_no_numbers_are_refused(point: str) -> None:
    model, text = build("qwen2"), inputs()
    model.model.layers[1].mlp.gate_proj.weight[3] = torch.nan
    with pytest.raises(ModelError) as error, attnscope.record(model, points=point):
        model(**text)
    assert error.value.code == "nan-activations"
    assert error.value.values["point"] == point
    assert error.value.values["layer"] == 1
    assert error.value.values["count"] > 0


@torch.no_grad()
def test_padding_may_be_no_number() -> None:
    model, text = build("qwen2"), inputs()

    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.masked_fill(text["attention_mask"][:, :, None] == 0, torch.nan)

    model.model.layers[1].mlp.act_fn.register_forward_hook(spoil)
    with attnscope.record(model, points="mlp", layers=[1]) as recorded:
        model(**text)
    assert bool(recorded.l2("mlp", 1).isfinite().all())


@torch.no_grad()
def test_infinite_activations_are_counted() -> None:
    sketch = LogHistogram(1)
    sketch.add(torch.tensor([[1.0, torch.inf, -torch.inf]]), torch.tensor([0]))
    assert sketch.count.tolist() == [3.0]
