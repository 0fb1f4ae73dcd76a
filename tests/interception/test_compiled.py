"""A compiled model stays compiled while it is watched, or runs uncompiled with a warning."""

import threading
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import BartConfig, BartModel, T5Config, T5Model

import attnscope
from attnscope.errors import AttnscopeWarning, ModelError
from attnscope.interception import compiled_attention
from attnscope.interception.captured_call import CapturedCall
from attnscope.interception.coverage import check_graph
from attnscope.interception.hooks import Hook
from attnscope.interception.intercept import register
from attnscope.interception.sites import find
from families import build
from support_errors import raises

IDS = torch.tensor([[5, 9, 31, 7, 9, 31, 2, 40, 8, 15, 16], [4, 8, 15, 16, 23, 42, 5, 6, 7, 8, 9]])
LEFT, RIGHT = torch.ones_like(IDS), torch.ones_like(IDS)
LEFT[1, :5], RIGHT[0, -3:] = 0, 0
KEYS = torch.zeros(IDS.shape, dtype=torch.bool)
KEYS[:, 2] = True
NUMBERS = ("received", "entropy", "distance", "self_mass")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def compilations() -> int:
    return int(counters["stats"]["unique_graphs"])


def watched(model: nn.Module, call: Any, **inputs: Any) -> tuple[attnscope.Scope, Any]:
    with attnscope.watch(model) as scope:
        output = call(**inputs)
    return scope, output


def stays_compiled(model: nn.Module, call: Any, **inputs: Any) -> None:
    """The numbers of the uncompiled model; the same graphs before, in and after a block."""
    expected, _ = watched(model, model, **inputs)  # also the pass that is checked for coverage
    plain, before = call(**inputs)[0], compilations()
    scope, output = watched(model, call, **inputs)
    assert compilations() == before + len({*find(model).base_models.values()})
    first = compilations()
    again, _ = watched(model, call, **inputs)
    call(**inputs)
    assert compilations() == first  # neither the second block nor the pass after it compiles
    real = inputs.get("attention_mask", torch.ones_like(IDS))[:, : plain.shape[1]].bool()
    torch.testing.assert_close(output[0][real], plain[real])
    for part, wanted in expected._parts.items():
        for name in NUMBERS:
            for layer in wanted.layers:
                for found in (scope, again):
                    torch.testing.assert_close(
                        getattr(found[part], name)(layer),
                        getattr(wanted, name)(layer),
                        equal_nan=True,
                    )


INPUTS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "no cache": {"use_cache": False},
    "mask of ones": {"attention_mask": torch.ones_like(IDS)},
    "left padding": {"attention_mask": LEFT},
    "right padding": {"attention_mask": RIGHT},
}


@pytest.mark.slow
@pytest.mark.parametrize("inputs", INPUTS)
def test_inputs(inputs: str) -> None:
    model = build("llama")
    stays_compiled(model, torch.compile(model, backend="eager"), input_ids=IDS, **INPUTS[inputs])


# Grouped keys, windows, soft-caps in eager attention, learned sinks, chunks, encoders, experts.
FAMILIES = ["multi-query llama", "gemma3"]
SLOW_FAMILIES = ["qwen2", "mistral", "gemma2", "gpt-oss", "llama4", "mixtral"]


@pytest.mark.parametrize(
    "family", FAMILIES + [pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES]
)
def test_families(family: str) -> None:
    model = build(family)
    compiled = torch.compile(model, backend="aot_eager" if family == "gemma3" else "eager")
    stays_compiled(model, compiled, input_ids=IDS, attention_mask=LEFT)


@pytest.mark.parametrize("family", [pytest.param("bert", marks=pytest.mark.slow), "modernbert"])
def test_encoders(family: str) -> None:
    model = build(family)
    compiled = torch.compile(model, backend="eager")
    stays_compiled(model, compiled, input_ids=IDS, attention_mask=RIGHT)


@pytest.mark.slow
def test_cross_attention() -> None:
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 32}
    both = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in sizes.items()}
    torch.manual_seed(0)
    model = BartModel(BartConfig(vocab_size=97, d_model=32, pad_token_id=0, **both)).eval()
    compiled = torch.compile(model, backend="eager")
    inputs = {"attention_mask": RIGHT, "decoder_input_ids": IDS[:, :7]}
    stays_compiled(model, compiled, input_ids=IDS, **inputs)


