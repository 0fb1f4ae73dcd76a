"""Compiled models on a real GPU: what is measured, that they stay compiled, and CUDA graphs.

PYTHONPATH=src python -m pytest tests/gpu/test_compiled.py -m gpu
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch._dynamo.utils import counters

import attnscope
from families import VOCABULARY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch warns of its own parts
]

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SHAPE)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **_SHAPE,
            head_dim=64,
            sliding_window=48,
            layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        )
    ),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def build(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval().to(torch.bfloat16).cuda()


def inputs(padding: str | None, tokens: int = 300) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, VOCABULARY, (3, tokens), device="cuda")
    if padding is None:
        return {"input_ids": ids}
    real = torch.ones_like(ids)
    if padding == "left":
        real[1, :37] = 0
    return {"input_ids": ids, "attention_mask": real}


def compilations() -> int:
    return int(counters["stats"]["unique_graphs"])


# A graph of eight bits of mantissa rounds elsewhere than the uncompiled model: so attention is
# compared with the reference on the same queries and keys, which the same graph computed.
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("padding", [None, "ones", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_passes_against_float64(name: str, padding: str | None, mode: str) -> None:
    model, prompt = build(name), inputs(padding)
    compiled = torch.compile(model, mode=mode)
    for _ in range(3):  # CUDA graphs are recorded in the second call
        plain = compiled(**prompt).logits.clone()
    with attnscope.watch(model):  # the pass that is checked for coverage
        compiled(**prompt)
    before = compilations()
    scopes = []
    for options in ({"backend": "reference"}, {}, {}):
        with attnscope.watch(model, **options) as scope:
            output = compiled(**prompt).logits.clone()
        scopes.append(scope)
    assert compilations() == before + 1  # three blocks, one graph
    for _ in range(3):
        after = compiled(**prompt).logits.clone()
    assert compilations() == before + 1
    torch.testing.assert_close(after, plain)
    real = prompt.get("attention_mask", torch.ones_like(prompt["input_ids"])).bool()
    torch.testing.assert_close(output[real], plain[real], rtol=0, atol=0.05)
    wanted = scopes[0]
    for scope in scopes[1:]:
        for layer in wanted.layers:
            for what in ("received", "entropy", "self_mass", "first_token", "distance"):
                one, other = getattr(scope, what)(layer), getattr(wanted, what)(layer)
                torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_kept_tensors_are_not_overwritten(mode: str) -> None:
    """The calls of one pass, before and after further passes of the same graph."""
    model, prompt = build("llama"), inputs(None)
    compiled = torch.compile(model, mode=mode)
    with attnscope.watch(model):
        compiled(**prompt)
    for _ in range(3):
        with attnscope.intercept(model) as calls:
            compiled(**prompt)
        kept, copies = list(calls), [(call.q.clone(), call.k.clone()) for call in calls]
        for _ in range(2):
            with attnscope.watch(model):
                compiled(**inputs(None))
            compiled(**inputs(None))
        for call, (q, k) in zip(kept, copies, strict=True):
            assert torch.equal(call.q, q)
            assert torch.equal(call.k, k)
            scores = call.q.float() @ call.k.float().repeat_interleave(2, 1).mT * call.scale
            hidden = torch.ones(scores.shape[-2:], device="cuda").triu(1).bool()
            lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
            torch.testing.assert_close(call.lse, lse, rtol=1e-3, atol=1e-3)


def test_knockout() -> None:
    model, prompt = build("llama"), inputs(None)
    compiled = torch.compile(model)
    keys = torch.zeros(prompt["input_ids"].shape, dtype=torch.bool)
    keys[:, 9] = True
    with attnscope.watch(model):
        compiled(**prompt)
    with attnscope.knockout(model, keys=keys), attnscope.watch(model) as scope:
        inside = compiled(**prompt).logits
    with attnscope.knockout(model, keys=keys):
        expected = model(**prompt).logits
    torch.testing.assert_close(inside, expected, rtol=0, atol=0.05)
    assert (inside - compiled(**prompt).logits).abs().max() > 0.05
    for layer in scope.layers:
        assert scope.received(layer)[..., 9].abs().max() == 0


@pytest.mark.parametrize("method", [False, True], ids=["model", "compiled model"])
def test_generate_with_a_static_cache(method: bool) -> None:
    """`generate` compiles decode steps itself; inside a block they run uncompiled."""
    model, prompt = build("llama").float(), inputs("left", tokens=90)
    more = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 9}
    with attnscope.watch(model, backend="reference") as wanted:
        ids = model.generate(**prompt, **more)
    if method:
        model.compile()
    with attnscope.watch(model) as scope:
        static = model.generate(**prompt, **more, cache_implementation="static")
    assert torch.equal(ids, static)
    for layer in wanted.layers:
        n = wanted.received(layer).shape[-1]
        one, other = scope.received(layer)[..., :n], wanted.received(layer)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
