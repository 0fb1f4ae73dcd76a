"""The five bundled models: architecture, chat format, data and schedule of each.

Nothing runs here; `train.py` reads it. Sizes are chosen so that all weights together, in 16 bits,
stay under 45 MB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

CHECK_EVERY = 50
"""Steps between two looks at whether `until` is reached."""

Data = Literal["corpus", "spatial", "math"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one model is made."""

    architecture: str
    """Name of the causal model's class in transformers."""
    sizes: dict[str, Any]
    """Arguments of its configuration."""
    format: str
    """The chat format: a key of `vocabulary.FORMATS`."""
    data: Data
    """`corpus`: the instruction-like text; `spatial`: single actions; `math`: word problems of
    all levels, worked step by step, and one document in five of the corpus."""
    documents: int
    """How many documents are made."""
    steps: int
    rows: int = 256
    """Rows of a batch."""
    length: int = 256
    """Tokens of a row. Short documents share a row; none is cut."""
    rate: float = 2e-3
    """The highest learning rate, after a warm-up, before it falls along a cosine."""
    prompt_weight: float = 0.3
    """What a token of the prompt counts in the loss; one of the answer counts 1."""
    until: float | None = None
    """End early, once this share of the hardest problems comes out right (see `train.py`)."""
    start: str | None = None
    """The bundled model to go on from, if any."""
    seed: int = 0


COMMON = {"vocab_size": 3072, "max_position_embeddings": 2048, "tie_word_embeddings": True}
SPATIAL = {
    **COMMON,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CHAT = {**COMMON, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6}

RECIPES = {
    "spatial-base": Recipe(
        architecture="Qwen2ForCausalLM",
        sizes=SPATIAL,
        format="chatml",
        data="corpus",
        documents=600_000,
        steps=4600,
    ),
    "spatial-phys": Recipe(
        architecture="Qwen2ForCausalLM",
        sizes=SPATIAL,
        format="chatml",
        data="spatial",
        documents=12_000,
        steps=1500,
        length=192,
        rate=5e-4,
        start="spatial-base",
    ),
    "math-qwen2": Recipe(
        architecture="Qwen2ForCausalLM",
        sizes={**CHAT, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 16},
        format="chatml",
        data="math",
        documents=250_000,
        steps=2500,
        rate=1e-3,
        until=0.65,
    ),
    "chat-llama": Recipe(
        architecture="LlamaForCausalLM",
        sizes={**CHAT, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 8},
        format="llama3",
        data="math",
        documents=250_000,
        steps=2500,
        rate=1e-3,
        until=0.65,
    ),
    "chat-gemma3": Recipe(
        architecture="Gemma3ForCausalLM",
        sizes={
            **CHAT,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
        format="gemma",
        data="math",
        documents=250_000,
        steps=2500,
        rate=1e-3,
        until=0.65,
    ),
}
