"""Runs of small models in vLLM, compared with eager attention of transformers.

    python vllm_runs.py ENGINE FOLDER

Every engine has a process of its own (`integrations/test_vllm_engine.py` starts it), because vLLM
warns, forks and keeps state. It prints what each check found as one line of JSON.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
sys.path.insert(0, str(Path(__file__).parents[2] / "validation"))

import torch

import attnscope
import vllm_compare
from attnscope.errors import AttnscopeError
from attnscope.experiment.execute import run
from attnscope.spec.experiment import make_experiment
from made_models import save_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
BOUND = 1e-4
"""Largest difference of a mean over queries, in float32."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "disable_log_stats": True,
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "block_size": 32,
}


def params(**changes: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 0, "max_tokens": 8, "ignore_eos": True, "detokenize": False, **changes}
    )


def texts(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": ids} for ids in prompts]


class Engine:
    """An engine with the model it is compared with."""

    def __init__(self, folder: str, **settings: Any):
        from vllm import LLM

        self.folder = folder
        self.llm: Any = LLM(folder, **SETTINGS | settings)
        self.model = vllm_compare.eager_model(folder)

    def generate(self, prompts: list[list[int]], options: Any = None) -> list[Any]:
        done: list[Any] = self.llm.generate(texts(prompts), options or params(), use_tqdm=False)
        return done

    def compare(self, scopes: Any, outputs: list[Any], queries: str = "all") -> None:
        worst, _ = vllm_compare.compare(self.model, scopes, outputs, queries)
        del worst["received"]
        assert max(worst.values()) < BOUND, worst

    def dense(self, ids: list[int]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            weights: tuple[torch.Tensor, ...] = self.model(
                torch.tensor([ids]), output_attentions=True
            ).attentions
        return weights


def refused(code: str, do: Callable[[], Any]) -> None:
    found = None
    try:
        do()
    except AttnscopeError as error:
        found = error.code
    assert found == code, found


PROMPTS = vllm_compare.random_prompts(12, 150, vllm_compare.VOCABULARY)


def batch(engine: Engine) -> None:
    """Continuous batching and chunked prefill: requests begin and end at different steps."""
    options = [params(max_tokens=1 + 5 * i % 23) for i in range(len(PROMPTS))]
    with attnscope.watch(engine.llm) as scopes:
        outputs = engine.generate(PROMPTS, options)
    assert list(scopes) == [output.request_id for output in outputs]
    engine.compare(scopes, outputs)


def as_before(engine: Engine) -> None:
    """After the block no attribute is patched, and the engine generates the same tokens."""
    client = engine.llm.llm_engine
    worker = client.engine_core.engine_core.model_executor.driver_worker.worker
    modules = worker.vllm_config.compilation_config.static_forward_context.values()
    objects = [client, client.engine_core, worker, worker.model_runner]
    objects += [module.impl for module in modules]
    before = [dict(vars(each)) for each in objects]
    plain = [output.outputs[0].token_ids for output in engine.generate(PROMPTS[:3])]
    during = []
    with attnscope.watch(engine.llm):
        during = [output.outputs[0].token_ids for output in engine.generate(PROMPTS[:3])]
        assert [vars(each).keys() for each in objects] != [old.keys() for old in before]
    assert [vars(each).keys() for each in objects] == [old.keys() for old in before]
    for each, old in zip(objects, before, strict=True):
        for name, value in old.items():
            if callable(value):
                assert vars(each)[name] is value, name
    after = [output.outputs[0].token_ids for output in engine.generate(PROMPTS[:3])]
    assert plain == during == after


def prefix_cache(engine: Engine) -> None:
    """Keys of queries come from pages that another request wrote."""
    prompts = vllm_compare.random_prompts(4, 40, vllm_compare.VOCABULARY, shared=70)
    for queries in ("predicts", "generated", "last"):
        engine.generate(prompts)
        with attnscope.watch(engine.llm, queries=queries) as scopes:
            outputs = engine.generate(prompts)
        assert all(output.num_cached_tokens >= 64 for output in outputs)
        if queries != "last":
            engine.compare(scopes, outputs, queries)
    with attnscope.watch(engine.llm) as scopes:
        outputs = engine.generate(prompts)
    assert not any(output.num_cached_tokens for output in outputs)
    engine.compare(scopes, outputs)


def several(engine: Engine) -> None:
    """Several completions of a request."""
    with attnscope.watch(engine.llm) as scopes:
        outputs = engine.generate(PROMPTS[:4], params(n=3, temperature=1.0))
    assert scopes[outputs[0].request_id].count(0).shape == (3,)
    engine.compare(scopes, outputs)


def stops(engine: Engine) -> None:
    """Completions that end at a token, and aborted requests."""
    ends = params(stop_token_ids=list(range(0, 500, 7)), max_tokens=20)
    with attnscope.watch(engine.llm) as scopes:
        outputs = engine.generate(PROMPTS, ends)
        client, latest, steps = engine.llm.llm_engine, {}, 0
        for i, ids in enumerate(PROMPTS[:6]):
            client.add_request(f"r{i}", {"prompt_token_ids": ids}, params(max_tokens=30))
        while client.has_unfinished_requests():
            latest |= {output.request_id: output for output in client.step()}
            steps += 1
            if steps == 9:
                client.abort_request(["r0", "r2"])
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs)
    engine.compare(scopes, outputs)
    refused("unknown-request", lambda: scopes["r9"])
    shown = [output for name, output in latest.items() if output.outputs]
    assert len(shown) >= 5
    engine.compare(scopes, shown)


def rows_and_flow(engine: Engine) -> None:
    """Rows of chosen queries, and flow by the class of each token id."""
    mask = torch.zeros(2, 200, dtype=torch.bool)
    mask[0, [2, 30]] = mask[1, [0, 44]] = True
    prompts = [ids[:42] for ids in PROMPTS if len(ids) >= 42][:2]
    with attnscope.watch(engine.llm, queries=mask, keep=True, layers=[1, 3]) as scopes:
        outputs = engine.generate(prompts)
    assert scopes.layers == [1, 3]
    for i, output in enumerate(outputs):
        scope = scopes[output.request_id]
        dense = engine.dense(scope.tokens[0].tolist())
        for query in mask[i].nonzero()[:, 0].tolist():
            off = scope.row(3, query) - dense[3][0, :, query]
            assert float(off.abs().max()) < BOUND
    class_of = torch.arange(vllm_compare.VOCABULARY) % 3 - 1
    with attnscope.watch(engine.llm, classes=class_of) as scopes:
        outputs = engine.generate(prompts)
    scope = scopes[outputs[1].request_id]
    A, ids = engine.dense(scope.tokens[0].tolist())[2][0], scope.tokens[0]
    one_hot = torch.nn.functional.one_hot(class_of[ids] + 1, 3).float()[:, 1:]
    flow = torch.einsum("qc,hqk,kd->hcd", one_hot, A, one_hot) / one_hot.sum(0)[:, None]
    assert float((scope.flow(2)[0] - flow).abs().max()) < BOUND


def errors(engine: Engine) -> None:
    """Wrong arguments and wrong options of a request."""
    llm = engine.llm

    def enter(**options: Any) -> None:
        with attnscope.watch(llm, **options):
            pass

    refused("unknown-layer", lambda: enter(layers=[9]))
    refused("unknown-queries", lambda: enter(queries="sample:8"))
    refused("wrong-shape", lambda: enter(classes=torch.zeros(4)))
    refused("unknown-backend", lambda: enter(backend="fast"))
    with attnscope.watch(llm) as scopes:
        refused("already-watched", enter)
        options = params(extra_args={"attnscope": {"queries": "some"}})
        outputs = engine.generate(PROMPTS[:2], [options, params()])
    refused("unknown-queries", lambda: scopes[outputs[0].request_id])
    engine.compare(scopes, outputs[1:])
    one_row = torch.ones(1, 8, dtype=torch.bool)
    with attnscope.watch(llm, queries=one_row) as scopes:
        outputs = engine.generate(PROMPTS[:2])
    assert scopes[outputs[0].request_id].count(0).tolist() == [8]
    refused("wrong-shape", lambda: scopes[outputs[1].request_id])


def preemption(engine: Engine) -> None:
    """A request that lost its pages goes on on other pages."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    count, original = 0, scheduler._preempt_request

    def preempt(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    scheduler._preempt_request = preempt
    with attnscope.watch(engine.llm) as scopes:
        outputs = engine.generate([ids[:40] for ids in PROMPTS[:8]], params(max_tokens=60))
    assert count > 0
    engine.compare(scopes, outputs)


def stop_strings(engine: Engine) -> None:
    """Stop strings, which the engine sees after its workers have gone on."""
    ends = params(stop=["a", "e", "1", " "], max_tokens=40, detokenize=True)
    with attnscope.watch(engine.llm) as scopes:
        outputs = engine.generate(PROMPTS[:6], ends)
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs)
    engine.compare(scopes, outputs)


def page(engine: Engine) -> None:
    """The first block of docs/vllm.md."""
    block = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    with patch("vllm.LLM", lambda *args, **kwargs: engine.llm):
        exec(compile(block, str(PAGE), "exec"), names)
    scope = names["scope"]
    tokens = len(names["outputs"][0].prompt_token_ids) + 7
    assert scope.received(0).shape == (1, 4, tokens)
    assert scope.count(0).tolist() == [tokens]


def experiments(folder: str) -> None:
    """An experiment with either engine gives the same tables."""
    keys: dict[str, Any] = {
        "name": "both",
        "models": {"tiny": folder},
        "prompts": {"source": "math", "count": 4, "level": 1},
        "conditions": {"base": {}, "filler": {"insert": {"count": 5}}},
        "queries": ["all", "generated", "predicts:generated"],
        "generate": {"max_new_tokens": 6},
        "measures": ["mass", "entropy", "lambda", "profile", "step_mass", "query_entropy"],
        "batch_tokens": 256,
    }
    runs = []
    for kind in ("vllm", "transformers"):  # vLLM does not start after numba was loaded
        done = run(make_experiment(engine=kind, **keys), Path(folder) / "runs" / kind)
        assert done.complete, done.failed
        runs.append(attnscope.open_run(done.folder))
    assert runs[0].cells.drop("cell").equals(runs[1].cells.drop("cell"))
    for table in ("values", "tokens", "by_query"):
        one, other = (getattr(each, table).collect() for each in runs)
        exact = [column for column, kind in one.schema.items() if not kind.is_float()]
        one, other = (each.sort(exact, nulls_last=True) for each in (one, other))
        assert one.select(exact).equals(other.select(exact)), table
        for column in set(one.columns) - set(exact):
            a, b = (each[column].fill_nan(None) for each in (one, other))
            assert (a.is_null() == b.is_null()).all(), column
            assert (a - b).abs().max() is None or (a - b).abs().max() < BOUND, column


def quantised_cache(folder: str) -> None:
    """A quantised KV cache is refused."""
    from vllm import LLM

    llm = LLM(folder, **SETTINGS | {"dtype": "bfloat16", "kv_cache_dtype": "fp8"})
    refused("quantized-cache", lambda: attnscope.watch(llm).__enter__())


def speculation(folder: str) -> None:
    """Speculative decoding is refused."""
    from vllm import LLM

    options = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    llm = LLM(folder, **SETTINGS | {"speculative_config": options})
    refused("speculative-decoding", lambda: attnscope.watch(llm).__enter__())


ENGINES: dict[str, tuple[str, dict[str, Any], list[Callable[..., None]]]] = {
    "llama": (
        "llama",
        {},
        [batch, as_before, prefix_cache, several, stops, rows_and_flow, errors],
    ),
    "small cache": ("llama", {"num_gpu_blocks_override": 12}, [preemption]),
    "windows and soft-cap": ("gemma2", {}, [batch]),
    "windows and sinks": ("gpt_oss", {}, [batch]),
    "ALiBi": ("bloom", {}, [batch]),
    "processes": ("llama", {"skip_tokenizer_init": False}, [batch, stop_strings, page]),
}
"""By name: the model, settings of vLLM, and the checks."""
ALONE = {
    "quantised cache": quantised_cache,
    "speculative decoding": speculation,
    "experiments": experiments,
}
"""Checks that start an engine of their own."""


def main() -> None:
    name, folder = sys.argv[1:]
    vllm_compare.random_model(ENGINES[name][0] if name in ENGINES else "llama", folder)
    save_tokenizer(Path(folder))
    processes = name == "processes"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes))
    found: dict[str, str] = {}
    if name in ALONE:
        checks: list[tuple[str, Callable[[], None]]] = [
            (ALONE[name].__name__, lambda: ALONE[name](folder))
        ]
    else:
        _, settings, functions = ENGINES[name]
        engine = Engine(folder, **settings)
        checks = [(each.__name__, lambda each=each: each(engine)) for each in functions]
    for check, do in checks:
        try:
            do()
            found[check] = "right"
        except Exception:
            found[check] = traceback.format_exc()
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
