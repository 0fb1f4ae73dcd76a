"""The census: every language model and text encoder that the installed transformers knows.

    make census                                  # all of them, writes docs/models.md
    python validation/census.py qwen2 t5         # some, printed

Each model is built from its configuration, shrunk, with random weights, in a process of its own,
and runs twice on a padded batch: plainly and watched. Its output must be the same, and what every
layer's keys received must be what its own eager attention says. The outcome is one of

    exact          both hold
    refused        attnscope states why it does not measure this model
    no attention   there is none to measure
    no model       it could not be built or does not run by itself: no result
    unknown        there were no weights to compare with
    changed, wrong, crashed    defects
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
TABLES = Path(__file__).parent / "census.md"
"""The outcome of every model type; the site has it as a page."""
B, N, TARGET, VOCABULARY = 2, 20, 11, 97
PADDING = 6
# Largest deviation, of outputs relative to the largest of them, of `received` absolute.
TOLERANCE = 1e-4
SECONDS, GIGABYTES = 100, 8
TRACE = bool(os.environ.get("CENSUS_TRACE"))
DEFECTS = ("changed", "wrong", "crashed")

# What a parameter of a configuration is shrunk to, wherever it occurs.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(
        ["hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "model_dim",
         "hidden_dim", "embedding_size", "decoder_hidden_size", "word_embed_proj_dim"], 32),
    **dict.fromkeys(
        ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
         "decoder_layers", "num_decoder_layers", "num_encoder_layers", "layers"], 4),
    **dict.fromkeys(
        ["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads", "num_decoder_attention_heads",
         "num_encoder_attention_heads", "encoder_num_attention_heads",
         "decoder_num_attention_heads", "attention_heads", "n_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "n_kv_heads"], 2),
    **dict.fromkeys(["head_dim", "d_kv", "attention_head_dim", "kv_channels"], 8),
    **dict.fromkeys(
        ["intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim",
         "ffn_hidden_size", "intermediate_size_mlp", "moe_intermediate_size", "dim_ff",
         "shared_expert_intermediate_size", "expert_ffn_hidden_size", "mlp_hidden_size",
         "shared_intermediate_size", "dense_intermediate_size"], 48),
    **dict.fromkeys(
        ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length",
         "max_source_positions", "max_target_positions", "seq_length", "context_length"], 64),
    **dict.fromkeys(
        ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
         "num_moe_experts", "n_experts"], 4),
    **dict.fromkeys(
        ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts",
         "moe_top_k"], 2),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group", "num_limited_groups"], 1),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "first_k_dense_replace"], 1),
    **dict.fromkeys(
        ["sliding_window", "attention_window_size", "window_size", "local_attention"], 6),
    **dict.fromkeys(["index_topk"], 5),
    **dict.fromkeys(["index_n_heads", "index_head_dim"], 8),
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "attention_chunk_size": 7,
    **dict.fromkeys(["pad_token_id", "padding_idx"], 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "cls_token_id": 3,
    "sep_token_id": 4,
    **dict.fromkeys(["mamba_d_state", "state_size", "ssm_state_size"], 8),
    **dict.fromkeys(["linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"], 4),
    "linear_num_key_heads": 2,
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 8),
}  # fmt: skip

# Where that is not enough, by model type.
_QSA = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
        "indexer_compress_ratio": 2}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gemma3n": {"text_config": {"layer_types": ["sliding_attention", "full_attention"] * 2,
                                "num_kv_shared_layers": 0}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "full_attention", "mlp", "full_attention"],
                   "n_groups": 2, "mamba_head_dim": 16},
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0}
        for kind in ("full_attention", "sliding_attention")
    }},
    "neomme": {"head_dim": 16},
    "qwen4_exp_text": _QSA,
    "qwen4_exp": {"text_config": _QSA},
    "blt": {"num_hidden_layers": 4},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"] * 2,
                           "index_block_size": 2, "index_topk_blocks": 3, "index_n_heads": 2},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2,
                  "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
    "vibevoice_asr": {name: {"num_filters": 4, "depths": [1] * 7} for name in (
        "semantic_tokenizer_encoder_config", "acoustic_tokenizer_encoder_config")},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attn_layer_offset": 0, "attn_layer_period": 2},
    "esmc": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2,
                     "num_kv_shared_layers": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 8)},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1},
}  # fmt: skip


def kinds_of_models() -> dict[str, str]:
    """Model type to the name of the class that is counted: an encoder-decoder model as such, an
    encoder with its head, a decoder with its own."""
    found: dict[str, Any] = {}
    for names in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        {
            "whisper": "WhisperForConditionalGeneration",
            "mistral_large4": "MistralLarge4ForConditionalGeneration",
        },
    ):
        found |= dict(names)
    return {kind: name if isinstance(name, str) else name[0] for kind, name in found.items()}


def shrunk(config_class: Any, more: dict[str, Any], small: dict[str, Any] = SMALL) -> Any:
    """A small configuration of a class, and of what is nested in it."""
    default = config_class()
    known = default.to_dict().keys() | set(_fields(config_class))
    given: dict[str, Any] = {}
    for name in known & small.keys():
        try:
            value = getattr(default, name, None)
        except Exception:  # one that is read by layer
            value = None
        if not isinstance(value, list | tuple):
            given[name] = small[name]
    for name in config_class.sub_configs:
        inner = getattr(default, name, None)
        if inner is not None:
            given[name] = shrunk(type(inner), more.get(name, {}), small).to_dict()
    if "kv_lora_rank" in known and "num_key_value_heads" in given:
        given["num_key_value_heads"] = SMALL["num_attention_heads"]
    given |= {name: value for name, value in more.items() if name not in config_class.sub_configs}
    return config_class(**given)


def _fields(config_class: Any) -> Iterable[str]:
    return getattr(config_class, "__dataclass_fields__", {})


def configured(kind: str) -> Any:
    """The shrunk configuration of a model type."""
    if kind == "encoder-decoder":
        bert = shrunk(CONFIG_MAPPING["bert"], {}).to_dict()
        decoder = {**bert, "is_decoder": True, "add_cross_attention": True}
        return CONFIG_MAPPING[kind](encoder=bert, decoder=decoder, decoder_start_token_id=1)
    config = shrunk(CONFIG_MAPPING[kind], MORE.get(kind, {}))
    wanted = getattr(transformers, kinds_of_models()[kind]).config_class
    inside = config.get_text_config(decoder=True)
    return inside if not isinstance(config, wanted) and isinstance(inside, wanted) else config


def built(kind: str, implementation: str | None = None) -> Any:
    """The shrunk model of a type."""
    return random_model(
        getattr(transformers, kinds_of_models()[kind]), configured(kind), implementation
    )


def random_model(model_class: Any, config: Any, implementation: str | None) -> Any:
    """A model of a configuration, random but the same every time, sharp enough to attend
    unevenly."""
    if implementation is not None:
        config._attn_implementation = implementation
    torch.manual_seed(0)
    model = model_class._from_config(config) if implementation is None else model_class(config)
    model.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name and "router" not in name:
                parameter.mul_(3.0)
            if "sink" in name:
                parameter.normal_()
    return model


def text(model: Any) -> dict[str, Any]:
    """A padded batch for it."""
    torch.manual_seed(2)
    size = getattr(model.config.get_text_config(), "vocab_size", VOCABULARY)
    ids = torch.randint(5, min(size, VOCABULARY), (B, N))
    real = torch.ones_like(ids)
    both = model.config.is_encoder_decoder
    if getattr(model, "_is_causal", False):
        real[1, :PADDING] = 0
    else:
        real[1, N - PADDING :] = 0
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": real}
    if "Musicgen" in type(model).__name__:
        given["input_ids"] = torch.randint(5, VOCABULARY, (B * model.config.num_codebooks, N))
    if both:
        target = torch.randint(5, min(size, VOCABULARY), (B, TARGET))
        given["decoder_input_ids"] = target
    if model.main_input_name == "input_features":
        frames = 2 * model.config.max_source_positions
        given = {
            "input_features": torch.randn(B, model.config.num_mel_bins, frames),
            "decoder_input_ids": given["decoder_input_ids"],
        }
    return given


def outputs(made: Any) -> dict[str, torch.Tensor]:
    """The tensors a model returns, by name, without its caches and weights."""
    names = ("logits", "last_hidden_state", "encoder_last_hidden_state", "logits_per_image")
    found = {name: getattr(made, name, None) for name in names}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


@contextmanager
def weights_kept(model: Any) -> Iterator[dict[Any, torch.Tensor]]:
    """Hold what a model's own eager attention returns, by site. Of attnscope only the names."""
    from attnscope.interception import sites

    found = sites.find(model)
    kept: dict[Any, torch.Tensor] = {}
    turns: Counter[str] = Counter()
    plain = AttentionInterface.get_interface

    def keep(module: Any, weights: Any) -> None:
        site = found.modules[module]
        if site.stack in found.shared_stacks:  # called again as the next layer
            site = sites.Site(site.stack, turns[site.stack])
        kept.setdefault(site, weights)
        turns[site.stack] += 1

    def get(self: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = plain(self, implementation, default)

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            made = function(module, *args, **kwargs)
            if module in found.modules:
                sinks = getattr(module, "sinks", None)
                weights = made[1] if sinks is None else with_sinks(sinks, *args, **kwargs)
                keep(module, weights)
            return made

        return call

    def take(module: Any, args: Any, made: Any) -> None:
        four = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor) and t.ndim == 4]
        if four:
            weights = four[0]
            if weights.shape[0] != B:  # XLNet returns queries and keys first
                weights = weights.permute(2, 3, 0, 1)
            if bool((weights < 0).any()):  # SqueezeBERT returns scores
                weights = weights.softmax(-1)
            keep(module, weights)

    hooks = [module.register_forward_hook(take) for module in found.non_interface]
    AttentionInterface.get_interface = get
    try:
        yield kept
    finally:
        AttentionInterface.get_interface = plain
        for hook in hooks:
            hook.remove()


