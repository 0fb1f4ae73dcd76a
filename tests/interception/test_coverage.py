"""Every attention call of a model is measured and changed, or an error names its module."""

import functools
import types
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2_vl import modeling_qwen2_vl

import attnscope
import made_processors
from attnscope.errors import ConservationError, ModelError
from made_hub_code import (
    GetAttention,
    HelperAttention,
    HubModel,
    InterfaceAttention,
    ItemAttention,
    Mixer,
    Projections,
    SdpaAttention,
    SoftmaxAttention,
    SoftmaxMixer,
    TorchAttention,
    hub_model,
    hub_text,
    hub_weights,
)


def assert_exact(model: HubModel) -> None:
    ids = hub_text()
    plain = model(ids).logits
    with attnscope.watch(model) as scope:
        watched = model(ids).logits
    assert scope.layers == list(range(len(model.layers)))
    assert (watched - plain).abs().max() <= 1e-5
    for layer, weights in enumerate(hub_weights(model, ids)):
        assert (scope.received(layer) - weights.sum(2)).abs().max() <= 1e-5


def changes(model: HubModel, **more: Any) -> bool:
    """Whether a knockout of one key equals that of the same model with the interface."""
    ids = hub_text()
    keys = torch.zeros(ids.shape, dtype=torch.bool)
    keys[:, 2] = True
    same = hub_model(*[InterfaceAttention] * len(model.layers))
    same.load_state_dict(model.state_dict())
    results = []
    for each in (model, same):
        with attnscope.knockout(each, keys=keys, **more):
            results.append(each(ids).logits)
    return bool((results[0] - results[1]).abs().max() <= 1e-5) and not torch.allclose(
        results[0], model(ids).logits
    )


@pytest.mark.parametrize("kind", [InterfaceAttention, ItemAttention, GetAttention, HelperAttention])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_every_lookup_of_the_attention_function_is_measured(kind: Any, implementation: str) -> None:
    assert_exact(hub_model(kind, kind, kind, implementation=implementation))


@pytest.mark.parametrize("kind", [InterfaceAttention, ItemAttention, GetAttention, HelperAttention])
@torch.no_grad()
def test_every_lookup_of_the_attention_function_is_changed(kind: Any) -> None:
    assert changes(hub_model(kind, kind, kind))


@torch.no_grad()
def test_an_intervention_needs_a_lookup_of_the_function() -> None:
    model = hub_model(*[ItemAttention] * 3, implementation="eager")
    with pytest.raises(ModelError) as error:
        changes(model)
    assert error.value.code == "intervention-not-applied"
    assert error.value.module == "layers.0.attn"


@torch.no_grad()
def test_lookups_are_restored() -> None:
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with attnscope.watch(hub_model(ItemAttention)):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not plain
        assert "nonsense" not in ALL_ATTENTION_FUNCTIONS
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is plain
    assert ALL_ATTENTION_FUNCTIONS.get("sdpa") is plain


@pytest.mark.parametrize("kind", [Mixer, SoftmaxMixer, TorchAttention])
@torch.no_grad()
def test_a_layer_that_is_not_found_is_an_error(kind: Any) -> None:
    model = hub_model(InterfaceAttention, kind, InterfaceAttention)
    for _ in range(2):
        with pytest.raises(ModelError) as error, attnscope.watch(model):
            model(hub_text())
        assert error.value.code == "attention-not-captured"
        assert error.value.module.startswith("layers.1.attn")
        keys = torch.arange(9).expand(2, 9) == 2
        with pytest.raises(ModelError) as error, attnscope.knockout(model, keys=keys):
            model(hub_text())
        assert error.value.code == "attention-not-captured"


@pytest.mark.parametrize("kind", [SdpaAttention, SoftmaxAttention])
@torch.no_grad()
def test_layers_of_a_mixed_model_are_measured(kind: Any) -> None:
    assert_exact(hub_model(InterfaceAttention, kind, InterfaceAttention))