def _method(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def _base_method(model: Any) -> Any:
    model.model.compile(backend="eager")
    return model


def _layers(model: Any) -> Any:
    for n, layer in enumerate(model.model.layers):
        model.model.layers[n] = torch.compile(layer, backend="eager")
    return model


def _forward(model: Any) -> Any:
    model.model.forward = torch.compile(model.model.forward, backend="eager")
    return model


def _inner(model: Any) -> Any:
    model.model = torch.compile(model.model, backend="eager")
    return model


COMPILED: dict[str, Callable[[Any], Any]] = {
    "whole graph": lambda model: torch.compile(model, backend="eager", fullgraph=True),
    "dynamic": lambda model: torch.compile(model, backend="eager", dynamic=True),
    "function": lambda model: torch.compile(lambda **inputs: model(**inputs), backend="eager"),
    "method": _method,
    "method of the base": _base_method,
    "layers": _layers,
    "forward": _forward,
    "inner": _inner,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", COMPILED)
def test_ways_to_compile(how: str) -> None:
    model = build("qwen2")
    stays_compiled(model, COMPILED[how](model), input_ids=IDS)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_inductor_uses_memory_again_but_not_that_of_kept_tensors(mode: str) -> None:
    model = build("gemma3")
    compiled = torch.compile(model, mode=mode)
    stays_compiled(model, compiled, input_ids=IDS, attention_mask=LEFT)
    with attnscope.intercept(model) as expected:
        model(IDS)
    with attnscope.intercept(model) as calls:
        compiled(IDS)
    for call, wanted in zip(calls, expected, strict=True):
        for name in ("q", "k", "v", "lse"):
            torch.testing.assert_close(getattr(call, name), getattr(wanted, name))


def test_the_first_pass_of_a_model_is_checked_uncompiled() -> None:
    model = build("qwen2")
    compiled = torch.compile(model, backend="eager")
    watched(model, compiled, input_ids=IDS)
    assert compilations() == 0
    watched(model, compiled, input_ids=IDS)
    assert compilations() == 1


def test_lengths_share_a_graph() -> None:
    model = build("qwen2")
    compiled = torch.compile(model, backend="eager")
    for length in (11, 5, 9, 7):
        expected, _ = watched(model, model, input_ids=IDS[:, :length])
        scope, _ = watched(model, compiled, input_ids=IDS[:, :length])
        torch.testing.assert_close(scope.received(1), expected.received(1))
    assert compilations() == 2  # one for the first length, one for any


@torch._dynamo.config.patch(recompile_limit=1)
def test_more_lengths_than_torch_compiles_run_uncompiled() -> None:
    model = build("qwen2")
    compiled = torch.compile(model, backend="eager", dynamic=False)
    watched(model, model, input_ids=IDS)
    watched(model, compiled, input_ids=IDS)
    expected, _ = watched(model, model, input_ids=IDS[:, :5])
    with pytest.warns(AttnscopeWarning, match="recompile_limit"):
        scope, _ = watched(model, compiled, input_ids=IDS[:, :5])
    assert torch.equal(scope.received(1), expected.received(1))
    assert compilations() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"keep": True},
        {"max_logit": True},
        {"queries": "last"},
        {"queries": "sample:4"},
        {"layers": [1]},
        {"backend": "reference"},
        {"classes": KEYS.int()},
    ],
    ids=str,
)
def test_options_of_watch(options: dict[str, Any]) -> None:
    model = build("qwen2")
    compiled = torch.compile(model, backend="eager")
    with attnscope.watch(model, **options) as expected:
        model(IDS, attention_mask=LEFT)
    with attnscope.watch(model, **options) as scope:
        compiled(IDS, attention_mask=LEFT)
    assert compilations() == 1
    assert torch.equal(scope.received(1), expected.received(1))
    if "keep" in options:
        wanted = expected.rows(1, KEYS.long(), 2)
        torch.testing.assert_close(scope.rows(1, KEYS.long(), 2), wanted, equal_nan=True)


