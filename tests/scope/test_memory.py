"""No tensor of n × n elements, anywhere, a mask included."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attnscope
from families import build

N = 2048


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.where = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.numel() > self.elements:
                self.elements, self.where = leaf.numel(), f"{func}: {list(leaf.shape)}"
        return out


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("queries", ["all", "last", "sample:64"])
@pytest.mark.parametrize(
    "name", ["qwen2", "mistral", "gemma2", "gpt-oss", "llama4", "deepseek-v3", "bert"]
)
@torch.no_grad()
def test_nothing_is_quadratic(name: str, queries: str, padded: bool) -> None:
    model = build(name)
    if name == "bert":
        model.embeddings.position_embeddings = torch.nn.Embedding(N, 32)
        model.embeddings.position_ids = torch.arange(N)[None]
        model.embeddings.token_type_ids = torch.zeros(1, N, dtype=torch.long)
    ids = torch.randint(5, 97, (2, N))
    real = torch.ones_like(ids)
    if padded:
        real[0, :700] = 0
        real[1, 1900:] = 0
    with LargestTensor() as largest, attnscope.watch(model, queries=queries) as scope:
        model(ids, attention_mask=real)
        scope.received(0)
        scope.average(0)
        scope.mass(0, torch.zeros_like(ids), 1)
    assert largest.elements < N * N, largest.where


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma2", "gpt-oss", "bert"])
@torch.no_grad()
def test_short_texts_do_not_add_up(name: str) -> None:
    """Prompts measured together never make a matrix for each."""
    model, prompts, size = build(name), 128, 250
    if name == "bert":
        model.embeddings.position_embeddings = torch.nn.Embedding(size, 32)
        model.embeddings.position_ids = torch.arange(size)[None]
        model.embeddings.token_type_ids = torch.zeros(1, size, dtype=torch.long)
    ids = torch.randint(5, 97, (prompts, size))
    real = torch.ones_like(ids)
    for n in range(prompts):
        real[n, size - n // 2 :] = 0
    with LargestTensor() as largest, attnscope.watch(model) as scope:
        model(ids, attention_mask=real)
        scope.received(0)
    assert largest.elements < prompts * size * size, largest.where


@torch.no_grad()
def test_caches_shared_by_layers_are_cleared_after_the_pass() -> None:
    model, ids = build("qwen2"), torch.randint(5, 97, (2, 40))
    real = torch.ones_like(ids)
    real[0, 30:] = 0
    with attnscope.watch(model) as scope:
        model(ids, attention_mask=real)
    for block in scope._blocks:
        for selection in block.selections:
            assert not selection.all_rows.cache
            assert not selection.geometry.visible.cache


@torch.no_grad()
def test_the_guard_finds_eager_attention() -> None:
    """The guard of the tests above can fail: eager attention makes an n × n tensor."""
    model = build("qwen2", "eager")
    with LargestTensor() as largest:
        model(torch.randint(5, 97, (1, N)))
    assert largest.elements >= N * N
