"""A model inside a wrapper is measured and changed like the model itself."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, distributed, nn
from transformers import CompileConfig

import attnscope
from attnscope.errors import AttnscopeWarning, ModelError
from families import build
from support_errors import raises

pytestmark = pytest.mark.filterwarnings("ignore:this model is compiled")
IDS = torch.tensor([[5, 9, 31, 7, 9, 31, 2, 40]])
KEYS = torch.tensor([[False, True, True, False, False, True, False, False]])


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("llama")


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    meeting = f"file://{tmp_path}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def lora(model: nn.Module) -> Any:
    """An adapter whose weights are not zero, as they are when it is new."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    return peft.get_peft_model(deepcopy(model), config).eval()


def compiled(model: nn.Module) -> Any:
    wrapper = torch.compile(model, backend="eager")
    wrapper(IDS)  # the graph exists before it is watched
    return wrapper


def received(model: Any, run: Any = None) -> Tensor:
    with attnscope.watch(model) as scope:
        (model if run is None else run)(IDS)
    return torch.stack([scope.received(layer) for layer in scope.layers])


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": compiled,
    "data-parallel": nn.DataParallel,
    "compiled, data-parallel": lambda model: compiled(nn.DataParallel(model)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_gives_the_numbers_of_its_model(model: nn.Module, wrapper: str) -> None:
    wrapped = WRAPPERS[wrapper](model)
    assert torch.equal(received(wrapped), received(model))


def test_an_adapter_gives_the_numbers_of_the_merged_model(model: nn.Module) -> None:
    adapted = lora(model)
    merged = deepcopy(adapted).merge_and_unload()
    live = received(adapted)
    torch.testing.assert_close(live, received(merged), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(received(compiled(adapted)), live)
    with adapted.disable_adapter():
        plain = received(adapted)
    torch.testing.assert_close(plain, received(model))
    assert (plain - live).abs().max() > 1e-3  # the adapter changes something


def test_a_compiled_model_runs_uncompiled_with_a_warning(model: nn.Module) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    wrapper, other = torch.compile(model, backend=backend), deepcopy(model)
    wrapper(IDS)
    known = len(graphs)
    with pytest.warns(AttnscopeWarning, match="compiled"), attnscope.watch(wrapper) as scope:
        wrapper(IDS)
    assert torch.equal(scope.received(0), received(model)[0])
    wrapper(IDS)
    assert len(graphs) == known  # neither the block nor the pass after it compiles anything
    other.compile(backend="eager")
    with pytest.warns(AttnscopeWarning, match="compiled"):
        assert torch.equal(received(other), received(model))


def test_compiled_decoding_with_a_static_cache(model: nn.Module) -> None:
    """`generate` compiles the decode steps of a static cache; in a block it does not."""
    compile_config = CompileConfig(backend="eager", fullgraph=False, mode="reduce-overhead")
    compile_config._compile_all_devices = True  # also on a CPU
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    static = {"cache_implementation": "static", "compile_config": compile_config, **options}
    with attnscope.watch(model, queries="generated") as expected:
        ids = model.generate(IDS, **options)
    with attnscope.watch(model, queries="generated") as scope:
        assert torch.equal(model.generate(IDS, **static), ids)
    for layer in scope.layers:
        found = scope.received(layer)[:, :, : expected.received(layer).shape[2]]
        torch.testing.assert_close(found, expected.received(layer))


def test_distributed_data_parallel(model: nn.Module, process_group: None) -> None:
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert torch.equal(received(wrapped), received(model))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, lora])
def test_interventions_reach_the_model_inside(
    model: nn.Module, wrap: Callable[[nn.Module], Any]
) -> None:
    wrapped = wrap(model)
    inner = wrapped.get_base_model() if wrap is lora else model
    for block in (
        lambda part: attnscope.knockout(part, keys=KEYS, queries="last"),
        lambda part: attnscope.steer(part, keys=[1, 2], factor=4.0),
        lambda part: attnscope.arm(part, seed=3),
    ):
        with block(inner):
            expected = inner(IDS).logits
        with block(wrapped):
            assert torch.equal(wrapped(IDS).logits, expected)
        assert not torch.equal(inner(IDS).logits, expected)
    with attnscope.record(wrapped) as activations, attnscope.intercept(wrapped) as calls:
        wrapped(IDS)
    assert activations.forwards == 1
    assert len(calls) == inner.config.num_hidden_layers
    kl = attnscope.effect(wrapped, {"input_ids": IDS}, keys=KEYS, layers=[0]).kl
    assert torch.equal(kl, attnscope.effect(inner, {"input_ids": IDS}, keys=KEYS, layers=[0]).kl)


def test_generate_of_an_adapter(model: nn.Module) -> None:
    adapted = lora(model)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with attnscope.watch(adapted, queries="generated") as scope:
        adapted.generate(input_ids=IDS, **options)
    with attnscope.watch(adapted.get_base_model(), queries="generated") as inner:
        adapted.generate(input_ids=IDS, **options)
    assert torch.equal(scope.received(0), inner.received(0))
    assert int(scope.count(0).max()) == 3  # the last token is not read


def test_copies_on_several_devices_are_refused(model: nn.Module) -> None:
    wrapper = nn.DataParallel(model)
    wrapper.device_ids = [0, 1]  # as on a machine with two GPUs
    for use in (attnscope.watch, lambda part: attnscope.knockout(part, keys=KEYS).__enter__()):
        with raises(ModelError, "data-parallel-copies", devices=[0, 1]):
            use(wrapper)


def test_virtual_tokens_are_refused(model: nn.Module) -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with raises(ModelError, "virtual-tokens", adapter="default"):
        attnscope.watch(peft.get_peft_model(deepcopy(model), config))


def test_an_unknown_wrapper_is_refused_by_the_path_of_its_model(model: nn.Module) -> None:
    wrapper = nn.ModuleDict({"inner": model})
    with raises(ModelError, "not-a-transformers-model", model="ModuleDict", path="inner"):
        attnscope.watch(wrapper)
