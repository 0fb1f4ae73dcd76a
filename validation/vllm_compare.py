"""Results of `watch` on vLLM beside eager attention of transformers, and small models for both."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers as hf
from torch import Tensor

CLASSES = 7
"""Token ids modulo this number are the classes whose masses are compared."""
VOCABULARY = 540
"""Token ids of the small models."""
SHARPENED = ("q_proj.weight", "k_proj.weight", "key_value.weight")
"""Weights that are enlarged, so that the attention of random models is uneven."""

_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
}
RANDOM: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "gemma2": lambda: hf.Gemma2Config(
        **_GROUPED, sliding_window=32, attn_logit_softcapping=2.0, query_pre_attn_scalar=32
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_GROUPED,
        sliding_window=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_scaling=None,
    ),
    "bloom": lambda: hf.BloomConfig(**_SIZES, n_head=4, n_layer=4),
}
"""Small models with random weights: grouped heads; windows and a soft-cap; windows and learned
sinks; ALiBi."""


def random_model(kind: str, folder: str) -> str:
    """A small model with random weights in a folder."""
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_config(RANDOM[kind]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in SHARPENED):
                parameter.mul_(12.0)
            if "sinks" in name:
                parameter.normal_()
    model.save_pretrained(folder)
    return folder


def random_prompts(
    count: int, longest: int, vocabulary: int, *, shared: int = 0
) -> list[list[int]]:
    """Prompts of different lengths that begin with the same `shared` tokens."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randint(5, vocabulary, (shared,), generator=draw).tolist()
    lengths = [5 + (i * 37) % max(1, longest - 5) for i in range(count)]
    lengths[-1] = longest
    return [
        start + torch.randint(5, vocabulary, (length,), generator=draw).tolist()
        for length in lengths
    ]


def eager_model(folder: str, dtype: str = "float32") -> Any:
    """The model of transformers that is compared with."""
    return hf.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=getattr(torch, dtype)
    )


def compare(
    model: Any, scopes: Any, outputs: list[Any], queries: str = "all"
) -> tuple[dict[str, float], int]:
    """The largest differences over all requests, layers, heads and tokens; and the tokens."""
    worst: dict[str, float] = {}
    tokens = 0
    for output in outputs:
        scope, prompt = scopes[output.request_id], len(output.prompt_token_ids)
        for b, completion in enumerate(output.outputs):
            ids = read_tokens(scope, b, output, completion)
            tokens += len(ids)
            first = {"all": 0, "generated": prompt, "predicts": prompt - 1}[queries]
            if first < len(ids):
                with torch.no_grad():
                    dense = model(torch.tensor([ids]), output_attentions=True).attentions
                for name, off in _differences(scope, b, ids, first, dense):
                    worst[name] = max(worst.get(name, 0.0), off)
    return worst, tokens


def read_tokens(scope: Any, sequence: int, output: Any, completion: Any) -> list[int]:
    """The tokens of a completion that the model read: all but the last. Checks the scope's."""
    seen = [*output.prompt_token_ids, *completion.token_ids]
    known: list[int] = scope.tokens[sequence][scope._real_keys()[sequence]].tolist()
    if completion.finish_reason in ("length", "stop"):
        assert known == seen[: max(len(seen) - 1, len(output.prompt_token_ids))]
    else:  # aborted: as far as it ran
        assert known[: len(seen)] == seen[: len(known)]
    return known


def _differences(
    scope: Any, b: int, ids: list[int], first: int, dense: tuple[Tensor, ...]
) -> Iterator[tuple[str, float]]:
    """Of each layer, for the queries from `first` on."""
    length = len(ids)
    classes = torch.full(scope.tokens.shape, -1)
    classes[b, :length] = torch.tensor(ids) % CLASSES
    one_hot = torch.nn.functional.one_hot(classes[b, :length], CLASSES).float()
    for layer in scope.layers:
        A = dense[layer][0, :, first:, :length].float()
        assert int(scope.count(layer)[b]) == A.shape[1]
        received = scope.received(layer)[b, :, :length]
        mass = scope.mass(layer, classes, CLASSES)[b]
        pairs = {
            "received": (received, A.sum(1)),
            "received per query": (received / A.shape[1], A.mean(1)),
            "entropy": (scope.entropy(layer)[b], torch.special.entr(A).sum(-1).mean(1)),
            "first token": (scope.first_token(layer)[b], A[:, :, 0].mean(1)),
            "class mass": (mass, (A @ one_hot).mean(1)),
        }
        for name, (value, other) in pairs.items():
            yield name, float((value - other).abs().max())
