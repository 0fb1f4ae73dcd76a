"""How many prompts a second a run gets through, and how much of the time is not the model's.

    python benchmarks/runs.py MODEL [--prompts 10000] [--measures mass entropy …]

The model's time is the watched forward passes, the attention statistics included; plain forward
passes over the same batches, as the run feeds them and on as many threads, are timed before and
after it, and their mean is taken: what comes later finds memory and caches warm.
Memory is the resident size as the run goes on. Where other programs run on the machine, processor
time says more than the clock, with OMP_NUM_THREADS=1 (threads that wait for others take it too):
that of the main thread, of the writer, and of all threads, those that encode tables among them.
Prints Markdown; the committed table is in docs/benchmarks.md.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

import attnscope
from attnscope.experiment import model_pass
from attnscope.experiment.batch_store import BatchStore
from attnscope.experiment.condition_batch import ConditionBatch
from attnscope.experiment.estimate import estimate
from attnscope.experiment.execute import run_plan
from attnscope.experiment.plan import make_plan
from attnscope.interception import sites
from attnscope.spec.experiment import make_experiment


def resident() -> float:
    """MiB of memory in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def now() -> Any:
    """By the clock, and of the processor: of this thread and of all."""
    return np.array([time.perf_counter(), time.thread_time(), time.process_time()])


def plain(model: Any, plan: Any) -> Any:
    """Seconds for the same batches without a watch."""
    base, of = sites.find(model).base_model, plan.models[0]
    start = now()
    with torch.no_grad():
        for batch in of.batches:
            for cells in batch.cells.values():
                given = ConditionBatch(plan.experiment, of, cells).inputs
                given = {name: value.to(model.device) for name, value in given.items()}
                base(**given, use_cache=False)
    return now() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a zoo name, a hub id or a folder")
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--measures", nargs="+", default=["mass", "entropy", "first_token"])
    parser.add_argument("--batch-tokens", type=int, help="as suits the device, if not given")
    options = parser.parse_args()
    logging.disable_progress_bar()
    experiment = make_experiment(
        name="many",
        models={"model": options.model},
        prompts={"source": "math", "count": options.prompts, "level": 1},
        measures=options.measures,
        batch_tokens=options.batch_tokens or "auto",
    )
    in_model = used_in_model = 0.0
    watched = model_pass.forward

    @contextmanager
    def timed(*arguments: Any, **keywords: Any) -> Iterator[Any]:
        nonlocal in_model, used_in_model
        start, used = time.perf_counter(), time.thread_time()
        with watched(*arguments, **keywords) as found:
            in_model += time.perf_counter() - start
            used_in_model += time.thread_time() - used
            yield found

    writing = 0.0
    store = BatchStore.__call__

    def stored(*arguments: Any) -> None:
        nonlocal writing
        used = time.thread_time()
        store(*arguments)
        writing += time.thread_time() - used

    BatchStore.__call__ = stored
    memory: list[tuple[float, float]] = []
    folder = Path(tempfile.mkdtemp())
    start = now()
    plan = make_plan(experiment)
    planned = now() - start
    expected = estimate(plan)[0].seconds
    model, _ = attnscope.load(options.model)
    before = plain(model, plan)
    model_pass.forward = timed
    resumed = now()
    run_plan(plan, folder / "run", progress=lambda _, n, of: memory.append((n / of, resident())))
    took, used, used_by_all = now() - resumed + planned
    size = sum(path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file())
    run = attnscope.open_run(folder / "run")
    rows = run.sql("SELECT count(*) AS rows FROM values")["rows"][0]
    tokens = int(run.cells["tokens"].sum())
    shutil.rmtree(folder)
    alone, used_alone, used_by_all_alone = (before + plain(model, plan)) / 2
    at = {mark: min(memory, key=lambda m: abs(m[0] - mark))[1] for mark in (0.1, 0.5, 1.0)}
    entry = run.environment["models"]["model"]
    print(f"| {options.model}: {entry['layers']} layers, {entry['heads']} heads, ", end="")
    print(f"{entry['parameters']:,} parameters | |\n| --- | ---: |")
    batches = f"{len(plan.models[0].batches):,} of {plan.settled.batch_tokens:,} tokens"
    print(f"| batches; threads | {batches}; {torch.get_num_threads()} |")
    print(f"| prompts (tokens, values) | {options.prompts:,} ({tokens:,}, {rows:,}) |")
    print(f"| time, planning included | {took:.1f} s |")
    print(f"| prompts a second | {options.prompts / took:.0f} |")
    print(f"| watched forward passes | {in_model:.1f} s |")
    print(f"| share of time outside them | {100 * (1 - in_model / took):.1f} % |")
    print(f"| share of processor time outside | {100 * (1 - used_in_model / used):.1f} % |")
    print(f"| processor time of the writer, beside | {writing:.1f} s |")
    print(f"| of all time, planning | {100 * planned[0] / took:.1f} % |")
    print(f"| the same batches unwatched | {alone:.1f} s |")
    print(f"| the run over them, by the clock | {took / alone:.2f} |")
    print(f"| by processor time of the main thread | {used / used_alone:.2f} |")
    print(f"| of all threads | {used_by_all / used_by_all_alone:.2f} |")
    print(f"| estimated by --check | {expected:.1f} s |")
    print("| memory at 10, 50, 100 % | " + ", ".join(f"{m:.0f}" for m in at.values()) + " MiB |")
    print(f"| on disk | {size / 2**20:.0f} MiB |")


if __name__ == "__main__":
    main()
