"""Tensor parallelism: heads that are split over processes have the numbers of one process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import attnscope
from attnscope.errors import AttnscopeError, ConservationError
from attnscope.interception import split_heads
from attnscope.scope.text_sums import TextSums
from families import build
from processes import in_processes

IDS = torch.tensor([[5, 9, 31, 7, 9, 31, 2, 40], [1, 2, 3, 4, 5, 6, 7, 8]])
KEYS = torch.zeros(2, 8, dtype=torch.bool).index_fill_(1, torch.tensor([2, 5]), value=True)
GENERATE = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
# llama: 2 key/value heads; gemma3: windows; phi3: every process computes all heads
FAMILIES = ["llama", "gemma3", "phi3"]

Numbers = dict[str, list[Tensor]]


def layers(scope: Any, *names: str) -> list[Tensor]:
    return [scope.measure(name, layer) for name in names for layer in scope.layers]


@torch.no_grad()
def numbers(model: Any) -> Numbers:
    """What watches, interventions and `effect` say about a model."""
    got: Numbers = {}
    with attnscope.watch(model, max_logit=True, classes=KEYS.int()) as scope:
        got["logits"] = [model(IDS).logits]
    got["received"] = [scope.received(layer) for layer in scope.layers]
    got["flow"] = [scope.flow(layer) for layer in scope.layers]
    got["heads"] = layers(scope, "entropy", "max_logit", "first_token")
    with attnscope.watch(model, queries="generated") as scope:
        got["ids"] = [model.generate(IDS, **GENERATE)]
    got["generated"] = [scope.received(layer) for layer in scope.layers]
    with attnscope.watch(model) as scope:  # a loop of the caller's own, read at every step
        cache = model(IDS, use_cache=True).past_key_values
        got["prefill"] = layers(scope, "entropy")
        model(IDS[:, :1], past_key_values=cache)
        got["step"] = layers(scope, "entropy")
    for name, block in {
        "knockout": attnscope.knockout(model, keys=KEYS, queries="last", heads=[1, 2]),
        "steer": attnscope.steer(model, keys=KEYS, factor=4.0, heads=3, layers=[1]),
    }.items():
        with block, attnscope.watch(model) as scope:
            got[name] = [model(IDS).logits, *layers(scope, "entropy")]
    got["effect"] = [attnscope.effect(model, {"input_ids": IDS}, keys=KEYS, layers=[1]).kl]
    return got


def _numbers(rank: int, folder: Path) -> dict[str, Numbers]:
    models = {
        name: AutoModelForCausalLM.from_pretrained(folder / name, tp_plan="auto")
        for name in FAMILIES
    }
    weight = models["llama"].model.layers[0].self_attn.q_proj.weight
    assert 2 * weight.to_local().shape[0] == weight.shape[0]
    return {name: numbers(model) for name, model in models.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_two_processes_read_the_heads_of_one(tmp_path: Path) -> None:
    expected = {}
    for name in FAMILIES:
        model = build(name)
        model.save_pretrained(tmp_path / name)
        expected[name] = numbers(model)
    for got in in_processes(2, tmp_path, _numbers):
        for name in FAMILIES:
            for what, tensors in expected[name].items():
                torch.testing.assert_close(
                    got[name][what],
                    tensors,
                    atol=2e-5,
                    rtol=1e-4,
                    equal_nan=True,
                    msg=f"{name} {what}",
                )


def small(heads: int) -> LlamaForCausalLM:
    """A model with heads of two numbers, so that processes may get different numbers of heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=30,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=2,
    )
    return LlamaForCausalLM(config).eval()