@pytest.mark.parametrize("kind", [SdpaAttention, SoftmaxAttention])
@pytest.mark.parametrize("watched_before", [False, True])
@torch.no_grad()
def test_a_forward_replaced_on_the_instance(kind: Any, watched_before: bool) -> None:
    model = hub_model(*[InterfaceAttention] * 3)
    if watched_before:
        assert_exact(model)
    patched = model.layers[1].attn
    patched.forward = types.MethodType(kind.forward, patched)
    assert_exact(model)
    if kind is SdpaAttention:
        assert changes(model)
    else:
        with pytest.raises(ModelError) as error:
            changes(model)
        assert error.value.code == "intervention-not-applied"
        assert error.value.module == "layers.1.attn"
    del patched.forward
    assert_exact(model)
    assert changes(model)


@torch.no_grad()
def test_a_forward_wrapped_on_the_instance() -> None:
    model = hub_model(*[InterfaceAttention] * 3)
    patched = model.layers[1].attn
    before = patched.forward
    patched.forward = lambda *args, **kwargs: before(*args, **kwargs)
    assert_exact(model)
    assert changes(model)


@torch.no_grad()
def test_an_intervention_may_leave_out_layers_that_cannot_be_changed() -> None:
    model = hub_model(InterfaceAttention, SdpaAttention, InterfaceAttention)
    assert changes(model, layers=[0, 2])
    with pytest.raises(ModelError) as error:
        changes(model, layers=[1])
    assert error.value.module == "layers.1.attn"


class Hand(Projections):
    """Attention with a softmax of elementary operations."""

    def forward(self, hidden: Any, attention_mask: Any = None) -> Any:
        q, k, v = self.split(hidden)
        weights = (q @ k.transpose(2, 3) + attention_mask).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        return self.project((weights @ v).transpose(1, 2)), None


@torch.no_grad()
def test_a_layer_without_an_intercepted_call_is_an_error() -> None:
    model = hub_model(*[InterfaceAttention] * 3)
    patched = model.layers[1].attn
    patched.forward = types.MethodType(Hand.forward, patched)
    with pytest.raises(ModelError) as error, attnscope.watch(model):
        model(hub_text())
    assert error.value.module == "layers.1.attn"


@torch.no_grad()
def test_the_check_runs_in_the_first_pass_only() -> None:
    model = hub_model(*[InterfaceAttention] * 3)
    modes = []

    def note(*_: Any) -> None:
        modes.append(len(torch.overrides._get_current_function_mode_stack()))

    model.layers[1].register_forward_hook(note)
    for _ in range(2):
        with attnscope.watch(model):
            model(hub_text())
            model(hub_text())
    model(hub_text())
    assert modes == [1, 0, 0, 0, 0]


@torch.no_grad()
def test_a_router_with_as_many_experts_as_keys_is_no_attention() -> None:
    model, ids = hub_model(*[InterfaceAttention] * 3), hub_text(9)  # 9 experts
    with attnscope.watch(model) as scope:
        model(ids)
    assert scope.layers == [0, 1, 2]


@pytest.mark.parametrize("name", ["sdpa", "eager", "my_flash_attention"])
@torch.no_grad()
def test_a_function_registered_over_a_known_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    @functools.wraps(sdpa_attention_forward)
    def wrapper(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, 2 * query, *args, **kwargs)

    mapping = {**AttentionInterface._global_mapping, name: wrapper}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", mapping)
    model = hub_model(*[InterfaceAttention] * 3)
    model.config._attn_implementation_internal = name
    keys = torch.arange(9).expand(2, 9) == 2
    for block in (attnscope.watch(model), attnscope.knockout(model, keys=keys)):
        with pytest.raises(ModelError) as error, block:
            model(hub_text())
        assert error.value.code == "foreign-attention-function"
        assert error.value.implementation == name


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_modules_of_torch_ao_have_no_parameters() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch was built without quantized operators")
    model = hub_model(*[InterfaceAttention] * 3)
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    assert not list(quantized.layers[0].attn.parameters())
    assert_exact(quantized)


def _gated(weights: Tensor) -> Tensor:
    return weights * 0.5