def with_sinks(
    sinks: torch.Tensor, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any
) -> torch.Tensor:
    """Weights beside a learned sink, afresh: some families return them as they are without."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ k.double().transpose(2, 3) * scaling + mask.double()
    column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]


def received(weights: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[B, H, K] by definition, in float64; padding is neither query nor key."""
    A = weights.double().where(rows[:, None, :, None] > 0, 0.0)
    return (A * keys[:, None, None]).sum(2)


class Kinds:
    """Notes which kinds of attention a model has."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.sites: set[Any] = set()

    def on_call(self, captured: Any) -> None:
        """Note what kind it is."""
        self.sites.add(captured.site)
        self.found.add(captured.site.part)
        frame, spec = captured.geometry, captured.spec
        if frame.gap_mask is not None:
            self.found.add("sparse")
        elif frame.queries == frame.keys and not frame.cross:
            start, stop = frame.visible_ranges
            if int((stop - start)[0].max()) < frame.keys:
                self.found.add("window")
        if spec.sinks is not None:
            self.found.add("sinks")
        if spec.softcap is not None:
            self.found.add("soft-cap")
        if spec.biased:
            self.found.add("bias")


@torch.no_grad()
def count(
    kind: str,
    runs: Callable[[], None] = lambda: None,
    built: Callable[..., Any] = built,
    inputs: Callable[[Any], dict[str, Any]] = text,
) -> dict[str, Any]:
    """One model: outcome, reason, backend, kinds, deviations. Says when it runs by itself."""
    import attnscope
    from attnscope.errors import AttnscopeError
    from attnscope.interception import sites

    try:
        model, given, plain = ready(kind, built, inputs)
    except Exception as reason:  # not ours to mend
        if TRACE:
            traceback.print_exc()
        return {"outcome": "no model", "reason": line(reason)}
    runs()
    if not sites.has_attention(model):
        return {"outcome": "no attention"}
    kinds = Kinds()
    try:
        with attnscope.watch(model) as scope, attnscope.intercept(model, kinds.on_call):
            watched = outputs(model(**given))
    except AttnscopeError as reason:
        if TRACE:
            traceback.print_exc()
        outcome = "no attention" if reason.code == "no-attention" else "refused"
        return {"outcome": outcome, "code": reason.code, "reason": line(reason)}
    result: dict[str, Any] = {"backend": _backend(scope), "kinds": sorted(kinds.found)}
    result["output"] = max(_off(watched[name], plain[name], given) for name in plain)
    if not result["output"] <= TOLERANCE:
        return result | {"outcome": "changed", "reason": f"output off by {result['output']:.2g}"}
    eager = built(kind, "eager").to(model.dtype)
    eager.load_state_dict(model.state_dict())
    eager(**given)  # some settle their modules in the first pass
    with weights_kept(eager) as kept:
        again = outputs(eager(**given, output_attentions=True))
    differs = max(_off(again[name], plain[name], given) for name in plain)
    result |= compared(scope, kept, kinds.sites, given)
    if result["outcome"] == "wrong" and not differs <= TOLERANCE:
        result["reason"] += f"; its own eager attention is off by {differs:.2g} too"
    return result


def ready(
    kind: str, built: Callable[..., Any], inputs: Callable[[Any], dict[str, Any]]
) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """A model with its inputs and its output, in float64 where it runs so: there is less noise."""
    for dtype in (torch.float64, torch.float32):
        model = built(kind).to(dtype)
        try:
            given = {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in inputs(model).items()
            }
            plain = outputs(model(**given))
            assert plain, "returns no logits"
            assert all(_real(t, given).isfinite().all() for t in plain.values()), "not finite"
        except (AssertionError, RuntimeError):
            if dtype == torch.float32:
                raise
        else:
            break
    return model, given, plain


def compared(
    scope: Any, kept: dict[Any, Any], ran: set[Any], given: dict[str, Any]
) -> dict[str, Any]:
    """What every layer's keys received, against the weights of eager attention."""
    worst, missing = 0.0, []
    real = given.get("attention_mask")
    length = -1 if real is None else real.shape[1]
    for site in sorted(ran):
        weights = kept.get(site)
        if weights is None:
            missing.append(f"{site.part} {site.layer}")
            continue
        Q, K = weights.shape[2:]
        rows, keys = torch.ones(B, Q), torch.ones(B, K)
        before = max(0, Q - length) if "pixel_values" in given else 0  # GIT puts its picture there
        if real is not None and site.kind == "self" and length + before == Q:
            rows = torch.cat([torch.ones(B, before), real], 1)
            keys[:, : min(K, Q)] = rows[:, : min(K, Q)]
        elif real is not None and length == Q:
            rows = real
        elif real is not None and site.kind == "cross":
            keys[:, : min(K, length)] = real[:, : min(K, length)]
        wanted = received(weights, rows, keys)
        got = scope[site.part].received(site.layer).double()
        worst = max(worst, float((got - wanted).abs().max()))
    if missing:
        return {"outcome": "unknown", "reason": f"no weights to compare: {', '.join(missing)}"}
    if not worst <= TOLERANCE:
        return {"outcome": "wrong", "received": worst, "reason": f"received off by {worst:.2g}"}
    return {"outcome": "exact", "received": worst}


