"""A model of an experiment that vLLM runs: loaded, measured while it completes prompts, closed."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from attnscope.errors import InputError, missing_package
from attnscope.experiment.batching import kind_of
from attnscope.experiment.completion import end_tokens
from attnscope.experiment.plan import ModelPlan, Plan
from attnscope.integrations.vllm.watch import watch_engine
from attnscope.loading import find, load_config
from attnscope.scope.scope import Scope


@dataclass(eq=False)
class VllmModel:
    """An engine of vLLM, and what is read of its model."""

    llm: Any
    tokenizer: Any
    generation_config: Any
    """As of a transformers model; its end tokens end completions."""
    layers: list[int] | None
    backend: str

    def measure(
        self, prompts: Sequence[Sequence[int]], queries: Any, *, new_tokens: int | None, keep: bool
    ) -> tuple[Scope, list[list[int]]]:
        """The attention of some prompts, a sequence of the scope for each, and their completions.

        Args:
            prompts: The token ids.
            queries: As for `watch`.
            new_tokens: The largest number of generated tokens; None to read the prompts alone.
            keep: Whether attention rows are kept.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=new_tokens or 1,
            stop_token_ids=end_tokens(self, self.tokenizer),
            ignore_eos=True,  # the end tokens of a run are those above
            detokenize=False,
        )
        texts = [{"prompt_token_ids": list(map(int, ids))} for ids in prompts]
        with watch_engine(self.llm, self.layers, queries, self.backend, keep=keep) as scopes:
            outputs = self.llm.generate(texts, params, use_tqdm=False)
        return scopes.joined(), [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """End the engine, with its processes."""
        self.llm.llm_engine.engine_core.shutdown()


def load_vllm(plan: Plan, of_model: ModelPlan) -> VllmModel:
    """Start an engine for a model of a plan."""
    if find_spec("vllm") is None:
        raise missing_package("engine: vllm", "vllm", "vllm")
    from vllm import LLM

    experiment, source = plan.experiment, find(of_model.info.pinned)
    if source.adapter is not None or source.packed is not None:
        raise InputError(
            f"engine: vllm cannot load {source.name!r}: it takes hub ids and folders with "
            "safetensors, without an adapter. Save the merged model to a folder",
            code="not-with-vllm",
            value=source.name,
        )
    config = load_config(source.pinned)
    new = 1 if experiment.generate is None else experiment.generate.max_new_tokens
    longest = max(length for batch in of_model.batches for row in batch.lengths() for length in row)
    llm = LLM(
        source.location,
        revision=source.commit,
        load_format="safetensors",
        dtype=_dtype(experiment.dtype, config, plan.device),
        max_model_len=longest + new,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        seed=0,
    )
    model = VllmModel(
        llm,
        of_model.tokenizer,
        _generation_config(source, config),
        None if of_model.layers is None else list(of_model.layers),
        experiment.backend,
    )
    where = llm.llm_engine.vllm_config.device_config.device_type
    if where != kind_of(plan.device):
        model.close()
        raise InputError(
            f"this vLLM runs on {where}, and the experiment on {plan.device}; write device: "
            f"{where}, or install the other build of vLLM",
            code="other-device",
            value=plan.device,
        )
    return model


def describe_vllm(plan: ModelPlan, model: VllmModel) -> dict[str, Any]:
    """The entry of a loaded model in `environment.json`."""
    from attnscope.loading import count_parameters

    engine = model.llm.llm_engine
    with watch_engine(model.llm, model.layers, backend=model.backend) as scopes:
        backend = scopes.backend  # no pass: only to see that the layers exist, and what measures
    info = plan.info
    return {
        "name": info.name,
        "revision": info.revision,
        "architecture": engine.model_config.architecture,
        "layers": info.layers,
        "heads": info.heads,
        "kv_heads": info.kv_heads,
        "parameters": count_parameters(info.pinned),
        "dtype": str(engine.model_config.dtype).removeprefix("torch."),
        "device": engine.vllm_config.device_config.device_type,
        "backend": backend,
        "bundled": info.bundled,
    }


def _dtype(chosen: str, config: Any, device: str) -> Any:
    """As `attnscope.load` chooses it; vLLM's own default replaces float32."""
    if chosen != "auto":
        return chosen
    stored = getattr(config.get_text_config(), "dtype", None)
    return torch.float32 if kind_of(device) == "cpu" or stored is None else stored


def _generation_config(source: Any, config: Any) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source.location, revision=source.commit)
    except OSError:
        return GenerationConfig.from_model_config(config)
