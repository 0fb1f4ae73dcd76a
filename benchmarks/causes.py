"""What matters, not what is looked at: answers under filler and ARM, and with attention cut.

    python benchmarks/causes.py math OUT --models zoo:math-qwen2 zoo:chat-llama --problems 100
    python benchmarks/causes.py spatial OUT --models zoo:spatial-phys zoo:smollm2-phys --problems 40
    python benchmarks/causes.py heads OUT --models zoo:spatial-phys --problems 5 --layers 0 16 27
    python benchmarks/causes.py page OUT > docs/causes.md

Each of the first three adds to the directory OUT and continues where it stopped (a model may be
written NAME=MODEL); the last makes the page of all that is there, and the figure beside it.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

import attnscope
from attnscope.evaluate.run import Evaluation, evaluate
from attnscope.evaluate.tasks import task
from attnscope.interventions.effect import effect
from attnscope.tokens import DEFAULT, apply_chat_template, tokenize

CLASSES = ("hash", "star", "whitespace")
CONDITIONS = {
    "math": ["baseline", "filler", "arm"],
    "spatial": ["baseline", *(f"knockout:{name}@maps" for name in CLASSES)],
}


def answer(name: str, out: Path, models: dict[str, str], problems: int, batch: int) -> None:
    """Right answers of every model under every condition."""
    for label, model in models.items():
        asked = Evaluation(model=model, task=name, problems=problems)
        folder = out / f"{name}-{label}"
        found = evaluate(asked, CONDITIONS[name], folder, batch=batch, progress=print)
        print(label, found, flush=True)


def heads(out: Path, models: dict[str, str], problems: int, layers: list[int] | None) -> None:
    """Mass and effect of every head: the last prompt token's attention to a class of the maps, and
    what cutting it does to the log-probability of the right answer."""
    for label, name in models.items():
        model, tokenizer = attnscope.load(name)
        rows = []
        for n, sample in enumerate(task("spatial", problems).samples):
            asked = tokenize(apply_chat_template(sample.prompt, tokenizer), tokenizer)
            answered = tokenizer(sample.answer, add_special_tokens=False)["input_ids"]
            ids = torch.tensor([[*asked.ids.tolist(), *answered]])
            said = torch.arange(ids.shape[1])[None] >= len(asked)
            maps = np.zeros((1, ids.shape[1]), dtype=bool)
            maps[0, : len(asked)] = asked.mask("maps")
            classes = DEFAULT.ids(ids.numpy(), tokenizer)
            with torch.no_grad(), attnscope.watch(model, queries=_last(len(asked), ids)) as scope:
                model(input_ids=ids)
            for token_class in CLASSES:
                keys = torch.from_numpy((classes == DEFAULT.index(token_class)) & maps)
                if not bool(keys.any()):
                    continue
                found = effect(model, {"input_ids": ids}, keys=keys, answer=said, layers=layers)
                for at, layer in enumerate(found.layers):
                    mass = scope.mass(layer, keys.long(), 2)[0, :, 1].tolist()
                    more = found.logprob[0, at].tolist()
                    rows += [
                        {"problem": n, "class": token_class, "layer": layer, "head": head}
                        | {"mass": a, "effect": b}
                        for head, (a, b) in enumerate(zip(mass, more, strict=True))
                    ]
            print(label, n, flush=True)
        out.mkdir(parents=True, exist_ok=True)
        pl.DataFrame(rows).write_csv(out / f"heads-{label}.csv")


def _last(n: int, ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1])[None] == n - 1


def page(out: Path) -> None:
    """All that is there, as Markdown; and the figure of the first model's heads."""
    print("# Causes")
    print(
        "Made by `benchmarks/causes.py`. Scores are shares of problems answered exactly; "
        "differences are paired by problem, with 95 % intervals and p-values as in "
        "[statistics.md](statistics.md). Small numbers of problems say little: n stands in every "
        "row.\n"
    )
    for name, title in (
        ("math", "Baseline, filler, ARM on word problems"),
        ("spatial", "Nobody looks at these characters of the maps"),
    ):
        print(f"## {title}")
        print("| model | condition | n | score | difference | 95 % | p |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for folder in sorted(out.glob(f"{name}-*")):
            for row in pl.read_csv(folder / "table.csv").iter_rows(named=True):
                print(_line(folder.name.removeprefix(f"{name}-"), row))
        print()
    print("## Is what is looked at what matters?")
    print(
        "Every head by itself: the mass that the last prompt token puts on a class of the maps' "
        "tokens, and the change of the right answer's log-probability (in nats) when nobody can "
        "look at them in that head. Means over problems; ρ is Spearman's correlation of mass and "
        "|effect| over heads.\n"
    )
    print("| model | class | problems | heads | ρ | most mass | its effect | largest effect |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for file in sorted(out.glob("heads-*.csv")):
        _heads_lines(file.stem.removeprefix("heads-"), pl.read_csv(file))
    files = sorted(out.glob("heads-*.csv"))
    if files:
        chart(pl.read_csv(files[0]), Path("docs/images/causes-heads.png"))
        label = files[0].stem.removeprefix("heads-")
        print(
            f"\n![Mass and effect of every head of {label}, side by side, for hash, star and "
            "whitespace](images/causes-heads.png)"
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
        mine = rows.filter(pl.col("class") == name)
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


def chart(rows: pl.DataFrame, file: Path) -> None:
    """Mass above, effect below, layers × heads, a column for each class."""
    import altair as alt

    mean = rows.group_by("class", "layer", "head").agg(
        pl.col("mass").mean(), pl.col("effect").mean()
    )
    most = float(mean["effect"].abs().max() or 1)

    def squares(value: str, name: str, scale: alt.Scale) -> alt.Chart:
        return (
            alt.Chart(mean.filter(pl.col("class") == name))
            .mark_rect()
            .encode(
                x=alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0)),
                y=alt.Y("layer:O", title="layer"),
                color=alt.Color(f"{value}:Q", scale=scale, title=value),
            )
            .properties(width=200, height=160, title=f"{value}, {name}")
        )

    above = [squares("mass", n, alt.Scale(scheme="blues", domainMin=0)) for n in CLASSES]
    both = alt.Scale(scheme="redblue", domain=[-most, most])
    below = [squares("effect", name, both) for name in CLASSES]
    whole = alt.vconcat(alt.hconcat(*above), alt.hconcat(*below)).resolve_scale(color="independent")
    file.parent.mkdir(parents=True, exist_ok=True)
    whole.save(file, scale_factor=2)


def main() -> None:
    """Do one of the four."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*CONDITIONS, "heads", "page"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--layers", nargs="*", type=int, help="of heads; all if not said")
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args()
    models = {}
    for text in given.models:
        label, _, name = text.rpartition("=")
        models[label or name.removeprefix("zoo:")] = name
    if given.what == "page":
        page(given.out)
    elif given.what == "heads":
        heads(given.out, models, given.problems, given.layers)
    else:
        answer(given.what, given.out, models, given.problems, given.batch)


if __name__ == "__main__":
    main()
