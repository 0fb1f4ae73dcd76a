"""What matters, not what is looked at: answers under filler and ARM, and with attention cut.

    python benchmarks/causes.py math OUT --models zoo:math-qwen2 zoo:chat-llama --problems 100
    python benchmarks/causes.py spatial OUT --models zoo:spatial-phys zoo:smollm2-phys --problems 40
    python benchmarks/causes.py heads OUT --models zoo:spatial-phys --problems 5 --layers 0 16 27
    python benchmarks/causes.py sweep OUT --models zoo:math-qwen2 --problems 200
    python benchmarks/causes.py harness OUT --models zoo:smollm2 --problems 40
    python benchmarks/causes.py check OUT --models zoo:smollm2
    python benchmarks/causes.py page OUT > docs/causes.md

Each but the last adds to the directory OUT and continues where it stopped (a model may be written
NAME=MODEL); the last makes the page of all that is there, and the figures beside it.
"""

import argparse
import copy
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

import attnscope
from attnscope.evaluate.conditions import parse
from attnscope.evaluate.run import Evaluation, evaluate, measure_effects
from attnscope.evaluate.tasks import SEED
from attnscope.prompts import math_samples
from attnscope.tokens import DEFAULT, tokenize
from attnscope.tokens.regions import Prompt, Region

CLASSES = ("hash", "star", "whitespace")
CONDITIONS = {
    "math": ["baseline", "filler", "arm"],
    "spatial": ["baseline", *(f"knockout:{name}@maps" for name in CLASSES)],
}
SWEEP = [
    "baseline",
    "filler:10|25|40|55|70",
    "filler:55:/@before-system|between|end|random",
    "arm:c=0.05|0.15|0.25|0.35|0.45",
    "arm:p1=70|80|90|99.5",
    "arm:layer=0|1|2|3|4|5",
]
HARNESS = ["baseline", "arm", "filler", "knockout:digit"]


def answer(
    name: str, out: Path, models: dict[str, str], problems: int, batch: int, level: int | None
) -> None:
    """Right answers of every model under every condition."""
    for label, model in models.items():
        asked = Evaluation(model=model, task=name, problems=problems, level=level)
        folder = out / f"{name}-{label}"
        found = evaluate(asked, CONDITIONS[name], folder, batch=batch, progress=print)
        print(label, found, flush=True)


def heads(out: Path, models: dict[str, str], problems: int, layers: list[int] | None) -> None:
    """Mass and effect of every head: the last prompt token's attention to a class of the maps, and
    what cutting it does to the log-probability of the right answer."""
    for label, model in models.items():
        asked = Evaluation(model=model, task="spatial", problems=problems)
        classes = [f"{name}@maps" for name in CLASSES]
        measure_effects(asked, classes, out / f"heads-{label}", layers=layers, progress=print)


def sensitivity(out: Path, models: dict[str, str], problems: int, batch: int) -> None:
    """The settings of filler and ARM, varied."""
    for label, model in models.items():
        asked = Evaluation(model=model, problems=problems)
        folder = out / f"sweep-{label}"
        print(label, evaluate(asked, SWEEP, folder, batch=batch, progress=print), flush=True)


def harness(out: Path, models: dict[str, str], problems: int, batch: int) -> None:
    """lm-evaluation-harness on task files of ours, and whether our own scorer says the same."""
    for label, model in models.items():
        folder = out / f"harness-{label}"
        file = _task_files(folder, problems)
        common = {"model": model, "problems": problems, "chat": False}
        own = Evaluation(task=str(file), **common)
        evaluate(own, HARNESS, folder / "own", batch=batch, progress=print)
        for name in ("said", "chosen"):
            asked = Evaluation(task=str(folder / f"{name}.yaml"), **common)
            print(evaluate(asked, HARNESS, folder / name, batch=batch, progress=print), flush=True)
        _check_choices(model, file, folder)


