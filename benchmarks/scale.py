"""A survey of planned size: 50 models × 10,000 prompts × 3 conditions, 1.5 million cells.

    python benchmarks/scale.py plan            the plan, in seconds and memory
    python benchmarks/scale.py store FOLDER    a store of that size, of made numbers
    python benchmarks/scale.py resume FOLDER   the run started again, with nothing left to do
    python benchmarks/scale.py read FOLDER     opened, queried, compared, drawn

The models are 50 folders, which differ and share three tokenizers, as families do. Numbers of the
store are made (there is no time to measure so many), in the tables, files and batches that the
plan has and through the writer that runs have.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

MODELS, PROMPTS, LAYERS, HEADS = 50, 10_000, 2, 2


def report(what: str, started: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    took, busy = time.monotonic() - started, time.process_time()
    print(
        f"{what}: {took:.1f} s, peak {peak:.2f} GiB ({busy:.0f} s of processor so far)", flush=True
    )


def folders(place: Path, number: int) -> dict[str, str]:
    """Models that differ in a word of their configuration, of three families."""
    from attnscope.loading import find

    names = ("zoo:math-qwen2", "zoo:chat-llama", "zoo:chat-gemma3")
    found = {}
    for n in range(number):
        folder = place / f"model-{n:02}"
        if not folder.is_dir():
            shutil.copytree(find(names[n % 3]).location, folder)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"survey_number": n}))
        found[f"m{n:02}"] = str(folder)
    return found


def asked(place: Path, models: int = MODELS, prompts: int = PROMPTS) -> Any:
    from attnscope.spec.experiment import make_experiment

    return make_experiment(
        name="survey",
        models=folders(place, models),
        prompts={"source": "math", "count": prompts},
        conditions={
            "base": {},
            "slashes": {"insert": {"kind": "repeat", "unit": "/", "count": 20}},
            "words": {"insert": {"kind": "word", "count": 20}},
        },
        layers=list(range(LAYERS)),
        heads=list(range(HEADS)),
        classes=["default"],
        measures=["entropy", "first_token"],
        chat=False,
        bos=False,
    )


def plan(place: Path, models: int = MODELS, prompts: int = PROMPTS) -> Any:
    import warnings

    from attnscope.experiment.plan import make_plan

    warnings.simplefilter("ignore")
    question = asked(place, models, prompts)
    started = time.monotonic()
    laid = make_plan(question)
    batches = sum(len(model.batches) for model in laid.models)
    report(f"plan of {laid.size:,} cells in {batches:,} batches", started)
    return laid


def store(folder: Path, place: Path, models: int = MODELS, prompts: int = PROMPTS) -> None:
    """Made numbers, in the batches of the plan."""
    from attnscope.experiment.measuring_environment import describe
    from attnscope.run.schemas import CELLS, TOKENS, VALUES
    from attnscope.run.writer import open_directory

    laid = plan(place, models, prompts)
    started, draw = time.monotonic(), np.random.default_rng(0)
    rows = [
        (layer, head, measure)
        for layer in range(LAYERS)
        for head in range(HEADS)
        for measure in ("entropy", "first_token")
    ]
    words = pl.DataFrame(rows, schema=["layer", "head", "measure"], orient="row")
    with open_directory(folder, laid.experiment) as directory:
        directory.write_lines("metadata.jsonl", laid.metadata)
        entries = {
            model.label: {"name": model.info.name, "revision": model.info.revision,
                          "architecture": model.info.architecture, "layers": model.info.layers,
                          "heads": model.info.heads, "bundled": False, "backend": "streaming",
                          "dtype": "float32", "device": "cpu", "parameters": 0,
                          "kv_heads": model.info.kv_heads}
            for model in laid.models
        }  # fmt: skip
        directory.write_json("environment.json", describe(laid) | {"models": entries})
        ids = []
        for model in laid.models:
            for batch in model.batches:
                cells = batch.by_prompt()
                whose = pl.DataFrame(
                    {"model": [model.label] * len(cells), "prompt": [c.prompt for c in cells],
                     "condition": [c.condition for c in cells]}
                )  # fmt: skip
                values = whose.join(words, how="cross").with_columns(
                    pl.lit("all").alias("queries"), pl.lit("all").alias("keys"),
                    pl.Series("value", draw.random(len(cells) * len(rows))),
                )  # fmt: skip
                tokens = whose.with_columns(
                    pl.lit(0).alias("position"), pl.lit(1).alias("id"), pl.lit("x").alias("text"),
                    pl.lit("text").alias("role"),
                )  # fmt: skip
                known = {"model": model.label, "filler_tokens": 0, "boundary_tokens": 0}
                made = [[(known | _as_dict(cell)).get(name) for name in CELLS] for cell in cells]
                tables = {"tokens": _whole(tokens, TOKENS), "values": _whole(values, VALUES)}
                directory.write_batch(batch.id, made, tables)
                ids.append(batch.id)
        directory.finish(laid.experiment, ids)
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    report(f"store of {len(files):,} files and {sum(files) / 1e9:.2f} GB", started)


def _as_dict(cell: Any) -> dict[str, Any]:
    return {"cell": cell.id, "prompt": cell.prompt, "condition": cell.condition,
            "tokens": len(cell.tokens), "base_boundary_tokens": 0}  # fmt: skip


def _whole(frame: pl.DataFrame, schema: pl.Schema) -> pl.DataFrame:
    missing = [pl.lit(None, kind).alias(name) for name, kind in schema.items()
               if name not in frame.columns]  # fmt: skip
    return frame.with_columns(missing).select(
        pl.col(name).cast(kind) for name, kind in schema.items()
    )


def resume(folder: Path, place: Path) -> None:
    """Start the run again where nothing is left to do: what `run` adds to the plan."""
    from attnscope.experiment.execute import run_plan

    laid = plan(place, *_size(folder))
    started = time.monotonic()
    outcome = run_plan(laid, folder)
    assert outcome.measured == 0, outcome
    report(f"resumed, {outcome.cells:,} cells there", started)


def _size(folder: Path) -> tuple[int, int]:
    from attnscope.spec.experiment_yaml import read_experiment

    question = read_experiment(folder / "experiment.yaml")
    return len(question.models), question.prompts.count


def read(folder: Path) -> None:
    """Each in a process of its own would start anew; here the peak is of all together."""
    import attnscope
    from attnscope.figures import draw
    from attnscope.stats.run_stats import compare_run

    started = time.monotonic()
    run = attnscope.open_run(folder)
    report(f"opened, {len(run.batches):,} batches", started)
    started = time.monotonic()
    found = run.sql("SELECT model, layer, avg(value) AS v FROM values GROUP BY model, layer")
    report(f"query with {found.height} rows", started)
    started = time.monotonic()
    table = compare_run(run)
    report(f"compare with {table.height:,} rows", started)
    started = time.monotonic()
    draw(run, "depth")
    report(f"figure of {len(run.experiment.models)} models", started)


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    home = Path(tempfile.gettempdir()) / "attnscope-survey-models"
    home.mkdir(exist_ok=True)
    if command == "plan":
        plan(home)
    elif command == "store":
        store(Path(rest[0]), home, *map(int, rest[1:]))
    elif command == "resume":
        resume(Path(rest[0]), home)
    else:
        read(Path(rest[0]))
