"""A knockout of the last or the generated tokens is the same however the prompt is fed."""

from typing import Any

import pytest
import torch
from torch import Tensor

import attnscope
from attnscope.errors import InputError
from families import VOCABULARY, build
from support_errors import raises

B, N, NEW = 2, 13, 6
BY_ROLE = ["last", "predicts", "generated"]


def prompt(padding: str = "") -> dict[str, Tensor]:
    ids, real = torch.randint(5, VOCABULARY, (B, N)), torch.ones(B, N).long()
    if padding == "left":
        real[1, :4] = 0
    if padding == "right":
        real[1, 8:] = 0
    return {"input_ids": ids * real, "attention_mask": real}


def keys(width: int = N) -> Tensor:
    return (torch.arange(width) % 3 == 2).expand(B, width).clone()


@torch.no_grad()
def scores(model: Any, given: dict[str, Tensor], queries: Any, **more: Any) -> Tensor:
    """[new tokens, B, vocabulary] under a knockout."""
    with attnscope.knockout(model, keys=keys()[: len(given["input_ids"])], queries=queries):
        made = model.generate(
            **given,
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **more,
        )
    return torch.stack(made.logits)


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("chunk", [1, 4, 6])
@pytest.mark.parametrize("queries", BY_ROLE)
def test_chunks_of_a_prompt(queries: str, chunk: int, padding: str) -> None:
    model, given = build("qwen2"), prompt(padding)
    whole = scores(model, given, queries)
    off = (scores(model, given, queries, prefill_chunk_size=chunk) - whole).abs().max()
    assert off < 1e-4
    assert (scores(model, given, "all") - whole).abs().max() > 1e-2  # the choice matters


@pytest.mark.parametrize("queries", BY_ROLE)
def test_a_second_turn_in_chunks(queries: str) -> None:
    """Only what is new is fed, and only its last token is cut."""
    model, given = build("qwen2"), prompt()
    more = torch.randint(5, VOCABULARY, (B, 7))

    def second(**options: Any) -> Tensor:
        with torch.no_grad(), attnscope.knockout(model, keys=keys(), queries=queries):
            first = model.generate(
                **given, max_new_tokens=3, do_sample=False, return_dict_in_generate=True
            )
            ids = torch.cat([first.sequences, more], 1)
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=first.past_key_values,
                max_new_tokens=NEW,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
        return torch.stack(made.logits)

    assert (second(prefill_chunk_size=3) - second()).abs().max() < 1e-4


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("queries", [*BY_ROLE, "all"])
def test_assisted_decoding(queries: str, cached: bool) -> None:
    """Candidates of an assistant, or from the prompt itself, change nothing."""
    model, given = build("qwen2"), {name: t[:1] for name, t in prompt().items()}
    given["input_ids"][:, 6:12] = given["input_ids"][:, :6]  # so that prompt lookup finds some
    whole = scores(model, given, queries, use_cache=cached)
    options: list[dict[str, Any]] = [{"prompt_lookup_num_tokens": 3}]
    if cached:
        options.append({"assistant_model": build("qwen2", seed=1)})
        options.append({"assistant_model": build("qwen2")})
    for some in options:
        assisted = scores(model, given, queries, **some)
        assert (assisted[:NEW] - whole).abs().max() < 1e-4, some


@pytest.mark.parametrize("queries", ["last", "predicts"])
@torch.no_grad()
def test_a_loop_of_the_users_own(queries: str) -> None:
    """Several tokens after several may be one prompt: which token is its last is not known."""
    model, ids = build("qwen2"), prompt()["input_ids"]
    with attnscope.knockout(model, keys=keys(), queries=queries):
        cache = model(ids[:, :8], use_cache=True).past_key_values
        with raises(InputError, "prompt-in-pieces", queries=queries):
            model(ids[:, 8:], past_key_values=cache)
    with attnscope.knockout(model, keys=keys(), queries="generated"):
        cache = model(ids[:, :8], use_cache=True).past_key_values
        model(ids[:, 8:], past_key_values=cache)  # both are prompt
    with attnscope.knockout(model, keys=keys(), queries=queries):
        for _ in range(2):  # a new text each time
            cache = model(ids[:, :8], use_cache=True).past_key_values
            model(ids[:, 8:9], past_key_values=cache)  # a generated token
            model(ids[:, 9:], past_key_values=cache)  # and the next turn
        cache = model.generate(
            ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True
        ).past_key_values
        model(ids[:, :3], past_key_values=cache)