def _task_files(folder: Path, problems: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "problems.jsonl"
    lines = []
    for sample in math_samples(problems, seed=SEED, level=1):
        right, prompt = int(sample.answer or 0), f"{sample.prompt.text}\nThe answer is"
        choices = [str(right + n) for n in (1, 0, -3)]
        lines.append({"prompt": prompt, "answer": str(right), "choices": choices})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {file.resolve()}}}}}\n"
        'test_split: test\ndoc_to_text: "{{prompt}}"\n'
    )
    (folder / "said.yaml").write_text(
        f"task: said\n{data}output_type: generate_until\n"
        'doc_to_target: "{{answer}}"\n'
        'generation_kwargs: {until: ["."], max_gen_toks: 16, do_sample: false}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true,"
        " ignore_punctuation: true}]\nfilter_list: [{name: number, filter: [{function: regex,"
        ' regex_pattern: "(-?[0-9]+)"}, {function: take_first}]}]\n'
    )
    (folder / "chosen.yaml").write_text(
        f"task: chosen\n{data}output_type: multiple_choice\n"
        'doc_to_choice: "{{choices}}"\ndoc_to_target: 1\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    return file


@torch.no_grad()
def _check_choices(name: str, file: Path, folder: Path) -> None:
    """Log-likelihoods of the harness's run, one forward pass after the other, without padding."""
    model, tokenizer = attnscope.load(name)
    rows = pl.read_ndjson(folder / "chosen" / "samples.jsonl")
    off, right, count = [0.0], 0, 0
    for n, line in enumerate(map(json.loads, file.read_text().splitlines())):
        for condition in HARNESS:
            text = line["prompt"]
            put = parse(condition).asked(_question(text, tokenizer), tokenizer).prompt.text
            found = [_likelihood(model, tokenizer, condition, put, c) for c in line["choices"]]
            row = rows.filter(problem=n, condition=condition).row(0, named=True)
            said = [float(part.split(",")[0].strip("([")) for part in row["said"].split(" | ")]
            off += np.abs(np.subtract(said, found)).tolist()
            right += row["value"] == float(np.argmax(found) == 1)
            count += 1
    told = {"largest difference": max(off), "choices": count, "same choices": int(right)}
    own = pl.read_ndjson(folder / "own" / "answers.jsonl")
    theirs = pl.read_ndjson(folder / "said" / "samples.jsonl")
    both = theirs.join(own, on=["condition", "problem"], suffix="_own")
    number = r"(-?[0-9]+)"
    first = [re.search(number, text.split(".")[0]) for text in both["said_own"]]
    alike = [
        said == (found[1] if found else "[invalid]")
        for said, found in zip(both["said"], first, strict=True)
    ]
    told |= {"answers": len(alike), "same answers": sum(alike)}
    (folder / "check.json").write_text(json.dumps(told))
    print(told, flush=True)


def _question(text: str, tokenizer: Any) -> Any:
    return tokenize(Prompt(text, (Region(0, len(text), "question"),)), tokenizer)


def _likelihood(model: Any, tokenizer: Any, condition: str, text: str, choice: str) -> float:
    before = len(tokenizer(text)["input_ids"])
    ids = torch.tensor([tokenizer(f"{text} {choice}")["input_ids"]])
    block: Any = nullcontext()
    if condition == "arm":
        block = attnscope.arm(model)
    elif condition.startswith("knockout"):
        of = DEFAULT.ids(ids.numpy(), tokenizer) == DEFAULT.index(condition.partition(":")[2])
        of &= np.arange(of.shape[1]) < before
        block = attnscope.knockout(model, keys=torch.from_numpy(of))
    with block:
        said = model(input_ids=ids).logits.float().log_softmax(-1)[0, :-1]
    return float(said.gather(1, ids[0, 1:, None])[before - 1 :].double().sum())


@torch.no_grad()
def check(out: Path, models: dict[str, str]) -> None:
    """Statistics of activations against numpy on the activations themselves; knockout and steering
    against float64 attention with −inf or the bias on those entries."""
    for label, name in models.items():
        model, tokenizer = attnscope.load(name)
        text = " ".join(sample.prompt.text for sample in math_samples(3, seed=SEED))
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        told = {"tokens": ids.shape[1], **_activations(model, ids), **_links(model, ids)}
        out.mkdir(parents=True, exist_ok=True)
        (out / f"check-{label}.json").write_text(json.dumps(told))
        print(label, told, flush=True)


def _activations(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """The largest errors over layers: of exact statistics relative to themselves; of sketched ones
    as the bounds are stated."""
    stored: dict[int, Any] = {}
    layers = model.model.layers
    hooks = [
        layer.mlp.act_fn.register_forward_hook(
            lambda module, args, output, n=n: stored.update({n: output[0].double().numpy()})
        )
        for n, layer in enumerate(layers)
    ]
    near = {("mlp", n): torch.tensor([0.05], dtype=torch.float64) for n in range(len(layers))}
    with attnscope.record(model, "mlp", near=near) as got:
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    exact, quantile, gini = [0.0], [0.0], [0.0]
    for n, a in stored.items():
        size = np.abs(a)
        wanted = {
            "l1": size.sum(1).mean(),
            "l2": np.sqrt((a**2).sum(1)).mean(),
            "variance": a.var(),
            "near_zero": (size < 0.05).mean(),
        }
        exact += [abs(float(getattr(got, m)("mlp", n)[0]) / w - 1) for m, w in wanted.items()]
        largest = got.largest("mlp", n)[0]
        exact.append(abs(abs(largest.value) / size.max() - 1) if largest else np.inf)
        order = np.sort(a, axis=None)
        for q in (0.01, 0.25, 0.5, 0.75, 0.99):
            true = order[int(np.floor(q * (len(order) - 1)))]
            quantile.append(abs(float(got.quantile("mlp", n, q)[0]) / true - 1))
        sizes, N = np.sort(size, axis=None), size.size
        true = (2 * np.arange(1, N + 1) - N - 1) @ sizes / (N * sizes.sum())
        gini.append(abs(float(got.gini("mlp", n)[0]) - true))
    return {"exact": max(exact), "quantile": max(quantile), "gini": max(gini)}


def _links(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Logits under a knockout or steering, off by how much of the largest."""
    N, H = ids.shape[1], model.config.num_attention_heads
    keys = torch.arange(N)[None] % 5 == 3
    rows = torch.arange(N)[None] % 4 == 1
    heads = [0, H - 1]
    of_heads = torch.isin(torch.arange(H), torch.tensor(heads))[None, :, None, None]
    entries = keys[:, None, None] & torch.ones(N, 1, dtype=torch.bool)
    some = keys[:, None, None] & rows[:, None, :, None]
    cases: dict[str, tuple[Any, torch.Tensor, float]] = {
        "knockout": (attnscope.knockout(model, keys=keys), entries, -np.inf),
        "knockout, queries": (attnscope.knockout(model, keys=keys, queries=rows), some, -np.inf),
        "knockout, heads": (
            attnscope.knockout(model, keys=keys, heads=heads),
            entries & of_heads,
            -np.inf,
        ),
        "steer": (attnscope.steer(model, keys=keys, factor=3.0), entries, np.log(3.0)),
    }
    dense = copy.deepcopy(model).double()
    dense.set_attn_implementation("eager")
    causal = torch.zeros(1, 1, N, N, dtype=torch.float64)
    causal.masked_fill_(torch.arange(N)[:, None] < torch.arange(N), -torch.inf)
    found = {}
    for name, (block, where, bias) in cases.items():
        mask = causal + torch.zeros(where.shape, dtype=torch.float64).masked_fill(where, bias)
        wanted = dense(input_ids=ids, attention_mask=mask).logits
        with block:
            got = model(input_ids=ids).logits
        found[name] = float((got - wanted).abs().max() / wanted.abs().max())
    return found


def page(out: Path) -> None:
    """All that is there, as Markdown; figures go into docs/images."""
    print("# Causes")
    print(
        "Made by `benchmarks/causes.py`. Scores are shares of problems answered exactly; "
        "differences are paired by problem, with 95 % intervals and p-values as in "
        "[statistics.md](statistics.md). n stands in every row.\n"
    )
    for name, title in (
        ("math", "Baseline, filler, ARM on word problems"),
        ("spatial", "Nobody looks at these characters of the maps"),
    ):
        print(f"## {title}")
        print("| model | condition | n | score | difference | 95 % | p |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for folder in sorted(out.glob(f"{name}-*/table.csv")):
            for row in pl.read_csv(folder).iter_rows(named=True):
                print(_line(folder.parent.name.removeprefix(f"{name}-"), row))
        print()
    _heads_section(out)
    _sweep_section(out)
    _harness_section(out)
    _check_section(out)


def _check_section(out: Path) -> None:
    files = sorted(out.glob("check-*.json"))
    if not files:
        return
    print("## Checked on these weights")
    print(
        "Statistics of activations against numpy on the stored activations of all layers (exact "
        "ones relative to themselves; quantiles are promised within 2 % of themselves, the Gini "
        "coefficient within 0.005), and logits under knockout and steering against float64 "
        "attention with −inf or the bias on those entries, as a share of the largest logit.\n"
    )
    first = json.loads(files[0].read_text())
    print("| model | " + " | ".join(first) + " |")
    print("| --- " * (1 + len(first)) + "|")
    for file in files:
        told = json.loads(file.read_text())
        cells = [f"{v:.1e}" if isinstance(v, float) else str(v) for v in told.values()]
        print(f"| {file.stem.removeprefix('check-')} | " + " | ".join(cells) + " |")


def _shown(file: Path, name: str, alt: str) -> None:
    images = Path("docs/images")
    images.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, images / name)
    print(f"\n![{alt}](images/{name})\n")


def _heads_section(out: Path) -> None:
    print("## Is what is looked at what matters?")
    print(
        "Every head by itself: the mass that the last prompt token puts on a class of the maps' "
        "tokens, and the change of the right answer's log-probability (in nats) when nobody can "
        "look at them in that head. Means over problems; ρ is Spearman's correlation of mass and "
        "|effect| over heads.\n"
    )
    print("| model | class | problems | heads | ρ | most mass | its effect | largest effect |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    files = sorted(out.glob("heads-*/effects.csv"))
    for file in files:
        _heads_lines(file.parent.name.removeprefix("heads-"), pl.read_csv(file))
    for file in files:
        label = file.parent.name.removeprefix("heads-")
        alt = f"Mass above and effect below, of every head of {label}, on hash, star and whitespace"
        _shown(file.parent / "mass-effect.png", f"causes-heads-{label}.png", alt)


def _sweep_section(out: Path) -> None:
    files = sorted(out.glob("sweep-*/sweep.png"))
    if files:
        print("## How much the settings matter")
    for file in files:
        label = file.parent.name.removeprefix("sweep-")
        asked = " ".join(SWEEP)
        problems = json.loads((file.parent / "evaluation.json").read_text())["problems"]
        print(f"```\nattnscope evaluate {label} --problems {problems} --out DIR \\")
        print(f'    --conditions "{asked}"\n```')
        alt = f"Score of {label} minus its baseline over the settings of filler and ARM"
        _shown(file, f"causes-sweep-{label}.png", alt)


def _harness_section(out: Path) -> None:
    folders = sorted(out.glob("harness-*"))
    if folders:
        print("## lm-evaluation-harness")
        print(
            "Two task files of ours (YAML and JSONL, no network): one whose answers are generated, "
            "one whose choices are compared by likelihood. Entropy and first-token mass are of the "
            "attention from the last prompt token, mean over layers, heads and documents.\n"
        )
        print(
            "| model | task | condition | n | score | difference | 95 % | entropy | first token |"
        )
        print("| --- " * 9 + "|")
    for folder in folders:
        label = folder.name.removeprefix("harness-")
        for name in ("said", "chosen"):
            for row in pl.read_csv(folder / name / "table.csv").iter_rows(named=True):
                reach = "" if row["low"] is None else f"{row['low']:+.3f} … {row['high']:+.3f}"
                change = "" if row["difference"] is None else f"{row['difference']:+.3f}"
                print(
                    f"| {label} | {name} | {row['condition']} | {row['problems']} | "
                    f"{row['score']:.3f} | {change} | {reach} | {row['entropy']:.3f} | "
                    f"{row['first_token']:.3f} |"
                )
    for folder in folders:
        told = json.loads((folder / "check.json").read_text())
        print(
            f"\n{folder.name.removeprefix('harness-')}: {told['same answers']} of "
            f"{told['answers']} generated answers are those of `attnscope evaluate` on the same "
            f"problems; {told['same choices']} of {told['choices']} choices are those of one "
            "unpadded forward pass after the other, whose log-likelihoods differ by "
            f"{told['largest difference']:.1e} at most."
        )


def _line(label: str, row: dict[str, Any]) -> str:
    change = reach = p = ""
    if row["difference"] is not None:
        change = f"{row['difference']:+.3f}"
    if row["low"] is not None:
        reach, p = f"{row['low']:+.3f} … {row['high']:+.3f}", f"{max(row['p'], 0.001):.3f}"
        p = f"< {p}" if row["p"] < 0.001 else p
    score = f"{row['score']:.3f}"
    return (
        f"| {label} | {row['condition']} | {row['problems']} | {score} | {change} | {reach} | {p} |"
    )


def _heads_lines(label: str, rows: pl.DataFrame) -> None:
    from scipy.stats import spearmanr

    for name in CLASSES:
        mine = rows.filter(pl.col("class") == f"{name}@maps")
        n = mine["problem"].n_unique()
        mean = mine.group_by("layer", "head").agg(pl.col("mass").mean(), pl.col("effect").mean())
        rho = spearmanr(mean["mass"], mean["effect"].abs()).statistic
        top = mean.sort("mass", descending=True).row(0, named=True)
        far = mean.sort(pl.col("effect").abs(), descending=True).row(0, named=True)
        print(
            f"| {label} | {name} | {n} | {len(mean)} | {rho:.2f} | {top['mass']:.3f} "
            f"(layer {top['layer']}, head {top['head']}) | {top['effect']:+.1e} | "
            f"{far['effect']:+.1e} (layer {far['layer']}, head {far['head']}, mass "
            f"{far['mass']:.3f}) |"
        )


def main() -> None:
    """Do one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*CONDITIONS, "heads", "sweep", "harness", "check", "page"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--level", type=int, help="of math; all in turn if not said")
    parser.add_argument("--layers", nargs="*", type=int, help="of heads; all if not said")
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args()
    models = {}
    for text in given.models:
        label, _, name = text.rpartition("=")
        models[label or name.removeprefix("zoo:")] = name
    if given.what == "page":
        page(given.out)
    elif given.what == "check":
        check(given.out, models)
    elif given.what == "heads":
        heads(given.out, models, given.problems, given.layers)
    elif given.what in ("sweep", "harness"):
        function = sensitivity if given.what == "sweep" else harness
        function(given.out, models, given.problems, given.batch)
    else:
        answer(given.what, given.out, models, given.problems, given.batch, given.level)


if __name__ == "__main__":
    main()
