"""What is peculiar to one family of models, an entry each; nothing else names a family.

A family that goes through the attention interface of transformers needs no entry.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Attention of a decoder to its encoder stands beside its self-attention, under names like these.
CROSS_ATTENTION = re.compile(
    r"encoder_attn|cross_?attn|cross_?attention|encdecattention", re.IGNORECASE
)

# Towers that stand beside a text go by names like these.
MODALITY_TOWERS = re.compile(r"vision|image|img_|audio|speech|visual", re.IGNORECASE)

# Named attention, and are none themselves.
NOT_ATTENTION = {"FunnelAttentionStructure", "RwkvSelfAttention"}

# Modules that are called again and again in one pass, each time as the next layer: by class, how
# many layers a configuration makes of them.
SHARED_MODULES: dict[str, Callable[[Any], int]] = {
    "AlbertAttention": lambda c: c.num_hidden_layers * c.inner_group_num,
    "HrmTextAttention": lambda c: c.H_cycles * (c.L_cycles + 1) * c.num_layers_per_stack,
}

# Classes whose modules have no layer number of their own, or share one: counted as they stand.
NUMBERED_BY_ORDER = {"FunnelRelMultiheadAttention"}

# Modules that are given their text as [batch, size, tokens].
CHANNELS_FIRST = {"SqueezeBertSelfAttention"}

# The output projection goes by these names, inside the attention module.
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "Wo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read a family whose attention bypasses the interface."""

    projection: str
    """The submodule that makes its value vectors, alone or with queries and keys."""
    values: Callable[[Any, Tensor], Tensor]
    """From the attention module and what the projection made to [B, G, K, E]."""


def _gptj_values(module: Any, projected: Tensor) -> Tensor:
    return projected.view(*projected.shape[:2], -1, module.head_dim).transpose(1, 2)


def _bloom_values(module: Any, projected: Tensor) -> Tensor:
    values: Tensor = module._reshape(projected)[2]
    return values


def _falcon_values(module: Any, projected: Tensor) -> Tensor:
    values: Tensor = module._split_heads(projected)[2]
    return values.transpose(1, 2)


_GPTJ = Family(projection="v_proj", values=_gptj_values)
_BLOOM = Family(projection="query_key_value", values=_bloom_values)
_FALCON = Family(projection="query_key_value", values=_falcon_values)

# By the name of the attention module's class.
NON_INTERFACE: dict[str, Family] = {
    "BloomAttention": _BLOOM,
    "FalconAttention": _FALCON,
    "FalconFlashAttention2": _FALCON,
    "GPTJAttention": _GPTJ,
    "GPTJFlashAttention2": _GPTJ,
}
