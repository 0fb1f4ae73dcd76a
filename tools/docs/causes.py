"""What matters, not what is looked at: answers under filler and ARM, and with attention cut.

    python tools/docs/causes.py math OUT --models zoo:math-qwen2 zoo:chat-llama --problems 100
    python tools/docs/causes.py direct OUT --models zoo:smollm2 --level 1 --problems 100
    python tools/docs/causes.py spatial OUT --models zoo:spatial-phys zoo:smollm2-phys --problems 40
    python tools/docs/causes.py cut OUT --models zoo:spatial-phys zoo:smollm2-phys --problems 60
    python tools/docs/causes.py heads OUT --models zoo:spatial-phys --problems 60 --layers 0 16 27
    python tools/docs/causes.py sweep OUT --models zoo:math-qwen2 --problems 200
    python tools/docs/causes.py harness OUT --models zoo:smollm2 --problems 40
    python tools/docs/causes.py check OUT --models zoo:smollm2
    python tools/docs/causes.py page OUT

Each but the last adds to the directory OUT and continues where it stopped (a model may be written
NAME=MODEL); the last writes docs/causes.md of all that is there, and the figures beside it.
"""

import argparse
import copy
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

import attnscope
from attnscope.evaluate.conditions import parse
from attnscope.evaluate.evaluation import Evaluation, evaluate
from attnscope.evaluate.intervention_effects import effects
from attnscope.evaluate.tasks import SEED
from attnscope.figures.export import save
from attnscope.figures.registry import draw_table
from attnscope.prompts import insert, math_samples, spatial_samples
from attnscope.tokens import DEFAULT, TokenizedPrompt, apply_chat_template, tokenize, tokenize_all
from attnscope.tokens.regions import Prompt, Region
from causes_page import CLASSES, SWEEP, page

CONDITIONS = {
    "math": ["baseline", "filler", "arm"],
    "spatial": ["baseline", *(f"knockout:{name}@maps" for name in CLASSES)],
}
DIRECT = "Answer with the number alone."
OTHERS = ("direct", "cut", "heads", "sweep", "harness", "check", "page")
HARNESS = ["baseline", "filler", "arm"]
# What `math` takes for the answer, as an expression: the number after these words, or the last one.
NUMBER = r"(?s)[Tt]he answer is:?\s*\**(-?\d[\d,]*)|(-?\d[\d,]*)(?!.*\d)"


def answer(
    name: str, out: Path, models: dict[str, str], problems: int, batch: int, level: int | None
) -> None:
    """Right answers of every model under every condition."""
    for label, model in models.items():
        asked = Evaluation(model=model, task=name, problems=problems, level=level)
        folder = out / f"{name}-{label}"
        found = evaluate(asked, CONDITIONS[name], folder, batch=batch)
        print(label, found, flush=True)


def directly(
    out: Path, models: dict[str, str], problems: int, batch: int, level: int | None
) -> None:
    """The same for word problems whose answer shall be the number alone: of models that talk longer
    than there is time for."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"direct-{level or 'all'}.jsonl"
    samples = math_samples(problems, seed=SEED, level=level)
    asked = (
        {"prompt": f"{s.prompt.text.partition(chr(10) * 2)[2]} {DIRECT}", "answer": s.answer}
        for s in samples
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in asked))
    for label, model in models.items():
        results = Evaluation(model=model, task=str(file), problems=problems)
        folder = out / f"direct-{label}"
        found = evaluate(results, CONDITIONS["math"], folder, batch=batch)
        print(label, found, flush=True)


def _spatial(name: str, problems: int) -> tuple[Any, Any, list[str], list[TokenizedPrompt]]:
    """A model, its tokenizer, the answers, and the prompts."""
    model, tokenizer = attnscope.load(name)
    samples = list(spatial_samples(problems, seed=SEED, split="test"))
    prompts = [sample.prompt for sample in samples]
    if tokenizer.chat_template:
        prompts = [apply_chat_template(prompt, tokenizer) for prompt in prompts]
    answers = [sample.answer or "" for sample in samples]
    return model, tokenizer, answers, list(tokenize_all(prompts, tokenizer))


def _kept(file: Path) -> list[list[dict[str, Any]]]:
    """What is there of each problem: a line, less one that was cut off."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    whole = [line for line in lines if line.endswith("\n")]
    file.write_text("".join(whole))
    return [json.loads(line) for line in whole]


def _add(file: Path, problem: int, rows: list[dict[str, Any]]) -> None:
    with file.open("a") as out:
        out.write(json.dumps([{**row, "problem": problem} for row in rows]) + "\n")


