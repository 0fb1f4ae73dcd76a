"""What a further layer costs a short watched pass: no operator that computes anything.

Operators are counted as torch dispatches them, over those of the plain pass. On a GPU each is a
launch; a view is none.
"""

from collections import Counter
from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode

import attnscope

VIEWS = {"alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split"}
VIEWS |= {"squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view"}


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.seen["view" if name in VIEWS else "computes"] += 1
        return func(*args, **(kwargs or {}))


def model_of(layers: int) -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
    )
    return hf.LlamaForCausalLM(config).eval()


def run(model: Any, ids: torch.Tensor, new: int) -> None:
    if not new:
        model(ids, use_cache=False)
        return
    settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)


def extra(layers: int, queries: str, new: int = 0) -> Counter[str]:
    """Operators that watching adds."""
    model, ids = model_of(layers), torch.arange(5, 45)[None]
    with Counting() as plain:
        run(model, ids, new)
    with Counting() as watched, attnscope.watch(model, queries=queries):
        run(model, ids, new)
    more = watched.seen.copy()
    more.subtract(plain.seen)
    return more


@pytest.mark.parametrize("queries", ["all", "last"])
@torch.no_grad()
def test_a_layer_more_launches_nothing(queries: str) -> None:
    extra(3, queries)  # what is made once for a process
    few, many = extra(3, queries), extra(8, queries)
    assert many["computes"] == few["computes"]
    assert many["view"] - few["view"] <= 5 * 3  # laid side by side


@pytest.mark.parametrize(("queries", "most"), [("all", 95), ("last", 130)])
@torch.no_grad()
def test_a_pass_launches_few(queries: str, most: int) -> None:
    """On a CPU; on a GPU one kernel stands for most of these."""
    extra(3, queries)
    assert extra(3, queries)["computes"] <= most


@torch.no_grad()
def test_a_step_more_launches_nothing_by_layer() -> None:
    def of_a_layer(new: int) -> float:
        return (extra(8, "all", new)["computes"] - extra(3, "all", new)["computes"]) / 5

    extra(3, "all", 5)
    assert of_a_layer(5) == of_a_layer(9) <= 14  # the prompt's sums and the reply's become one
