"""A model whose heads are split over processes is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.multiprocessing import spawn
from transformers import AutoModelForCausalLM

import attnscope
from attnscope.errors import ModelError
from families import build


def refused(model: Any) -> list[str]:
    keys = torch.tensor([[True, False, False]])
    blocks = [
        lambda: attnscope.watch(model),
        lambda: attnscope.record(model),
        lambda: attnscope.arm(model),
        lambda: attnscope.knockout(model, keys=keys),
        lambda: attnscope.steer(model, keys=keys, factor=2.0),
    ]
    codes = []
    for block in blocks:
        with pytest.raises(ModelError) as error, block():
            pass
        codes.append(error.value.code)
    return codes


def _work(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert 2 * weight.to_local().shape[0] == weight.shape[0]
    assert refused(model) == ["tensor-parallel"] * 5
    assert refused(model.model) == ["tensor-parallel"] * 5
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_heads_in_two_processes_are_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    spawn(_work, (str(tmp_path),), nprocs=2)


@pytest.fixture
def mesh(tmp_path: Path) -> Any:
    meeting = f"file://{tmp_path}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_distributed_parameters_in_one_process_are_whole(mesh: Any) -> None:
    model = build("qwen2")
    attention = model.model.layers[0].self_attn
    weight = attention.q_proj.weight.detach()
    for place in (Replicate(), Shard(0)):
        attention.q_proj.weight = torch.nn.Parameter(DTensor.from_local(weight, mesh, [place]))
        assert attnscope.watch(model) is not None