def heads(out: Path, models: dict[str, str], problems: int, layers: list[int] | None) -> None:
    """Mass and effect of every head: the last prompt token's attention to a class of the maps, and
    what cutting it does to the log-probability of the right answer."""
    classes = [f"{name}@maps" for name in CLASSES]
    for label, name in models.items():
        file = out / f"heads-{label}" / "effects.jsonl"
        done = len(_kept(file))
        model, tokenizer, answers, prompts = _spatial(name, problems)
        for n in range(done, problems):
            found = effects(model, tokenizer, [prompts[n]], [answers[n]], classes, layers=layers)
            _add(file, n, found.to_dicts())
            print(label, "heads", n + 1, problems, flush=True)
        rows = [row for some in _kept(file) for row in some]
        save(draw_table("mass-effect", pl.DataFrame(rows), of=f"{name}, spatial"), file.parent)


@torch.no_grad()
def cut(out: Path, models: dict[str, str], problems: int) -> None:
    """The same for all heads of all layers at once, beside as many tokens of the rest of the prompt
    drawn by chance."""
    for label, name in models.items():
        file = out / f"cut-{label}" / "cut.jsonl"
        done = len(_kept(file))
        model, tokenizer, answers, prompts = _spatial(name, problems)
        for n in range(done, problems):
            found = _cut(model, tokenizer, answers[n], prompts[n], n)
            _add(file, n, found)
            print(label, "cut", n + 1, problems, flush=True)


def _cut(
    model: Any, tokenizer: Any, answer: str, prompt: TokenizedPrompt, seed: int
) -> list[dict[str, Any]]:
    answered = tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[*prompt.ids.tolist(), *answered]])
    P, N = len(prompt), ids.shape[1]
    last = torch.arange(N)[None] == P - 1
    kept = torch.arange(P - 1, N - 1)
    with attnscope.watch(model, queries=last) as scope:
        plain = model(input_ids=ids, logits_to_keep=kept).logits.double().log_softmax(-1)
    keys = _keys(tokenizer, ids.numpy(), prompt, np.random.default_rng([SEED, seed]))
    meant = torch.from_numpy(np.stack(list(keys.values())))
    many = ids.expand(len(keys), -1)
    with attnscope.knockout(model, keys=meant):
        changed = model(input_ids=many, logits_to_keep=kept).logits.double().log_softmax(-1)
    log_probs = (changed - plain).gather(2, many[:, kept + 1, None])[..., 0].sum(1).tolist()
    kl = (plain[:, 0].exp() * (plain[:, 0] - changed[:, 0])).sum(-1).clamp(min=0).tolist()
    rows = []
    for at, name in enumerate(keys):
        mass = [float(scope.mass(n, meant[at : at + 1].long(), 2)[0, :, 1].mean())
                for n in scope.layers]  # fmt: skip
        row = {"keys": name, "tokens": int(meant[at].sum()), "mass": float(np.mean(mass))}
        rows.append({**row, "logprob": log_probs[at], "kl": kl[at]})
    return rows


def _keys(
    tokenizer: Any, ids: Any, prompt: TokenizedPrompt, draw: np.random.Generator
) -> dict[str, Any]:
    """bool [tokens] for every class of the maps that there is, and for as many others, of which
    the first token, on which much attention rests, is none."""
    of_class = DEFAULT.ids(ids, tokenizer)[0]
    maps = np.zeros(len(of_class), dtype=bool)
    maps[: len(prompt)] = prompt.mask("maps")
    others = np.flatnonzero(~maps[: len(prompt)])[1:]
    found = {}
    for name in CLASSES:
        mine = maps & (of_class == DEFAULT.index(name))
        if mine.any():
            chance = np.zeros_like(mine)
            chance[draw.choice(others, min(int(mine.sum()), len(others)), replace=False)] = True
            found |= {name: mine, f"{name}: as many others": chance}
    return found


def sensitivity(out: Path, models: dict[str, str], problems: int, batch: int) -> None:
    """The settings of filler and ARM, varied."""
    for label, model in models.items():
        asked = Evaluation(model=model, problems=problems)
        folder = out / f"sweep-{label}"
        print(label, evaluate(asked, SWEEP, folder, batch=batch), flush=True)


def harness(out: Path, models: dict[str, str], problems: int, batch: int) -> None:
    """lm-evaluation-harness on task files of ours, and whether our own scorer says the same."""
    for label, model in models.items():
        folder = out / f"harness-{label}"
        file = _task_files(folder, problems)
        own = Evaluation(model=model, task="math", problems=problems, level=1)
        evaluate(own, HARNESS, folder / "own", batch=batch)
        results: dict[str, float] = {}
        for name, chat in (("generated", None), ("chosen", False)):
            of = str(folder / f"{name}.yaml")
            asked = Evaluation(model=model, task=of, problems=problems, chat=chat)
            print(evaluate(asked, HARNESS, folder / name, batch=batch), flush=True)
            results |= (
                _check_answers(folder) if chat is None else _check_choices(model, file, folder)
            )
            (folder / "check.json").write_text(json.dumps(results))
            print(results, flush=True)


