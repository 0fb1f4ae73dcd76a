"""Lists the exceptions of single model families; no other module names a family.

A family that uses the attention interface of transformers needs no entry.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Names of the modules with which a decoder attends to its encoder.
CROSS_ATTENTION = re.compile(
    r"encoder_attn|cross_?attn|cross_?attention|encdecattention", re.IGNORECASE
)

# Names of vision and audio towers, which are not measured.
MODALITY_TOWERS = re.compile(r"vision|image|img_|audio|speech|visual", re.IGNORECASE)

# Modules that reduce the outputs of a tower to one vector, with one learned query; not layers.
POOLING_HEADS = re.compile(r"PoolingHead$")

# Classes with Attention in their names that compute no attention.
NOT_ATTENTION = {"FunnelAttentionStructure", "RwkvSelfAttention"}

# Modules that one pass calls several times, each time as the next layer. By class: the number of
# layers for a configuration.
SHARED_MODULES: dict[str, Callable[[Any], int]] = {
    "AlbertAttention": lambda c: c.num_hidden_layers * c.inner_group_num,
    "HrmTextAttention": lambda c: c.H_cycles * (c.L_cycles + 1) * c.num_layers_per_stack,
}

# Classes whose modules have no layer index or share one: numbered in their order in the model.
NUMBERED_BY_ORDER = {"FunnelRelMultiheadAttention"}

# Modules whose input is [batch, size, tokens].
CHANNELS_FIRST = {"SqueezeBertSelfAttention"}

# Names of the output projection inside the attention module.
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "Wo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read the values of a family that does not use the attention interface."""

    projection: str
    """The submodule that computes the value vectors, alone or with queries and keys."""
    values: Callable[[Any, Tensor], Tensor]
    """(attention module, output of the projection) → values [B, G, K, E]."""


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