@pytest.mark.parametrize(
    "block",
    [
        lambda model: attnscope.knockout(model, keys=KEYS, queries="last"),
        lambda model: attnscope.knockout(model, keys=KEYS, layers=[1]),
        lambda model: attnscope.steer(model, keys=KEYS, factor=4.0),
    ],
)
def test_interventions(block: Any) -> None:
    model = build("qwen2")
    compiled = torch.compile(model, backend="eager")
    watched(model, compiled, input_ids=IDS)
    with block(model), attnscope.watch(model) as expected:
        wanted = model(IDS).logits
    assert compilations() == 0
    with block(compiled), attnscope.watch(compiled) as scope:
        assert torch.equal(compiled(IDS).logits, wanted)
    assert compilations() == 1
    assert torch.equal(scope.received(2), expected.received(2))
    assert not torch.equal(watched(model, compiled, input_ids=IDS)[1].logits, wanted)
    assert compilations() == 1  # the graph holds no hook


def _training(model: Any) -> dict[str, Any]:
    model.train()
    return {}


def _hooked(model: Any) -> dict[str, Any]:
    model.model.register_forward_hook(lambda *_: None)
    return {}


UNCOMPILED: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "training": ("training mode", _training),
    "hook": ("registered hooks", _hooked),
    "weights": ("weights are requested", lambda _: {"output_attentions": True}),
}


@pytest.mark.parametrize("reason", UNCOMPILED)
def test_what_runs_uncompiled_warns(reason: str) -> None:
    model = build("gemma2")
    message, change = UNCOMPILED[reason]
    inputs = {"input_ids": IDS, **change(model)}
    compiled = torch.compile(model, backend="eager")
    expected, _ = watched(model, model, **inputs)
    with pytest.warns(AttnscopeWarning, match=f"compiled.*{message}"):
        scope, _ = watched(model, compiled, **inputs)
    assert compilations() == 0
    assert torch.equal(scope.received(1), expected.received(1))


# torch's sdpa, a softmax of its own, a position bias.
@pytest.mark.parametrize("family", ["falcon", "bloom", "t5"])
def test_attention_that_the_operator_cannot_compute_runs_uncompiled(family: str) -> None:
    inputs = {"input_ids": IDS}
    if family == "t5":
        torch.manual_seed(0)
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        model: Any = T5Model(T5Config(vocab_size=97, decoder_start_token_id=0, **sizes)).eval()
        inputs["decoder_input_ids"] = IDS[:, :7]
    else:
        model = build(family)
    compiled = torch.compile(model, backend="eager")
    expected, output = watched(model, model, **inputs)
    for _ in range(2):
        with pytest.warns(AttnscopeWarning, match="uncompiled"):
            scope, found = watched(model, compiled, **inputs)
        assert torch.equal(found[0], output[0])
        for part, wanted in expected._parts.items():
            assert torch.equal(scope[part].received(1), wanted.received(1))
    assert compilations() == 0


def test_a_trace_that_fails_runs_the_pass_once_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen2")
    forward = type(model.model.norm).forward

    def breaks(self: Any, *args: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(self, *args)

    monkeypatch.setattr(type(model.model.norm), "forward", breaks)
    expected, _ = watched(model, model, input_ids=IDS)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):  # the second time nothing is traced
        with pytest.warns(AttnscopeWarning, match="graph"):
            scope, _ = watched(model, compiled, input_ids=IDS)
        assert torch.equal(scope.received(1), expected.received(1))
    with attnscope.intercept(model) as calls, pytest.warns(AttnscopeWarning):
        compiled(IDS)
    assert len(calls) == model.config.num_hidden_layers


@pytest.mark.slow
def test_gradients_are_those_without_a_block() -> None:
    model = build("qwen2")
    compiled = torch.compile(model, backend="aot_eager")
    gradients = []
    with torch.enable_grad():
        compiled(IDS, labels=IDS).loss.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
        model.zero_grad()
        with (
            pytest.warns(AttnscopeWarning, match="gradients"),
            attnscope.watch(compiled),
        ):
            compiled(IDS, labels=IDS).loss.backward()
    gradients.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_other_hooks_get_the_modules_of_an_uncompiled_model() -> None:
    model = build("qwen2")
    compiled = torch.compile(model, backend="eager")
    watched(model, compiled, input_ids=IDS)
    with attnscope.record(model) as expected:
        model(IDS)
    message = "more than its attention calls"
    with attnscope.record(compiled) as activations, pytest.warns(AttnscopeWarning, match=message):
        compiled(IDS)
    assert torch.equal(activations.l2("mlp", 1), expected.l2("mlp", 1))
    assert compilations() == 0


