"""Models over several processes whose attention is whole in each: FSDP, pipelines, DDP."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import attnscope
from families import build
from processes import in_processes

IDS = torch.tensor([[[5, 9, 31, 7, 9, 31, 2, 40]], [[1, 2, 3, 4, 5, 6, 7, 8]]])
KEYS = torch.tensor([[False, True, True, False, False, True, False, False]])


@torch.no_grad()
def numbers(model: Any, ids: Tensor) -> list[Tensor]:
    with attnscope.watch(model, keep=True) as scope:
        logits = [model(ids).logits]
    with attnscope.knockout(model, keys=KEYS, queries="last", heads=[1]):
        logits.append(model(ids).logits)
    rows = [scope.weight(layer, scope.query_positions(layer)) for layer in scope.layers]
    return [*logits, *rows, *(scope.received(layer) for layer in scope.layers)]


def _each_on_its_data(rank: int, folder: Path) -> dict[str, list[Tensor]]:
    sharded = AutoModelForCausalLM.from_pretrained(folder)
    for layer in sharded.model.layers:
        fully_shard(layer)
    wrapped = nn.parallel.DistributedDataParallel(AutoModelForCausalLM.from_pretrained(folder))
    models = {"FSDP2": fully_shard(sharded), "DDP": wrapped}
    return {name: numbers(model, IDS[rank]) for name, model in models.items()}


@pytest.mark.slow
def test_data_parallel_processes_measure_their_own_data(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    for rank, got in enumerate(in_processes(2, tmp_path, _each_on_its_data)):
        expected = numbers(model, IDS[rank])
        for name in got:
            torch.testing.assert_close(got[name], expected, atol=1e-5, rtol=1e-5, msg=name)


def _stage(rank: int, folder: Path) -> dict[int, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = DistributedConfig(pp_size=2)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    with attnscope.watch(model) as scope, torch.no_grad():
        model(IDS[0])
    return {layer: scope.received(layer) for layer in scope.layers}


@pytest.mark.slow
def test_stages_of_a_pipeline_measure_their_own_layers(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    with attnscope.watch(model) as scope, torch.no_grad():
        model(IDS[0])
    first, second = in_processes(2, tmp_path, _stage)
    assert [*first, *second] == scope.layers
    for layer, received in (first | second).items():
        torch.testing.assert_close(received, scope.received(layer), atol=1e-5, rtol=1e-5)