def _backend(scope: Any) -> str:
    used = {scope[part].backend for part in scope.parts if scope[part]._extents}  # which ran
    return "streamed" if used == {"streaming"} else "fallback" if len(used) == 1 else "mixed"


def _off(got: torch.Tensor, wanted: torch.Tensor, given: dict[str, Any]) -> float:
    """Largest deviation at real tokens, relative to the largest number."""
    got, wanted = _real(got, given), _real(wanted, given)
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1))


def _real(tensor: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """What there is of real tokens."""
    real = given.get("attention_mask")
    return tensor[real.bool()] if real is not None and tensor.shape[:2] == real.shape else tensor


def line(reason: BaseException) -> str:
    return f"{type(reason).__name__}: {' '.join(str(reason).split())}"[:300]


def counted_apart(kind: str, count: Callable[..., dict[str, Any]] = count) -> dict[str, Any]:
    """`count` in a forked process: whatever it breaks, the others are not affected."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
        warnings.simplefilter("ignore")
        try:
            result = count(kind, runs=lambda: os.write(write, b"\n") and None)
        except BaseException as reason:
            result = {"outcome": "crashed", "reason": line(reason)}
            if TRACE:
                traceback.print_exc()
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    output, until = b"", time.monotonic() + SECONDS
    while (left := until - time.monotonic()) > 0 and select.select([read], [], [], left)[0]:
        more = os.read(read, 1 << 16)
        output += more
        if not more:
            break
    else:
        os.kill(child, signal.SIGKILL)
    os.close(read)
    _, status = os.waitpid(child, 0)
    if output.strip():
        result = json.loads(output)
        return result
    reason = f"took more than {SECONDS} s" if left <= 0 else f"ended with status {status}"
    return {"outcome": "crashed" if output else "no model", "reason": reason}


def quiet() -> None:
    """One thread and no messages; what every model needs is imported once, before the forks."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    import_module("attnscope.scope.watch")


def printed(kind: str, row: dict[str, Any]) -> None:
    """A line for a model."""
    words = [row["outcome"], row.get("backend", ""), " ".join(row.get("kinds", []))]
    print(f"{kind:28}", *(f"{word:13}" for word in words), row.get("reason", ""), flush=True)


def main(wanted: list[str]) -> int:
    """Count these models, or all; 1 where there are defects."""
    quiet()
    began, results = time.monotonic(), {}
    for kind in wanted or sorted(kinds_of_models()):
        results[kind] = counted_apart(kind)
        printed(kind, results[kind])
    if not wanted:
        PAGE.write_text(page(results, time.monotonic() - began), encoding="utf-8")
        table, others = map("\n".join, tables(results))
        TABLES.write_text(LISTS.format(table=table, others=others), encoding="utf-8")
    return int(any(row["outcome"] in DEFECTS for row in results.values()))


# The section that is written by hand, and the next one.
BY_HAND = "## Quantised, wrapped", "## Models with attention"

OPENING = """# Models
`make census` writes this page, except one section. It builds every causal language model, masked
language model and sequence-to-sequence model that transformers {version} knows, from a small
configuration with random weights. Each model runs in a process of its own, plain and watched, on
a padded batch of {B} × {N} tokens (torch {torch}, CPU, float64 where the model supports it).
Search its table for your model by the `model_type` of its `config.json`.

- **exact**: the watched output equals the plain one, and every layer's `received` equals that of
  the model's own eager attention, within {tolerance:g}. The table has the largest deviations.
- **streamed**: attnscope builds no n × n matrix. **fallback**: it reads the matrix that the model
  builds anyway, one layer at a time. **mixed**: some attention modules are streamed, others use the
  fallback. Modules that compute their own softmax and attention that is sparse by index or content
  need the fallback.
- Of models with images or sound the text layers are counted; `watch(model, vision=True)` adds the
  tower.
- A model that makes an attention call which attnscope does not measure is refused.

{totals}

{by_hand}## Models with attention
Every model type with its outcome is in a [table of its own](../validation/census.md).
"""

LISTS = """# Model types
Written by `make census`; the page "Supported models" has the meaning of the outcomes.

## Models with attention
| outcome | measured | attention | model types | output off by | received off by |
| --- | --- | --- | --- | --- | --- |
{table}

## The others
`python validation/census.py TYPE` prints the reason. The code of a refusal is a section of
the page of errors. Without a result: the model could not be built or run here.

| outcome | model types |
| --- | --- |
{others}
"""


def _by_hand(before: str) -> str:
    """The section of the page before that is written by hand."""
    start, end = (before.index(heading) for heading in BY_HAND)
    return before[start:end]


def _grouped(
    rows: Iterable[tuple[tuple[str, ...], str]],
) -> list[tuple[tuple[str, ...], list[str]]]:
    """Model types with equal cells, the largest group first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for cells, kind in rows:
        groups.setdefault(cells, []).append(kind)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def tables(results: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The rows of both tables of the page."""
    measured, others = [], []
    for kind, row in sorted(results.items()):
        outcome = row["outcome"]
        if outcome in ("no attention", "no model", "refused"):
            code = f": `{row['code']}`" if outcome == "refused" else ""
            others.append(((outcome + code,), kind))
        else:
            reason = row.get("reason", "").replace("|", "\\|")
            outcome += f": {reason}" if reason else ""
            kinds = ", ".join(row.get("kinds", []))
            measured.append(((outcome, row.get("backend", ""), kinds), kind))
    table = []
    for cells, kinds in _grouped(measured):
        off = []
        for of in ("output", "received"):
            found = [results[kind][of] for kind in kinds if of in results[kind]]
            off.append(f"{max(found):.1g}" if found else "")
        table.append(f"| {' | '.join(cells)} | {', '.join(kinds)} | {' | '.join(off)} |")
    return table, [f"| {cells[0]} | {', '.join(kinds)} |" for cells, kinds in _grouped(others)]


def totals(results: dict[str, dict[str, Any]], seconds: float) -> str:
    """How many models have which outcome."""
    tally = Counter(row["outcome"] for row in results.values())
    exact = [row for row in results.values() if row["outcome"] == "exact"]
    streamed = sum(row["backend"] == "streamed" for row in exact)
    attending = len(results) - tally["no attention"] - tally["no model"]
    defects = ", ".join(f"{tally[name]} {name}" for name in (*DEFECTS, "unknown"))
    return (
        f"{len(results)} model types in {seconds:.0f} s: {attending} with attention, of which "
        f"**{len(exact)} exact** ({len(exact) / attending:.1%}; {streamed} of them streamed, "
        f"{streamed / len(exact):.0%}), {tally['refused']} refused, {defects}; "
        f"{tally['no attention']} without attention, {tally['no model']} not built."
    )


def page(results: dict[str, dict[str, Any]], seconds: float) -> str:
    """docs/models.md"""
    return OPENING.format(
        version=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        B=B,
        N=N,
        tolerance=TOLERANCE,
        totals=totals(results, seconds),
        by_hand=_by_hand(PAGE.read_text(encoding="utf-8")),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