class _Fails(Hook):
    in_graphs = True

    def on_call(self, captured: CapturedCall) -> None:
        if captured.site.layer == 1:
            raise KeyError("mine")


def test_errors_inside_a_block() -> None:
    model = build("qwen2")
    compiled = torch.compile(model, backend="eager")
    expected, _ = watched(model, model, input_ids=IDS)
    watched(model, compiled, input_ids=IDS)
    with pytest.raises(KeyError, match="mine"), register(find(model), _Fails()):
        compiled(IDS)
    with attnscope.watch(model):
        compiled(IDS)
        with pytest.raises(IndexError):
            compiled(IDS + 1000)
    scope, _ = watched(model, compiled, input_ids=IDS)
    assert torch.equal(scope.received(1), expected.received(1))
    assert compilations() == 1
    assert "_compiled_call_impl" not in vars(model.model)


def test_a_model_that_is_compiled_inside_a_block_stays_so() -> None:
    model = build("qwen2")
    expected, _ = watched(model, model, input_ids=IDS)
    with attnscope.watch(model) as scope:
        model.model.compile(backend="eager")
        model(IDS)
    assert torch.equal(scope.received(1), expected.received(1))
    assert vars(model.model)["_compiled_call_impl"] is not None
    assert compilations() == 0
    scope, _ = watched(model, model, input_ids=IDS)
    assert torch.equal(scope.received(1), expected.received(1))
    assert compilations() == 1


def test_other_threads_and_copies_run_as_without_a_block() -> None:
    model = build("qwen2")
    compiled = torch.compile(model, backend="eager")
    expected, wanted = watched(model, model, input_ids=IDS)
    outputs: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            outputs.append(compiled(IDS).logits)

    with attnscope.watch(model) as scope:
        compiled(IDS)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
        outputs.append(deepcopy(model)(IDS).logits)
        deepcopy(model).model(IDS[:1, :3])
    assert all(torch.equal(output, wanted.logits) for output in outputs)
    assert len(outputs) == 2
    assert torch.equal(scope.received(1), expected.received(1))
    assert compilations() == 1


@pytest.mark.slow
def test_an_adapter_is_measured_as_it_is_at_the_moment() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(build("llama"), config).eval()
    compiled = torch.compile(adapted, backend="eager")
    on = watched(adapted, adapted, input_ids=IDS)[0].received(1)
    with adapted.disable_adapter():
        off = watched(adapted, adapted, input_ids=IDS)[0].received(1)
        assert torch.equal(watched(adapted, compiled, input_ids=IDS)[0].received(1), off)
    assert torch.equal(watched(adapted, compiled, input_ids=IDS)[0].received(1), on)
    assert not torch.equal(on, off)
    assert compilations() == 2


@pytest.mark.slow
def test_a_block_inside_a_compiled_function_is_refused() -> None:
    model = build("qwen2")

    @torch.compile(backend="eager")
    def run() -> None:
        with attnscope.watch(model):
            model(IDS)

    expected, _ = watched(model, model, input_ids=IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of dynamo
        with raises(ModelError, "compiled-graph-outside"):
            run()
    scope, _ = watched(model, model, input_ids=IDS)
    assert torch.equal(scope.received(1), expected.received(1))


def test_a_graph_with_other_attention_is_refused() -> None:
    class Attends(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q)

    class Weighs(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return torch.softmax(q @ q.mT, -1) @ q

    for module in (Attends(), Weighs()):
        graph = torch.fx.symbolic_trace(module)
        with pytest.raises(ModelError) as error:
            check_graph(graph, {1: module})
        assert error.value.code == "attention-not-captured"
    check_graph(graph, {})  # a softmax besides captured attention


def test_the_operator_refuses_to_run_outside_of_a_block() -> None:
    q = torch.zeros(1, 2, 3, 4)
    options = (None, None, 1.0, None, None, -1, "sdpa", 5)
    with raises(ModelError, "compiled-graph-outside"):
        torch.ops.attnscope.attend(q, q, q, *options)
    assert not compiled_attention.traced_masks