def _task_files(folder: Path, problems: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "problems.jsonl"
    lines, system = [], ""
    for sample in math_samples(problems, seed=SEED, level=1):
        system, _, question = sample.prompt.text.partition("\n\n")
        right, prompt = int(sample.answer or 0), f"{sample.prompt.text}\nThe answer is"
        choices = [str(right + n) for n in (1, 0, -3)]
        line = {"question": question, "prompt": prompt, "answer": str(right), "choices": choices}
        lines.append(line)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {file.resolve()}}}}}\n"
        "test_split: test\n"
    )
    (folder / "generated.yaml").write_text(
        f"task: generated\n{data}output_type: generate_until\n"
        f"description: {json.dumps(system)}\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        "generation_kwargs: {until: [], max_gen_toks: 64, do_sample: false}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true,"
        ' regexes_to_ignore: [","]}]\nfilter_list: [{name: number, filter: [{function: regex,'
        f" regex_pattern: {json.dumps(NUMBER)}}}, {{function: take_first}}]}}]\n"
    )
    (folder / "chosen.yaml").write_text(
        f"task: chosen\n{data}output_type: multiple_choice\n"
        'doc_to_text: "{{prompt}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: 1\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    return file


def _check_answers(folder: Path) -> dict[str, int]:
    """Whether the harness found the same numbers in what was generated, and judged them alike."""
    own = attnscope.open_run(folder / "own").completions
    theirs = attnscope.open_run(folder / "generated").completions
    both = theirs.join(own, on=["condition", "prompt"], suffix="_own")
    found = [re.search(NUMBER, text) for text in both["completion_own"]]
    numbers = ["[invalid]" if one is None else one[1] or one[2] for one in found]
    return {
        "answers": len(both),
        "same answers": sum(a == b for a, b in zip(both["completion"], numbers, strict=True)),
        "same scores": int((both["value"] == both["value_own"]).sum()),
    }


@torch.no_grad()
def _check_choices(name: str, file: Path, folder: Path) -> dict[str, float]:
    """Log-likelihoods of the harness's run, one forward pass after the other, without padding."""
    model, tokenizer = attnscope.load(name)
    rows = attnscope.open_run(folder / "chosen").completions
    off, right, count = [0.0], 0, 0
    for n, line in enumerate(map(json.loads, file.read_text().splitlines())):
        for condition in HARNESS:
            text = line["prompt"]
            put = _with_filler(text, tokenizer, condition)
            found = [_likelihood(model, tokenizer, condition, put, c) for c in line["choices"]]
            row = rows.filter(prompt=n, condition=condition).row(0, named=True)
            parts = row["completion"].split(" | ")
            log_probs = [float(part.split(",")[0].strip("([")) for part in parts]
            off += np.abs(np.subtract(log_probs, found)).tolist()
            right += row["value"] == float(np.argmax(found) == 1)
            count += 1
    return {"largest difference": max(off), "choices": count, "same choices": int(right)}


def _with_filler(text: str, tokenizer: Any, condition: str) -> str:
    filler = parse(condition).insert
    if filler is None:
        return text
    prompt = tokenize(Prompt(text, (Region(0, len(text), "question"),)), tokenizer)
    return insert(prompt, filler.filler(0), tokenizer).variant.prompt.text


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
        log_probs = model(input_ids=ids).logits.float().log_softmax(-1)[0, :-1]
    return float(log_probs.gather(1, ids[0, 1:, None])[before - 1 :].double().sum())


@torch.no_grad()
def check(out: Path, models: dict[str, str]) -> None:
    """Statistics of activations against numpy on the activations themselves; knockout and steering
    against float64 attention with −inf or the bias on those entries."""
    for label, name in models.items():
        model, tokenizer = attnscope.load(name)
        text = " ".join(sample.prompt.text for sample in math_samples(3, seed=SEED))
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        results = {"tokens": ids.shape[1], **_activations(model, ids), **_links(model, ids)}
        out.mkdir(parents=True, exist_ok=True)
        (out / f"check-{label}.json").write_text(json.dumps(results))
        print(label, results, flush=True)


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


def main() -> None:
    """Do one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*CONDITIONS, *OTHERS])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--level", type=int, help="of math; default: all in turn")
    parser.add_argument("--layers", nargs="*", type=int, help="layers of heads; default: all")
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
    elif given.what == "direct":
        directly(given.out, models, given.problems, given.batch, given.level)
    elif given.what == "cut":
        cut(given.out, models, given.problems)
    elif given.what == "heads":
        heads(given.out, models, given.problems, given.layers)
    elif given.what in ("sweep", "harness"):
        function = sensitivity if given.what == "sweep" else harness
        function(given.out, models, given.problems, given.batch)
    else:
        answer(given.what, given.out, models, given.problems, given.batch, given.level)


if __name__ == "__main__":
    main()