def _uneven(rank: int, folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    with attnscope.watch(model) as scope:
        model(IDS)
    with attnscope.knockout(model, keys=KEYS, queries="last"):
        logits = model(IDS).logits
    with attnscope.knockout(model, keys=KEYS, queries="last", heads=4):
        code = code_of(lambda: model(IDS))
    return [scope.received(0), scope.received(1), logits], code


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_five_heads_in_three_processes(tmp_path: Path) -> None:
    model = small(heads=5)
    model.save_pretrained(tmp_path)
    with attnscope.watch(model) as scope, torch.no_grad():
        model(IDS)
    with attnscope.knockout(model, keys=KEYS, queries="last"), torch.no_grad():
        expected = [scope.received(0), scope.received(1), model(IDS).logits]
    for got, code in in_processes(3, tmp_path, _uneven):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
        assert code == "uneven-heads"


def code_of(function: Any) -> str | None:
    """The code of the error that a function raises, with its cause."""
    try:
        function()
    except AttnscopeError as error:
        return error.code
    return None


def enter(block: Any) -> None:
    with block:
        pass


def _refused(rank: int, folder: Path) -> dict[str, str | None]:
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    blocks = {
        "keep": lambda: attnscope.watch(model, keep=True),
        "record": lambda: attnscope.record(model),
        "arm": lambda: attnscope.arm(model),
        "intercept": lambda: enter(attnscope.intercept(model)),
        "layers": lambda: enter(attnscope.watch(model, layers=[rank])),
        "heads": lambda: enter(attnscope.knockout(model, keys=KEYS, heads=[rank])),
        "blocks": lambda: enter(
            [attnscope.watch(model), attnscope.knockout(model, keys=KEYS)][rank]
        ),
    }
    codes = {name: code_of(block) for name, block in blocks.items()}
    with attnscope.watch(model, gather="rank0") as scope, torch.no_grad():
        model(IDS)
    codes["rank0"] = code_of(lambda: scope.received(0))
    attention = model.model.layers[1].self_attn
    with attnscope.watch(model) as scope, torch.no_grad():
        found = []
        hook = attention.register_forward_hook(
            lambda *_: found.append(code_of(lambda: scope.received(0)))
        )
        model(IDS)
        hook.remove()
    codes["early"], codes["late"] = found[0], code_of(lambda: scope.received(0))
    return codes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_refused_and_where_heads_are_read(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    first, second = in_processes(2, tmp_path, _refused)
    assert first.pop("rank0") is None
    assert second.pop("rank0") == "gathered-on-rank0"
    assert first == second
    assert first == {
        **dict.fromkeys(("keep", "record", "arm", "intercept"), "tensor-parallel"),
        **dict.fromkeys(("layers", "heads"), "ranks-differ"),
        "blocks": "gather-failed",
        "early": "not-gathered",
        "late": None,
    }


@contextmanager
def waiting(seconds: float) -> Iterator[None]:
    old, split_heads.WAIT = split_heads.WAIT, timedelta(seconds=seconds)
    yield
    split_heads.WAIT = old


def _fails(rank: int, folder: Path, how: str) -> tuple[str | None, bool]:
    """The error of a process when the second one fails, and whether the scope has results."""
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")

    def fail(*_: Any) -> None:
        raise ConservationError("attention does not add up")

    with waiting(5 if how == "absent" else 45), torch.no_grad():
        scope = None

        def run() -> None:
            nonlocal scope
            if how == "absent" and rank == 1:
                return
            with attnscope.watch(model) as scope:
                if rank == 1 and how == "raises":
                    TextSums._verify = fail  # type: ignore[method-assign]
                if rank == 1 and how == "killed":
                    model.model.norm.register_forward_hook(lambda *_: os._exit(1))
                model(IDS)

        code = code_of(run)
    readable = scope is not None and code_of(lambda: scope.received(0)) is None
    return code, readable


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", ["raises", "absent", "killed"])
def test_every_process_ends_with_an_error(tmp_path: Path, how: str) -> None:
    build("llama").save_pretrained(tmp_path)
    first, second = in_processes(2, tmp_path, _fails, how)
    assert first == ("gather-failed", False)
    assert (
        second
        == {
            "raises": ("conservation", False),
            "absent": (None, False),
            "killed": None,
        }[how]
    )


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("[/src/pair.cc:5] Connection closed by peer [127.0.0.1]:37. Check its logs.", False),
        ("wait timeout after 45000ms, keys: /default_pg/0//6c91/0/1", False),
        ("mesh has no such dimension\nlonger", True),
    ],
)
def test_the_reason_of_a_failed_exchange_has_no_addresses(text: str, kept: bool) -> None:
    reason = split_heads._reason(RuntimeError(text))
    assert (reason == text.partition("\n")[0]) == kept
    assert "/" not in reason


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
