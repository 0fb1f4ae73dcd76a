"""A tiny language model as code from a hub writes it: each layer with a kind of attention given."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

WIDTH, HEADS, VOCABULARY = 32, 4, 61


class HubConfig(PretrainedConfig):
    model_type = "made_hub_code"
    num_hidden_layers = 3
    num_attention_heads = HEADS
    hidden_size = WIDTH
    vocab_size = VOCABULARY


def eager_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    scores = query @ key.transpose(2, 3) * kwargs["scaling"] + attention_mask
    weights = F.softmax(scores, dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class Projections(nn.Module):
    """Queries, keys and values; the classes below attend."""

    is_causal = True

    def __init__(self, config: Any, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def split(self, hidden: Tensor) -> list[Tensor]:
        shape = (*hidden.shape[:2], HEADS, WIDTH // HEADS)
        return [t.view(shape).transpose(1, 2) for t in self.qkv(hidden).chunk(3, -1)]

    def weights(self, hidden: Tensor, attention_mask: Any) -> tuple[Tensor, Tensor]:
        q, k, v = self.split(hidden)
        return F.softmax(q @ k.transpose(2, 3) / (WIDTH // HEADS) ** 0.5 + attention_mask, -1), v

    def project(self, mixed: Tensor) -> Tensor:
        return self.o_proj(mixed.reshape(*mixed.shape[:2], WIDTH))


class InterfaceAttention(Projections):
    """As in transformers."""

    def forward(self, hidden: Tensor, attention_mask: Any = None) -> tuple[Tensor, Any]:
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attend(
            self, *self.split(hidden), attention_mask, scaling=(WIDTH // HEADS) ** -0.5
        )
        return self.project(out), weights


class ItemAttention(Projections):
    """As in code for transformers 4.48."""

    def forward(self, hidden: Tensor, attention_mask: Any = None) -> tuple[Tensor, Any]:
        attend: Callable[..., Any] = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = attend(
            self, *self.split(hidden), attention_mask, scaling=(WIDTH // HEADS) ** -0.5
        )
        return self.project(out), weights


class GetAttention(Projections):
    def forward(self, hidden: Tensor, attention_mask: Any = None) -> tuple[Tensor, Any]:
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attend(
            self, *self.split(hidden), attention_mask, scaling=(WIDTH // HEADS) ** -0.5
        )
        return self.project(out), weights


class HelperAttention(Projections):
    """Whose forward leaves the call to another method."""

    def attend(self, hidden: Tensor, attention_mask: Any) -> tuple[Tensor, Any]:
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        scale = (WIDTH // HEADS) ** -0.5
        made: tuple[Tensor, Any] = attend(self, *self.split(hidden), attention_mask, scaling=scale)
        return made

    def forward(self, hidden: Tensor, attention_mask: Any = None) -> tuple[Tensor, Any]:
        out, weights = self.attend(hidden, attention_mask)
        return self.project(out), weights


class SdpaAttention(Projections):
    def forward(self, hidden: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        q, k, v = self.split(hidden)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.project(out.transpose(1, 2)), None


class Mixer(SdpaAttention):
    """Attention by another name."""


class SoftmaxAttention(Projections):
    def forward(self, hidden: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        weights, v = self.weights(hidden, attention_mask)
        return self.project((weights @ v).transpose(1, 2)), None


class SoftmaxMixer(SoftmaxAttention):
    """The same by another name."""


class TorchAttention(nn.Module):
    """torch's own module."""

    def __init__(self, config: Any, layer_idx: int):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, hidden: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        mask = attention_mask[0, 0]
        return self.inner(hidden, hidden, hidden, attn_mask=mask, need_weights=False)[0], None


class Layer(nn.Module):
    def __init__(self, kind: Any, config: Any, number: int):
        super().__init__()
        self.attn = kind(config, number)
        self.router = nn.Linear(WIDTH, 9)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, attention_mask: Any) -> Tensor:
        hidden = hidden + self.attn(hidden, attention_mask=attention_mask)[0]
        share = self.router(hidden).softmax(-1).amax(-1, keepdim=True)  # as experts have it
        return hidden + share * F.silu(self.mlp(hidden))


class HubModel(PreTrainedModel):
    config_class = HubConfig
    _supports_sdpa = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, config: Any, kinds: list[Any]):
        super().__init__(config)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(kind, config, n) for n, kind in enumerate(kinds))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> CausalLMOutput:
        hidden = self.embed(input_ids)
        n = input_ids.shape[1]
        mask = torch.full((n, n), torch.finfo(hidden.dtype).min).triu(1)[None, None]
        mask = mask.expand(len(input_ids), 1, n, n)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return CausalLMOutput(logits=self.head(hidden))


def hub_model(*kinds: Any, implementation: str = "sdpa") -> HubModel:
    torch.manual_seed(0)
    config = HubConfig()
    config._attn_implementation = implementation
    return HubModel(config, list(kinds)).eval()


def hub_text(tokens: int = 9) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(1))


def hub_weights(model: HubModel, ids: Tensor) -> list[Tensor]:
    """What every layer attends with, spelled out; [B, H, Q, K] each."""
    found = []

    def take(layer: Any, args: Any) -> None:
        found.append(layer.attn.weights(args[0], args[1])[0])

    hooks = [layer.register_forward_pre_hook(take) for layer in model.layers]
    model(ids)
    for hook in hooks:
        hook.remove()
    return found
