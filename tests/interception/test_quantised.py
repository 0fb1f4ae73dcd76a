"""Models with quantised weights, each against its own eager attention. Packages that are not
installed are skipped: bitsandbytes, torchao, optimum-quanto."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    QuantoConfig,
    TorchAoConfig,
)

import attnscope

IDS = torch.tensor([[5, 9, 31, 7, 9, 31, 2, 40], [1, 2, 3, 4, 5, 6, 7, 8]])
KEYS = torch.zeros(2, 8, dtype=torch.bool).index_fill_(1, torch.tensor([2]), value=True)


def torchao(name: str) -> TorchAoConfig:
    from torchao import quantization

    return TorchAoConfig(getattr(quantization, name)())


CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "8 bit": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "4 bit": (
        "bitsandbytes",
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    ),
    "int8 weights": ("torchao", lambda: torchao("Int8WeightOnlyConfig")),
    "int8": ("torchao", lambda: torchao("Int8DynamicActivationInt8WeightConfig")),
    "quanto int8": ("optimum.quanto", lambda: QuantoConfig(weights="int8")),
}


def installed(package: str) -> bool:
    outer = package.partition(".")[0]
    return find_spec(outer) is not None and find_spec(package) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "embed" not in name:
            weight.data.mul_(4.0)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_quantised_weights(name: str, folder: Path) -> None:
    package, config = CONFIGS[name]
    if not installed(package):
        pytest.skip(f"{package} is not installed")
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map="cpu", quantization_config=config()
    ).eval()
    plain = model(IDS).logits
    with attnscope.watch(model) as scope, attnscope.intercept(model) as calls:
        assert torch.equal(model(IDS).logits, plain)
    for call in calls:
        q, k = call.q.double(), call.k.double().repeat_interleave(2, 1)
        scores = (q @ k.transpose(2, 3) * call.scale).masked_fill(
            torch.ones(8, 8).triu(1).bool(), -torch.inf
        )
        received = scores.softmax(-1).sum(2).float()
        torch.testing.assert_close(scope.received(call.site.layer), received, atol=1e-5, rtol=0)
    with (
        attnscope.knockout(model, keys=KEYS, queries="last"),
        attnscope.watch(model, queries="last") as cut,
    ):
        assert not torch.equal(model(IDS).logits, plain)
    assert float(cut.received(1)[:, :, 2].max()) == 0.0
    model.set_attn_implementation("eager")
    eager = model(IDS, output_attentions=True).attentions
    # int8 activations are rounded to a grid, so later layers amplify rounding of the output.
    for layer in range(1 if name == "int8" else 2):
        own = eager[layer].float().sum(2)
        torch.testing.assert_close(scope.received(layer), own, atol=1e-5, rtol=0)