def _largest(weights: Tensor) -> Tensor:
    kept = weights.where(weights >= weights.topk(3).values[..., -1:], 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _same(weights: Tensor) -> Tensor:
    return weights.to(torch.float64).to(torch.float32)


class ChangingAttention(Projections):
    """Changes its weights after the softmax."""

    change = staticmethod(_same)

    def forward(self, hidden: Tensor, attention_mask: Any = None) -> tuple[Tensor, Any]:
        weights, v = self.weights(hidden, attention_mask)
        weights = self.change(weights)
        return self.project((weights @ v).transpose(1, 2)), weights


class ExtraAttention(Projections):
    """A softmax with an extra term: rows sum to less than 1."""

    def forward(self, hidden: Tensor, attention_mask: Any = None) -> tuple[Tensor, Any]:
        q, k, v = self.split(hidden)
        scores = q @ k.transpose(2, 3) + attention_mask
        scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1)
        weights = scores.softmax(-1)[..., :-1]
        return self.project((weights @ v).transpose(1, 2)), weights


class ExtraByHandAttention(Projections):
    def forward(self, hidden: Tensor, attention_mask: Any = None) -> tuple[Tensor, Any]:
        q, k, v = self.split(hidden)
        scores = (q @ k.transpose(2, 3) + attention_mask).exp()
        weights = scores / (1 + scores.sum(-1, keepdim=True))
        return self.project((weights @ v).transpose(1, 2)), weights


@pytest.mark.parametrize("change", [_gated, _largest])
@torch.no_grad()
def test_weights_changed_after_the_softmax_are_refused(
    monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    model = hub_model(*[ChangingAttention] * 3)
    assert_exact(model)
    monkeypatch.setattr(ChangingAttention, "change", staticmethod(change))
    with pytest.raises(ModelError) as error, attnscope.watch(model):
        model(hub_text())
    assert error.value.code == "weights-changed-after-softmax"
    assert error.value.module == "layers.0.attn"


@torch.no_grad()
def test_a_softmax_with_an_extra_term_is_refused() -> None:
    model = hub_model(*[ExtraAttention] * 3)
    with pytest.raises(ModelError) as error, attnscope.watch(model):
        model(hub_text())
    assert error.value.code == "weights-changed-after-softmax"
    model = hub_model(*[ExtraByHandAttention] * 3)
    with pytest.raises(ConservationError), attnscope.watch(model):
        model(hub_text())


@torch.no_grad()
def test_dropout_does_not_count_as_a_change() -> None:
    model = hub_model(*[ChangingAttention] * 3)
    for layer in model.layers:
        layer.attn.change = torch.nn.Dropout(0.5).train()
    with attnscope.watch(model) as scope:
        model(hub_text())
    assert scope.layers == [0, 1, 2]


def test_towers_that_are_not_measured_are_named() -> None:
    with attnscope.watch(made_processors.made("llava").model) as scope:
        assert "vision_tower" in repr(scope)


@torch.no_grad()
def test_funnel_is_refused() -> None:
    config = hf.FunnelConfig(
        vocab_size=61, block_sizes=[1, 1], d_model=16, n_head=2, d_head=8, d_inner=16
    )
    model = hf.FunnelForMaskedLM(config).eval()
    with pytest.raises(ModelError) as error, attnscope.watch(model):
        model(hub_text())
    assert error.value.code == "attention-not-captured"
    assert error.value.module == "funnel.encoder.blocks.0.0.attention"


@torch.no_grad()
def test_two_images_are_refused() -> None:
    config = hf.Qwen2VLConfig(
        vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
    ).vision_config
    tower = modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel(config).eval()
    patches = torch.zeros(8, 3 * config.temporal_patch_size * config.patch_size**2)
    one, two = torch.tensor([[1, 2, 4]]), torch.tensor([[1, 2, 2], [1, 2, 2]])
    with attnscope.watch(tower) as scope:
        tower(patches, grid_thw=one)
    assert scope.layers == [0, 1]
    with pytest.raises(ModelError) as error, attnscope.watch(tower):
        tower(patches, grid_thw=two)
    assert error.value.code == "repeated-attention"
    assert error.value.layer == 0
